"""A scripted engine that speaks ipc/messages.py without MLX: the other end of the seam, for fast tests.

Usage, in a test's event loop:

    fake = FakeEngine(step_seconds=0.001)
    supervisor = Supervisor(settings, "model", counts, spawn=fake.spawn)
    await supervisor.start(); await supervisor.wait_known()
    async with supervisor.open([sequence], endpoint="chat") as live: ...
    assert tokens == fake.expected(sequence)          # what an engine that never dies would have said

What it says: token `position` of a sequence is `fake.say(sequence, position)`; the default is a hash of (prompt, seed,
choice, position), so a token lost or repeated at a seam shows. Pass `say=` to script other ids (text, stop ids).
It ends rows by max_tokens ("length") and stop_ids ("stop", from min_tokens on; the id is delivered).

What it can be asked for (from the event loop's thread; all but `starts` and `poison` act on the living engine):
    fake.starts = ["die", "hang", "load_failed", "garbage", "no_spawn", "ok"]   one entry a start, then "ok" for ever
                 = ["die@hello", "die@ready", "die@submit", "die@taken", "die@prefill", "die@token:3"]   where it dies:
                   before it reads its first command; once it's ready; when it's given a sequence, before it has taken
                   it or after; when it has begun to read one; after 3 of its steps
    fake.poison[token] = Poison(after=5, how="die")     a prompt with that token ends or stalls its engine; how:
                                                        die | stall | garbage | fail (this row only)
    fake.die()  fake.burst(3, then="die")  fake.tear()  fake.garbage()  fake.stall()  fake.close()
    fake.freeze()  fake.thaw()      SIGSTOP and SIGCONT: nothing of it moves, its heartbeat neither
    fake.loads.clear()  fake.loads.set()  engines stay at loading in between; they report, read commands and can die
    fake.preempt(seq=None)  fake.rotate()  fake.fail_row(seq, kind)  fake.pressure = "hold"
    fake.spare_starts = ["die", "hang", "garbage", "no_spawn", "ok"]   the same for spare engines
What it shows: fake.rows, fake.submits, fake.cancels, fake.commands (newest life first to last), fake.lives, fake.alive.

As a process: `process_spawn(*arguments)` is a `spawn` that starts this file with `--fd N`; the same engine, real pid.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from server.ipc import framing, messages
from server.ipc.probe import LayerCost, Probe
from server.ipc.sequence import Finish, TokenLogprobs, TokenSequence
from server.ipc.snapshot import PromptProgress, Snapshot

FIRST_TOKEN = 3  # 0, 1 and 2 are left for stop ids
GARBAGE = b"\xff\xff\xff\xffno frame at all"


@dataclass
class Poison:
    """What a sequence does to its engine once it has produced `after` tokens in it (0: during prefill)."""

    after: int = 0
    how: str = "die"


@dataclass
class Row:
    seq: int
    sequence: TokenSequence
    generated: list[int]
    started: bool = False
    produced: int = 0  # in this engine
    read: int = 0  # tokens of its prompt, while that is read


def raised() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class FakeEngine:
    """The script, and the handle on whichever engine lives at the moment."""

    step_seconds: float = 0.0005
    load_seconds: float = 0.0
    loads: asyncio.Event = field(default_factory=raised)  # cleared: it stays at loading until it is set
    weights: messages.WeightsRead | None = None  # how far it has read them while it loads
    prefill_seconds: float = 0.0
    prefill_chunks: int = 1  # in which a prompt is read
    progress_seconds: float = 0.05
    vocab_size: int = 1000
    context: int = 4096
    say: Callable[[TokenSequence, int], int] | None = None
    row_cost: list[LayerCost] = field(default_factory=list)
    ready: dict[str, object] = field(default_factory=dict)  # overrides of the fields of Ready
    snapshot: dict[str, object] = field(default_factory=dict)  # further fields of each Snapshot
    starts: list[str] = field(default_factory=list)
    poison: dict[int, Poison] = field(default_factory=dict)
    drain_hangs: bool = False
    pressure: str = "calm"
    first_shape: bool = False
    typical_step: float = 0.0
    import_seconds: float = 0.0
    prepare_seconds: float = 0.0
    spare_starts: list[str] = field(default_factory=list)  # how spare engines start: die, hang, garbage, no_spawn, ok
    spares: list[Life] = field(default_factory=list)  # that are no engines yet
    lives: list[Life] = field(default_factory=list)
    commands: list[messages.Command] = field(default_factory=list)

    # ------------------------------------------------------------ for Supervisor
    def spawn(self, epoch: int) -> Life:
        is_spare = epoch == messages.NO_EPOCH
        starts = self.spare_starts if is_spare else self.starts
        start = starts.pop(0) if starts else "ok"
        if start == "no_spawn":
            raise OSError("no more processes")
        ours, theirs = socket.socketpair()
        life = Life(self, ours, theirs, start, pid=10_000_000 + epoch)
        (self.spares if is_spare else self.lives).append(life)
        life.begin()
        return life

    # ------------------------------------------------------------ what it says
    def token(self, sequence: TokenSequence, position: int) -> int:
        if self.say is not None:
            return self.say(sequence, position)
        key = repr((sequence.prompt, sequence.sampling.seed, sequence.choice, position)).encode()
        return FIRST_TOKEN + zlib.crc32(key) % (self.vocab_size - FIRST_TOKEN)

    def expected(self, sequence: TokenSequence) -> list[int]:
        """All tokens of an undisturbed run."""
        tokens: list[int] = []
        while True:
            tokens.append(self.token(sequence, len(tokens)))
            if finish_of(sequence, tokens) is not None:
                return tokens

    # ------------------------------------------------------------ what it shows
    @property
    def life(self) -> Life:
        return self.lives[-1]

    @property
    def alive(self) -> int:
        return sum(life.poll() is None for life in self.lives)

    @property
    def rows(self) -> dict[int, Row]:
        return self.life.rows

    @property
    def submits(self) -> list[messages.Submit]:
        return [c for c in self.commands if isinstance(c, messages.Submit)]

    @property
    def cancels(self) -> list[int]:
        return [c.seq for c in self.commands if isinstance(c, messages.Cancel)]

    # ------------------------------------------------------------ what it can be asked for
    def die(self) -> None:
        self.life.end(-9)

    def close(self) -> None:
        """Closes the seam but the process lives on."""
        self.life.theirs.shutdown(socket.SHUT_RDWR)

    def stall(self) -> None:
        self.life.stalled = True

    def freeze(self) -> None:
        self.life.moves.clear()

    def thaw(self) -> None:
        self.life.moves.set()

    def garbage(self) -> None:
        self.life.put(GARBAGE)

    def tear(self) -> None:
        """Half a frame of news, then death."""
        frame = framing.pack(self.life.step())
        self.life.put(frame[: len(frame) // 2])
        self.die()

    def burst(self, steps: int, then: str = "live") -> None:
        """Several steps in one go, so that they wait unread when the engine is gone."""
        for _ in range(steps):
            self.life.put(framing.pack(self.life.step()))
        if then == "die":
            self.die()

    def preempt(self, seq: int | None = None) -> int:
        seq = max(self.rows) if seq is None else seq
        del self.rows[seq]
        self.life.emit(messages.Preemption(self.life.epoch, seq))
        return seq

    def rotate(self, reading: float = 490_000, threshold: float = 480_000, **more: bool) -> None:
        self.life.emit(messages.Rotate(self.life.epoch, reading, threshold, "live buffers", **more))

    def fail_row(self, seq: int, kind: str = "row", message: str = "the row broke") -> None:
        del self.rows[seq]
        self.life.emit(messages.RowFailure(self.life.epoch, seq, kind, message))


def finish_of(sequence: TokenSequence, generated: list[int]) -> Finish | None:
    if generated[-1] in sequence.stop_ids and len(generated) > sequence.min_tokens:
        return "stop"
    return "length" if len(generated) >= sequence.max_tokens else None


class Life:
    """One engine from spawn to exit; what a supervisor's `spawn` returns (`socket`, `pid`, `kill`, `poll`)."""

    def __init__(self, fake: FakeEngine, ours: socket.socket, theirs: socket.socket, start: str, pid: int) -> None:
        self.fake, self.socket, self.theirs, self.start, self.pid = fake, ours, theirs, start, pid
        for end in (ours, theirs):
            end.setblocking(False)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        self.exit_fd = None
        self.epoch = 0
        self.rows: dict[int, Row] = {}
        self.count = 0
        self.beaten = 0.0  # when the count rose last
        self.is_ready = False
        self.steps = 0
        self.tokens = 0
        self.stalled = False
        self.moves = raised()  # cleared while it is stopped
        self._code: int | None = None
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ the process's face
    def begin(self) -> None:
        take = asyncio.ensure_future(self._take())
        # Closed only when nothing waits on it any more: its number may be given to the next socket at once.
        take.add_done_callback(lambda task: self.theirs.close())
        self._tasks = [take]

    def poll(self) -> int | None:
        return self._code

    def kill(self) -> None:
        self.end(-9)

    def end(self, code: int) -> None:
        if self._code is None:
            self._code = code
            with contextlib.suppress(OSError):
                self.theirs.shutdown(socket.SHUT_RDWR)
            for task in self._tasks:
                if task is not current_task():
                    task.cancel()

    # ------------------------------------------------------------ its work
    def put(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.theirs.send(data)

    def emit(self, event: messages.Event) -> None:
        self.put(framing.pack(event))

    async def _take(self) -> None:
        frames, loop = framing.Frames(), asyncio.get_running_loop()
        self._dies_at("hello")
        while data := await loop.sock_recv(self.theirs, 1 << 16):
            await self.moves.wait()
            for frame in frames.feed(data):
                self._command(framing.unpack_command(frame))
        self.end(0)

    def _dies_at(self, place: str) -> None:
        if self.start == f"die@{place}" and self._code is None:
            self.end(-9)
            raise asyncio.CancelledError

    def _command(self, command: messages.Command) -> None:
        self.fake.commands.append(command)
        match command:
            case messages.Prepare():
                self._tasks.append(asyncio.ensure_future(self._prepare()))
            case messages.Start():
                if self in self.fake.spares:
                    self.fake.spares.remove(self)
                    self.fake.lives.append(self)
                    self.start = self.fake.starts.pop(0) if self.fake.starts else "ok"
                self.epoch = command.epoch
                self._tasks.append(asyncio.ensure_future(self._run()))
            case messages.Submit():
                row = Row(command.seq, command.sequence, list(command.generated))
                assert command.epoch == self.epoch
                assert command.seq not in self.rows
                self._dies_at("submit")
                self.emit(messages.RowIntake(self.epoch, command.seq))
                self._dies_at("taken")
                self.rows[command.seq] = row
                self._work.set()
            case messages.Cancel():
                self.rows.pop(command.seq, None)
            case messages.Drain() if not self.fake.drain_hangs:
                self.end(0)

    async def _prepare(self) -> None:
        await asyncio.sleep(self.fake.prepare_seconds)
        await self.moves.wait()
        match self.start:
            case "die":
                self.end(1)
            case "garbage":
                self.put(GARBAGE)
            case "ok":
                self.emit(messages.Preparation())

    async def _run(self) -> None:
        await asyncio.sleep(self.fake.import_seconds)
        self.emit(messages.Progress(self.epoch, 1, messages.LOADING))
        self._tasks.append(asyncio.ensure_future(self._report()))
        await asyncio.sleep(self.fake.load_seconds)
        await self.fake.loads.wait()
        await self.moves.wait()
        match self.start:
            case "die":
                return self.end(-11)
            case "hang":
                return None
            case "garbage":
                return self.put(GARBAGE)
            case "load_failed":
                self.emit(messages.LoadFailure(self.epoch, "the model folder has no config.json"))
                return self.end(2)
        self.is_ready = True
        self.emit(self._ready())
        self._dies_at("ready")
        self._tasks.append(asyncio.ensure_future(self._report()))
        while True:
            await self._iterate()

    def _ready(self) -> messages.Ready:
        probe = Probe(self.fake.vocab_size, "batched", self.fake.row_cost, chunk_peak_bytes=0, group_bytes=1000)
        fields: dict[str, object] = {
            "probe": probe,
            "context": self.fake.context,
            "weights_bytes": 1000,
            "model_type": "fake",
            "quantization": "none",
            "device": "none",
            "mlx": "0",
            "mlx_lm": "0",
            "load_seconds": self.fake.load_seconds,
        }
        return messages.Ready(epoch=self.epoch, pid=self.pid, **(fields | self.fake.ready))  # type: ignore[arg-type]

    async def _report(self) -> None:
        was_ready = self.is_ready
        while self.is_ready == was_ready:
            await self.moves.wait()
            snapshot = Snapshot(
                rows=len(self.rows),
                prefilling=sum(not row.started for row in self.rows.values()),
                prompts=[
                    PromptProgress(row.seq, row.read, len(row.sequence.prompt) + len(row.generated))
                    for row in self.rows.values()
                    if not row.started
                ],
                steps=self.steps,
                generated_tokens=self.tokens,
                pressure=self.fake.pressure,
                first_shape=self.fake.first_shape,
                typical_step_seconds=self.fake.typical_step,
                **self.fake.snapshot,  # type: ignore[arg-type]
            )
            stage = "serving" if was_ready else "loading"
            still = asyncio.get_running_loop().time() - self.beaten
            weights = None if was_ready else self.fake.weights
            self.emit(messages.Progress(self.epoch, self.count, stage, snapshot if was_ready else None, still, weights))
            await asyncio.sleep(self.fake.progress_seconds)

    async def _iterate(self) -> None:
        while not self.rows or self.stalled:
            self._work.clear()
            await self._work.wait()
        for row in [r for r in self.rows.values() if not r.started]:
            await self._prefill(row)
        await self.moves.wait()
        if self.rows and not self.stalled:
            self.emit(self.step())
            self._dies_at(f"token:{self.steps}")
        for row in list(self.rows.values()):
            self._harm(row)
        await asyncio.sleep(self.fake.step_seconds)

    async def _prefill(self, row: Row) -> None:
        total = len(row.sequence.prompt) + len(row.generated)
        for chunk in range(self.fake.prefill_chunks if self.fake.prefill_seconds else 0):
            await asyncio.sleep(self.fake.prefill_seconds / self.fake.prefill_chunks)
            await self.moves.wait()
            row.read = (total - 1) * (chunk + 1) // self.fake.prefill_chunks
            self.beat()
        self._harm(row)
        if row.seq in self.rows and not self.stalled:
            row.started = True
            self.beat()
            self.emit(messages.Steps(self.epoch, [], [], started=[messages.RowStart(row.seq, 0)]))
            self._dies_at("prefill")

    def beat(self) -> None:
        self.count += 1
        self.beaten = asyncio.get_running_loop().time()

    def step(self) -> messages.Steps:
        """One token for each started row."""
        step = messages.Steps(self.epoch, [], [], ends=[], logprobs={})
        for row in [r for r in self.rows.values() if r.started]:
            token = self.fake.token(row.sequence, len(row.generated))
            row.generated.append(token)
            row.produced += 1
            step.seqs.append(row.seq)
            step.tokens.append(token)
            if row.sequence.logprobs >= 0:
                top = [(token, -0.5), (0, -1.5)][: row.sequence.logprobs]
                top = [(named, -2.0 - i) for i, named in enumerate(row.sequence.scored)] or top
                step.logprobs[row.seq] = TokenLogprobs(-0.5, top)
            if finish := finish_of(row.sequence, row.generated):
                step.ends.append(messages.End(row.seq, finish))
                del self.rows[row.seq]
        self.beat()
        self.steps += 1
        self.tokens += len(step.tokens)
        return step

    def _harm(self, row: Row) -> None:
        for token, poison in self.fake.poison.items():
            if token in row.sequence.prompt and row.produced == poison.after and row.seq in self.rows:
                match poison.how:
                    case "die":
                        self.end(-6)
                        raise asyncio.CancelledError
                    case "stall":
                        self.stalled = True
                    case "garbage":
                        self.put(GARBAGE)
                    case "fail":
                        self.fake.fail_row(row.seq)


def current_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs: the test is over
        return None


# ---------------------------------------------------------------- as a process of its own
def process_spawn(*arguments: str) -> Callable[[int], object]:
    """A `spawn` whose engines are real processes: this file, started with `arguments`."""
    from server.supervision.engine_process import launch

    return lambda epoch: launch([sys.executable, str(Path(__file__).resolve()), *arguments])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, default=0.001)
    parser.add_argument("--exit-after", type=int, default=0, help="tokens until it ends itself by SIGKILL")
    parser.add_argument(
        "--child", action="store_true", help="start a child that outlives it unless the group is killed"
    )
    parser.add_argument("--start", default="ok")
    options = parser.parse_args()
    if options.child:
        import subprocess

        subprocess.Popen(["sleep", "600"])
    asyncio.run(_serve(options))


async def _serve(options: argparse.Namespace) -> None:
    fake = FakeEngine(step_seconds=options.step_seconds)
    theirs = socket.socket(fileno=options.fd)
    spare, _ = socket.socketpair()
    life = Life(fake, spare, theirs, options.start, pid=os.getpid())
    fake.lives.append(life)
    life.begin()
    while life.poll() is None:
        await asyncio.sleep(0.005)
        if options.exit_after and life.tokens >= options.exit_after:
            os.kill(os.getpid(), 9)
    os._exit(max(life.poll() or 0, 0))


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    main()
