"""A real engine process at the other end of a socketpair."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict

import pytest
from driving import Rig, model, prompt, row

from server.engine.model import row_cost
from server.ipc.framing import Frames, TornFrame, pack, unpack_event
from server.ipc.messages import (
    Cancel,
    Drain,
    LoadFailure,
    Preparation,
    Prepare,
    Progress,
    Ready,
    Reclaim,
    RowFailure,
    Start,
    Steps,
    Submit,
)
from server.ipc.probe import Probe
from server.ipc.sequence import Grammar
from server.settings import load

pytestmark = pytest.mark.slow

EPOCH = 3
TRIAL = "trying out whether rows can be decoded together"
PATIENCE = 120  # seconds; a busy machine starts a process slowly


class Engine:
    """The server's side, as plain as can be."""

    def __init__(self, folder, *, probe=None, files=None, epoch=EPOCH, spare=False, **settings):
        self.epoch, self.deadline = epoch, time.monotonic() + PATIENCE
        self.socket, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "server.engine", "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
        theirs.close()
        self.socket.settimeout(PATIENCE)
        self.frames, self.queue = Frames(), []
        self.tokens, self.ends, self.failed, self.started, self.progress = defaultdict(list), {}, {}, {}, []
        if spare is None:
            return
        if spare:
            self.prepare(folder)
        values = {"log_level": "error"} | settings
        dumped = load(values).model_dump_json(exclude={"api_key", "api_key_file"})
        self.send(Start(epoch, str(folder), dumped, probe, files))

    def send(self, *messages):
        self.socket.sendall(b"".join(map(pack, messages)))

    def prepare(self, folder):
        """As a spare engine is: it answers when it has imported everything, and once more when it's asked again."""
        for _ in range(2):
            self.send(Prepare(str(folder)))
            while not (frames := list(self.frames.feed(self.socket.recv(1 << 16)))):
                pass
            assert unpack_event(frames[0]) == Preparation()

    def submit(self, one, generated=()):
        self.send(Submit(self.epoch, one.seq, one.sequence, list(generated)))

    def event(self):
        """The next one, noted; None at EOF."""
        assert time.monotonic() < self.deadline, "it takes too long"
        while not self.queue:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:  # it died with commands unread
                data = b""
            if not data:
                return None
            self.queue += map(unpack_event, self.frames.feed(data))
        event = self.queue.pop(0)
        assert event.epoch == self.epoch
        if isinstance(event, Steps):
            self._note(event)
        elif isinstance(event, RowFailure):
            self.failed[event.seq] = event
        elif isinstance(event, Progress):
            self.progress.append((time.monotonic(), event))
        return event

    def _note(self, steps):
        for seq, token in zip(steps.seqs, steps.tokens, strict=True):
            assert seq not in self.ends
            self.tokens[seq].append(token)
        self.started |= {begun.seq: begun for begun in steps.started}
        self.ends |= {end.seq: end.finish for end in steps.ends}

    def until(self, holds):
        while not holds():
            assert self.event() is not None, "the engine is gone"

    def ready(self):
        while not isinstance(event := self.event(), Ready):
            assert isinstance(event, Progress), event
        return event

    def rest(self):
        """Everything up to EOF; the exit status."""
        while self.event() is not None:
            pass
        return self.process.wait(PATIENCE)

    def close(self):
        self.socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        self.process.stderr.close()


@pytest.fixture
def start(tiny):
    engines = []

    def begin(family="llama", **options):
        engines.append(Engine(options.pop("folder", None) or tiny(family), **options))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def alone():
    rig = Rig("llama")

    def text(one):
        return rig.alone(row(0, one.sequence.prompt, max_tokens=one.sequence.max_tokens))[0]

    return text


@pytest.fixture(scope="module")
def known():
    """What a first engine would have found out about llama."""
    return Probe(2048, "batched", row_cost(model("llama")), 0, 10**9)


def test_the_life_of_an_engine(start, alone, tmp_path):
    """Load, rows side by side, cancel, resume, progress, reclaim, drain: one process, since starting one is slow."""
    engine = start(prefix_cache=10**8, cache_dir=tmp_path)
    ready = engine.ready()
    assert (ready.epoch, ready.pid) == (EPOCH, engine.process.pid)
    assert (ready.vocab_size, ready.batching, ready.context) == (2048, "batched", 32768)
    assert ready.model_type == "llama"
    assert engine.progress[0][1].stage == "importing MLX and the models' code"
    assert {"loading the weights", TRIAL} <= {event.stage for _, event in engine.progress}
    assert [event for _, event in engine.progress if event.stage != "serving" and event.snapshot] == []
    engine.until(lambda: any(event.snapshot for _, event in engine.progress))
    first = next(event.snapshot for _, event in engine.progress if event.snapshot)
    assert min(first.active_bytes, first.footprint_bytes, first.memory_limit_bytes) > 0

    rows = [row(seq, prompt(length), max_tokens=12) for seq, length in enumerate((5, 1, 40, 300, 9, 70))]
    for one in rows:
        engine.submit(one)
    engine.until(lambda: len(engine.ends) == len(rows))
    for one in rows:
        assert engine.tokens[one.seq] == alone(one)
        assert engine.ends[one.seq] == "length"
        assert engine.started[one.seq].cached == 0

    resumed = row(10, prompt(40), max_tokens=12)  # the prefix cache holds it
    engine.submit(resumed, generated=engine.tokens[2][:5])
    engine.until(lambda: 10 in engine.ends)
    assert engine.tokens[10] == engine.tokens[2][5:]
    assert engine.started[10].cached == 40

    endless = row(11, prompt(5), max_tokens=30_000)
    engine.submit(endless)
    began, count = time.monotonic(), len(engine.progress)
    engine.until(lambda: len(engine.progress) >= count + 3)
    gaps = [b[0] - a[0] for a, b in zip(engine.progress[-3:], engine.progress[-2:], strict=False)]
    assert max(gaps) < 3, "while busy, too"
    assert engine.progress[-1][1].count > engine.progress[-2][1].count
    snapshot = engine.progress[-1][1].snapshot
    assert (snapshot.rows, snapshot.pending) == (1, 0)
    assert snapshot.generated_tokens >= 12 * len(rows)
    engine.send(Cancel(EPOCH, 11), Reclaim(EPOCH))
    engine.submit(row(12, prompt(9), max_tokens=3))
    engine.until(lambda: 12 in engine.ends)
    seen = len(engine.tokens[11])
    engine.until(lambda: engine.progress[-1][0] > began + 1 and engine.progress[-1][1].snapshot.rows == 0)
    assert len(engine.tokens[11]) == seen
    assert 11 not in engine.ends

    engine.submit(row(13, prompt(9), max_tokens=30_000))
    engine.until(lambda: engine.tokens[13])
    engine.send(Drain(EPOCH))
    assert engine.rest() == 0
    assert engine.process.stderr.read() == b""


def test_a_spare_engine_is_any_other_one_once_it_is_started(start, alone, known):
    """The faults of its epoch happen in it, too."""
    engine = start(spare=True, probe=known, epoch=2, faults="kill@decode:30*2")
    engine.ready()
    one = row(0, prompt(40), max_tokens=12)
    engine.submit(one)
    engine.until(lambda: engine.ends)
    assert engine.tokens[0] == alone(one)
    engine.submit(row(1, prompt(5), max_tokens=100))
    assert engine.rest() == -signal.SIGKILL
    assert len(engine.tokens[1]) < 30
    assert engine.process.stderr.read() == b""


def test_a_spare_engine_ends_when_its_server_is_gone_whatever_it_does(start, tiny):
    engine = start(spare=None)
    engine.send(Prepare(str(tiny("llama"))))
    time.sleep(0.5)  # it imports
    engine.socket.close()
    assert engine.process.wait(PATIENCE) == 0


def test_a_grammar_that_is_compiled_for_ever_holds_no_engine_back_that_is_asked_to_leave(start, known):
    engine = start(probe=known)
    engine.ready()
    # Compiling it takes minutes; the server refuses it, this test asks the engine itself.
    endless = Grammar('start: %json {"type": "integer", "multipleOf": 1000003}')
    engine.submit(row(0, prompt(5), grammar=endless, stop_ids=[2]))
    engine.submit(row(1, prompt(5), max_tokens=200))
    engine.until(lambda: 1 in engine.ends)
    reported = time.monotonic()
    engine.send(Drain(EPOCH))
    assert engine.rest() == 0
    assert time.monotonic() - reported < 5


def test_a_later_engine_takes_the_probe_of_the_first_and_ends_with_its_server(start, alone):
    first = start()
    probe = first.ready().probe
    first.socket.close()  # the server is gone
    assert first.process.wait(PATIENCE) == 0
    second = start(probe=probe, epoch=4)
    assert second.ready().probe == probe
    assert TRIAL not in {event.stage for _, event in second.progress}
    one = row(0, prompt(9), max_tokens=4)
    second.submit(one)
    second.until(lambda: second.ends)
    assert second.tokens[0] == alone(one)
    second.submit(row(1, prompt(9), max_tokens=30_000))
    second.until(lambda: second.tokens[1])
    os.kill(second.process.pid, signal.SIGKILL)
    assert second.rest() == -signal.SIGKILL


def test_the_engine_of_the_next_start_knows_what_the_model_showed(start, tmp_path):
    probe = start(cache_dir=tmp_path).ready().probe
    (kept,) = (tmp_path / "trials").iterdir()
    second = start(cache_dir=tmp_path, epoch=1)
    assert second.ready().probe == probe
    assert TRIAL not in {event.stage for _, event in second.progress}
    kept.write_bytes(b"{}")
    third = start(cache_dir=tmp_path, epoch=1)
    assert third.ready().probe.batching == probe.batching
    assert TRIAL in {event.stage for _, event in third.progress}


def test_a_later_engine_loads_no_other_model_than_the_first(start, tiny, tmp_path):
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    first = start(folder=folder).ready()
    assert set(first.files) == {"config.json", "model.safetensors"}
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-2] + b"\0\0")
    second = start(folder=folder, probe=first.probe, files=first.files, epoch=4)
    while not isinstance(event := second.event(), LoadFailure):
        assert isinstance(event, Progress)
    assert "its files have changed since the server loaded it: model.safetensors" in event.message
    assert second.rest() == 2
    weights.write_bytes(content)
    assert start(folder=folder, probe=first.probe, files=first.files, epoch=5).ready().probe == first.probe


def test_a_folder_without_a_model_is_reported_and_ends_with_2(start, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    engine = start(folder=tmp_path)
    while not isinstance(event := engine.event(), LoadFailure):
        assert isinstance(event, Progress)
    assert str(tmp_path) in event.message
    assert engine.rest() == 2


@pytest.mark.parametrize("family", ["llama4", "gemma2"])
def test_families_that_do_not_batch_serve_four_rows_at_once(start, family):
    engine = start(family)
    assert engine.ready().batching != "batched"
    rig = Rig(family)
    rows = [row(seq, prompt(length), max_tokens=6) for seq, length in enumerate((5, 40, 1, 33))]
    for one in rows:
        engine.submit(one)
    engine.until(lambda: len(engine.ends) == 4)
    for one in rows:
        assert engine.tokens[one.seq] == rig.alone(one)[0]
    states = [s.snapshot.groups for _, s in engine.progress if s.snapshot]
    assert all(state.rows == 1 for groups in states for state in groups)
    engine.send(Drain(EPOCH))
    assert engine.rest() == 0


@pytest.mark.parametrize(
    ("fault", "status"),
    [("abort@prefill:1", -signal.SIGABRT), ("raise@decode:4", 70)],
)
def test_a_fault_does_what_it_says_where_it_says(start, known, fault, status):
    engine = start(faults=fault, epoch=1, probe=known)
    engine.ready()
    engine.submit(row(0, prompt(9), max_tokens=50))
    assert engine.rest() == status
    assert len(engine.tokens[0]) == (2 if "decode" in fault else 0), "what was read before the fourth step"
    assert engine.ends == {}


def test_garbage_stalls_and_poison_happen_where_they_should(start, known):
    engine = start(faults="garbage@decode:3", epoch=1, probe=known)
    engine.ready()
    engine.submit(row(0, prompt(9), max_tokens=50))
    with pytest.raises(TornFrame):
        engine.rest()
    stuck = start(faults="stall@decode:3", epoch=1, probe=known)
    stuck.ready()
    stuck.submit(row(0, prompt(9), max_tokens=50))
    stuck.until(lambda: stuck.tokens[0])
    count = len(stuck.progress)
    stuck.until(lambda: len(stuck.progress) >= count + 3)
    assert stuck.progress[-1][1].count == stuck.progress[-2][1].count, "the writer goes on, the count stands still"
    assert stuck.progress[-1][1].still > 0.5
    poisoned = start(faults="poison@decode:1999,slow-start:0.1", epoch=9, probe=known)
    poisoned.ready()
    poisoned.submit(row(0, prompt(9), max_tokens=9))
    poisoned.until(lambda: 0 in poisoned.ends)
    poisoned.submit(row(1, [1999, *prompt(8)], max_tokens=50))
    assert poisoned.rest() == -signal.SIGKILL
    assert len(poisoned.tokens[1]) in (4, 5, 6)


def test_a_start_that_is_to_fail_fails(start):
    engine = start(faults="fail-start:4")
    assert engine.rest() == 3


def test_what_is_no_command_ends_the_engine(start):
    engine = start()
    engine.socket.sendall(b"\x00\x00\x00\x03abc")
    assert engine.process.wait(PATIENCE) == 0
    assert b"connection to the server is broken" in engine.process.stderr.read()
