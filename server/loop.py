"""The engine's main loop: commands in, prefill within its budget, one decode step a due group, steps out.

Owns every row in the engine and the order of an iteration. Runs in the engine process's main thread and is the only
caller of MLX once it runs. It knows nothing of text and HTTP.
"""

from __future__ import annotations

import gc
import logging
import math
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter, time

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import maybe_set_recommended_wired_limit

from server.batching import Batch
from server.cache_folder import TRIALS, cache_folder
from server.cache_guard import Caches, Guard, cache_arrays, parts, settle
from server.cohort import Cohorts
from server.constrain import Grammars, Matcher
from server.durations import Durations
from server.faults import Faults
from server.groups import Groups
from server.messages import (
    LARGEST_CHUNK,
    Cancel,
    Command,
    Drain,
    End,
    Failed,
    Preempted,
    Reclaim,
    Rotate,
    Sequence,
    Snapshot,
    Start,
    Started,
    Steps,
    Submit,
    Taken,
)
from server.model import Loaded
from server.prefill import ChunkFailed, Prefill
from server.prefix_cache import PrefixCache
from server.pressure import BUFFERS, Act, Verb
from server.residency import Residency, device_memory
from server.rows import Drawn, Row
from server.seam import SERVING, Pulse, Seam
from server.settings import Settings
from server.sharing import Sharing
from server.trial_results import TrialResults

IDLE_SECONDS = 1.0
WAIT_SECONDS = 0.005  # between two looks at grammars being compiled while there is nothing else to do
BUDGET_SHARE = 0.4  # of prefill_stall_ms that one iteration's chunks aim at; the rest is room for a slow chunk
COMPILE_SECONDS = 20.0
ALONE_SECONDS = 1.0  # an iteration's chunks while no row decodes: commands are heeded in between
JOIN_AT_LEAST = 4  # complete prompts that end an iteration's prefill early
_FATAL = ("resource limit", "unable to allocate", "out of memory", "command buffer", "cudaerror", "device lost")

log = logging.getLogger("marathon.engine")


class Wedged(Exception):
    """The allocator or the device queue can't go on in this process."""


def is_fatal(error: BaseException) -> bool:
    """Whether MLX's own words say that the process must be replaced."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _FATAL)


def room(caches: Caches) -> int:
    """Positions a row that the largest of these caches has buffers for; 0 where none holds positions."""
    keys = (getattr(part, "keys", None) for part in parts(caches))
    return max((array.shape[2] for array in keys if isinstance(array, mx.array)), default=0)


def unfit(sequence: Sequence, generated: list[int], vocabulary: int) -> str:
    """Why a sequence can't run here, or nothing. An id that the model doesn't have would fail its batch mates' pass."""
    if not sequence.prompt:
        return "the prompt is empty"
    given = {
        "prompt": sequence.prompt + generated,
        "stop_ids": sequence.stop_ids,
        "logit_bias": sequence.sampling.logit_bias,
    }
    for name, ids in given.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            return f"{name} has an id that the model doesn't have, which has {vocabulary}"
    return ""


class Loop:
    """Owned by the engine's main thread."""

    def __init__(
        self,
        seam: Seam,
        pulse: Pulse,
        snapshot: Snapshot,
        start: Start,
        settings: Settings,
        loaded: Loaded,
        residency: Residency,
        faults: Faults,
    ) -> None:
        self._seam, self._pulse, self._snapshot, self._faults = seam, pulse, snapshot, faults
        self._epoch = start.epoch
        self._loaded, self._residency = loaded, residency
        self._guard = Guard(settings.guard, settings.census_steps, snapshot)
        self._seconds: dict[str, float] = defaultdict(float)
        snapshot.step_seconds = self._seconds
        self._prefix = PrefixCache(settings.prefix_cache, snapshot)
        self._sharing = Sharing(
            self._prefix, self._new_caches(), has_room=self._has_room, waiting=lambda: self._prefill.waiting
        )
        self._prefill = Prefill(
            loaded.model,
            self._guard,
            on_begin=self._begin,
            on_chunk=self._chunk_done,
            on_mark=self._sharing.keep_prompt,
            on_start=lambda size: self._enter_shape("chunk", 1 << (size - 1).bit_length()),
            most=self._affordable,
            cohorts=Cohorts(loaded.probe.reads, self._sharing.waits),
        )
        self._groups = Groups(self._new_batch, loaded, settings.long_group_interval)
        self._grammars = Grammars(Path(start.model_path), loaded.probe.vocab_size)
        self._compiling: dict[int, Future[Matcher]] = {}
        self._budget = settings.prefill_stall_ms / 1000 * BUDGET_SHARE
        self._rows: dict[int, Row] = {}
        self._started: list[Started] = []
        self._rebuilt: set[int] = set()  # rows without a token since they were rebuilt
        self._durations = Durations()
        self._leaked: list[mx.array] = []
        # Metal refuses what is beyond its limit, our own count refuses nothing: given a limit, we act as Metal does.
        self._enforced = settings.buffer_limit if residency.source.name == "native" else None
        self._draining = False
        self._overdue = False  # a grammar can't be compiled, and the server has been told
        self._waiting = False  # rows are there, but none could go on in the last iteration

    def _new_batch(self) -> Batch:
        return Batch(self._loaded.model, self._guard, self._seconds)

    # ------------------------------------------------------------ life
    def run(self) -> None:
        """Until `Drain`. Raises Wedged when the process must be replaced at once."""
        while not self._draining:
            self._take_commands()
            if self._rows:
                self._iterate()

    @property
    def compiles(self) -> bool:
        """A grammar is being compiled, by a thread that nothing can stop."""
        return self._grammars.seconds() > 0

    def close(self) -> None:
        """Free everything in an order that lets the process exit cleanly: without it MLX may abort at exit."""
        self._grammars.close()
        self._rows.clear()
        self._leaked.clear()
        self._prefill.readings.clear()
        self._groups.clear()
        self._prefix.clear()
        gc.unfreeze()
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        mx.clear_streams()

    def _take_commands(self) -> None:
        self._end_endless_grammar()
        if not self._rows or self._waiting:
            command = self._seam.receive(WAIT_SECONDS if self._rows else IDLE_SECONDS)
            if command is None:
                self._residency_turn()
                return
            self._obey(command)
        for command in self._seam.received():
            self._obey(command)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Cancel):
            self._cancel(command.seq)
        elif isinstance(command, Reclaim):
            for act in self._reclaim():
                self._execute(act)
        elif isinstance(command, Drain):
            self._draining = True

    # ------------------------------------------------------------ rows in and out
    def _submit(self, command: Submit) -> None:
        sequence = command.sequence
        if command.generated:
            self._faults.reached("resume")
        self._seam.send(Taken(self._epoch, command.seq))
        if fault := unfit(sequence, command.generated, self._loaded.probe.vocab_size):
            self._seam.send(Failed(self._epoch, command.seq, "row", fault))
            return
        row = Row(
            command.seq,
            sequence,
            sequence.prompt + command.generated,
            stops=frozenset(sequence.stop_ids),
            arrived=perf_counter(),
        )
        self._rows[row.seq] = row
        if sequence.grammar is not None:
            self._compiling[row.seq] = self._grammars.compile(sequence, command.generated)
        self._prefill.insert(row)

    def _begin(self, row: Row) -> tuple[int, list[int]]:
        """Caches for a row whose first chunk is next, from the longest prefix that is kept."""
        found = None if row.sequence.prompt_logprobs else self._prefix.lookup(row.tokens)
        row.caches, row.cached = found or (self._new_caches(), 0)
        self._snapshot.prompt_tokens += len(row.sequence.prompt)
        self._snapshot.cached_tokens += min(row.cached, len(row.sequence.prompt))
        if not row.sequence.prompt_logprobs:
            self._started.append(Started(row.seq, min(row.cached, len(row.sequence.prompt))))
        return row.cached, self._sharing.ends(row)

    def _new_caches(self) -> Caches:
        caches: Caches = make_prompt_cache(self._loaded.model)
        return caches

    def _cancel(self, seq: int) -> None:
        """The server wants no more of this row. What it has read is kept as it is of a row that ends by itself."""
        try:
            self._drop(seq, keep=True)
        except Exception as error:
            self._survive(error, self._groups.all_rows())

    def _drop(self, seq: int, *, keep: bool = False) -> None:
        """Forget a row wherever it is; a row that is gone already is no news. `keep`: but not what it has read."""
        row = self._rows.pop(seq, None)
        self._rebuilt.discard(seq)
        if future := self._compiling.pop(seq, None):
            future.cancel()
        if row is not None and self._prefill.remove(seq, self._sharing.keep_read if keep else None) is None:
            self._groups.leave([row], self._sharing.keep_begun if keep else None)

    def _fail(self, row: Row, kind: str, message: str) -> None:
        self._drop(row.seq)
        self._tell_failed(row, kind, message)

    def _tell_failed(self, row: Row, kind: str, message: str) -> None:
        log.error("sequence %d ends: %s", row.seq, message)
        self._seam.send(Failed(self._epoch, row.seq, kind, message))

    # ------------------------------------------------------------ an iteration
    def _iterate(self) -> None:
        drawn: list[Drawn] = []
        joined: list[Row] = []
        before = self._pulse.count
        try:
            self._enforce_limit()
            joined = self._read_prompts()
            self._join(joined)
            self._residency_turn()
            self._step(drawn)
        except ChunkFailed as failure:
            self._survive(failure.__cause__ or failure, failure.rows)
        except Exception as error:
            self._survive(error, self._groups.stepping)
        self._deliver(drawn)  # also what groups drew before another one failed
        if joined:
            self._tell_first(joined)
        self._waiting = self._pulse.count == before

    def _enforce_limit(self) -> None:
        if self._enforced and (self._residency.source.raw() or 0) > self._enforced:
            raise RuntimeError(f"[native] Resource limit ({self._enforced}) exceeded.")

    def _read_prompts(self) -> list[Row]:
        if not self._prefill.readings:
            return []
        self._check_compiled()
        decoding = self._groups.rows
        budget = self._budget if decoding else ALONE_SECONDS
        started = perf_counter()
        rows = self._prefill.run(budget, self._is_ready, max(JOIN_AT_LEAST, decoding // 2), self._budget)
        self._seconds["prefill"] += perf_counter() - started
        return [row for row in rows if not self._is_complete(row)]

    def _check_compiled(self) -> None:
        for seq, future in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[seq]
            row = self._rows[seq]
            if error := future.exception():
                self._fail(row, "row", f"the grammar can't be compiled: {error}")
            else:
                row.constraint = future.result()

    def _end_endless_grammar(self) -> None:
        """What the server has checked takes a second. One that goes on and on can't be stopped, whether its row is
        still there or not, so the row ends and the process is replaced."""
        if self._overdue or (seconds := self._grammars.seconds()) <= COMPILE_SECONDS:
            return
        self._overdue = True
        for seq, future in list(self._compiling.items()):
            if future.running():
                self._fail(self._rows[seq], "row", f"its grammar isn't compiled within {COMPILE_SECONDS:g} s")
        reason = "seconds of compiling a grammar"
        self._seam.send(Rotate(self._epoch, seconds, COMPILE_SECONDS, reason, is_leak=False))

    def _is_ready(self, row: Row) -> bool:
        return row.seq not in self._compiling

    def _is_complete(self, row: Row) -> bool:
        """Tell the prompt's logprobs of a row that asked; whether it asked for nothing more."""
        if row.sequence.prompt_logprobs:
            self._started.append(Started(row.seq, 0, row.prompt_scores))
        if row.sequence.max_tokens > row.produced:
            return False
        self._publish([], [End(row.seq, "length")])
        self._sharing.keep_read(row.tokens[:-1], row.single)
        del self._rows[row.seq]
        return True

    def _chunk_done(self, row: Row, size: int, seconds: float) -> None:
        self._pulse.beat()
        self._leave_shape(seconds)
        if row.rebuilds == 0 and self._faults.spec:
            self._faults.reached("prefill")
            self._faults.poisoned("prefill", row.tokens[0], row.produced)

    def _join(self, rows: list[Row]) -> None:
        if rows:
            self._groups.stepping = [*rows, *self._groups.all_rows()]  # a join may touch every group
            self._groups.join(rows)

    def _step(self, drawn: list[Drawn]) -> None:
        """Step the groups that are due; what each one read is added to `drawn`."""
        self._groups.stepping = self._groups.all_rows()  # the grouping may change
        for batch in self._groups.due():
            self._groups.stepping = batch.rows
            drawn.append(self._step_one(batch))
        self._groups.stepping = []
        if drawn:
            self._guard.census(*(batch.caches for batch in self._groups.batches))

    def _tell_first(self, joined: list[Row]) -> None:
        """The first tokens of rows that joined in this iteration, at once: the next may begin with a long chunk."""
        drawn: list[Drawn] = []
        try:
            for batch in self._groups.batches:
                if any(any(row is new for new in joined) and not batch.has_told(row) for row in batch.rows):
                    self._groups.stepping = batch.rows
                    drawn.append(batch.tell())
        except Exception as error:
            self._survive(error, self._groups.stepping)
        self._groups.stepping = []
        self._deliver(drawn)

    def _enter_shape(self, kind: str, size: int) -> None:
        """The first of its shape may have to be compiled: the server is more patient with it."""
        self._durations.enter(kind, size)
        self._snapshot.first_shape = self._durations.is_first
        self._snapshot.typical_step_seconds = self._durations.usual

    def _leave_shape(self, seconds: float) -> None:
        self._durations.leave(seconds)
        self._snapshot.first_shape = False

    def _step_one(self, batch: Batch) -> Drawn:
        if self._faults.spec:
            self._inject(batch)
        self._enter_shape("step", len(batch))
        started = perf_counter()
        news = self._groups.step(batch)
        seconds = perf_counter() - started
        snapshot = self._snapshot
        self._leave_shape(seconds)
        snapshot.steps += 1
        snapshot.batch_sizes[len(batch)] = snapshot.batch_sizes.get(len(batch), 0) + 1
        snapshot.last_step_time = time()
        self._pulse.beat()
        return news

    def _inject(self, batch: Batch) -> None:
        self._faults.reached("decode")
        poison = self._faults.poison
        for row in batch.rows:
            if row.tokens[0] in poison:
                self._faults.poisoned("decode", row.tokens[0], batch.produced(row))
        for _ in range(self._faults.spec.leak):
            self._leaked.append(mx.array([0] * 64))

    def _deliver(self, drawn: list[Drawn]) -> None:
        self._snapshot.generated_tokens += sum(len(news.tokens) for news in drawn)
        ends = [End(row.seq, finish) for news in drawn for row, finish in news.ended]
        self._publish(drawn, ends)
        self._forgive(drawn)
        gone = [row for news in drawn for row, _ in news.ended]
        failed = [pair for news in drawn for pair in news.failed]
        for row in [*gone, *(row for row, _ in failed)]:
            self._rows.pop(row.seq, None)
        for row, message in failed:
            self._tell_failed(row, "row", message)
        try:
            self._groups.leave(gone, self._sharing.keep_read)
            self._groups.leave([row for row, _ in failed], self._sharing.keep_begun)
        except Exception as error:
            self._survive(error, self._groups.all_rows())

    def _forgive(self, drawn: list[Drawn]) -> None:
        """A rebuilt row that has delivered a token may fail anew; one that had to be set apart stays so."""
        if self._rebuilt:
            for seq in self._rebuilt.intersection(seq for news in drawn for seq in news.seqs):
                self._rebuilt.discard(seq)
                if (row := self._rows.get(seq)) and not row.solo:
                    row.rebuilds = 0

    def _publish(self, drawn: list[Drawn], ends: list[End]) -> None:
        began = perf_counter()
        self._send_steps(drawn, ends)
        self._seconds["publish"] += perf_counter() - began

    def _send_steps(self, drawn: list[Drawn], ends: list[End]) -> None:
        started, self._started = self._started, []
        if len(drawn) == 1 and not (ends or started or drawn[0].logprobs):
            self._seam.send(Steps(self._epoch, drawn[0].seqs, drawn[0].tokens))
            return
        seqs = [seq for news in drawn for seq in news.seqs]
        if not (seqs or ends or started):
            return
        tokens = [token for news in drawn for token in news.tokens]
        logprobs = {seq: value for news in drawn for seq, value in news.logprobs.items()}
        self._seam.send(Steps(self._epoch, seqs, tokens, ends, started, logprobs))

    def _affordable(self, held: int) -> int:
        """Tokens of a chunk behind `held` others that memory has room for: what it needs for a while, what it leaves
        behind, and the cache array that is copied as it grows."""
        probe = self._loaded.probe
        room = max(0, self._residency.room - self._loaded.largest_bytes(held))
        each = probe.token_bytes + probe.pair_bytes * held + self._loaded.row_bytes(LARGEST_CHUNK) / LARGEST_CHUNK
        if not probe.pair_bytes:
            return int(room / max(1.0, each))
        return int((math.sqrt(each * each + 4 * probe.pair_bytes * room) - each) / (2 * probe.pair_bytes))

    def _has_room(self, length: int) -> bool:
        """For one more row's caches."""
        return self._residency.room >= self._loaded.row_bytes(length)

    # ------------------------------------------------------------ faults of the forward pass
    def _survive(self, error: BaseException, rows: list[Row]) -> None:
        """Rebuild the rows of a failed forward pass from their tokens: once together, then each alone, then no more.

        Raises Wedged for an error of allocator or device.
        """
        if is_fatal(error) or not rows:
            if count := self._residency.spent_buffers():
                limit = self._residency.source.limit or 0
                self._seam.send(Rotate(self._epoch, count, limit, f"live {BUFFERS}", late=True))
            raise Wedged(f"the device can't go on: {error}") from error
        log.error("a forward pass failed (rows: %d): %s: %s", len(rows), type(error).__name__, error)
        self._groups.stepping = []
        for row in self._groups.take(rows):
            self._prefill.remove(row.seq)
            if row.seq not in self._rows:  # it has ended
                continue
            row.rebuilds += 1
            if row.rebuilds > 2:
                self._fail(row, "row", f"its forward pass fails: {type(error).__name__}")
                continue
            row.solo = row.rebuilds > 1
            self._recover(row)

    def _recover(self, row: Row) -> None:
        self._rebuilt.add(row.seq)
        row.reset()
        if row.sequence.grammar is not None:
            self._compiling[row.seq] = self._grammars.compile(row.sequence, row.tokens[len(row.sequence.prompt) :])
        self._prefill.insert(row)

    # ------------------------------------------------------------ residency
    def _residency_turn(self) -> None:
        snapshot = self._snapshot
        snapshot.rows, snapshot.prefilling = self._groups.rows, len(self._prefill)
        while True:
            rows = len(self._rows)
            for act in self._residency.tick(self._take_stock, self._groups.growth):
                self._execute(act)
            if len(self._rows) == rows:  # nobody had to go: there is room for the next step
                return

    def caches(self) -> Caches:
        """Of every row, decoding or still reading its prompt."""
        return self._groups.caches() + [reading.row.caches for reading in self._prefill.readings]

    def _take_stock(self) -> int:
        """Bytes of the KV in use. Called when a reading is due, a few times a second."""
        snapshot = self._snapshot
        snapshot.groups = self._groups.state()
        readings = self._prefill.readings
        snapshot.waiting = sum(not reading.begun for reading in readings)
        snapshot.kv_tokens = self._groups.positions() + sum(reading.done for reading in readings)
        snapshot.kv_capacity_tokens = sum(len(batch) * room(batch.caches) for batch in self._groups.batches)
        snapshot.kv_capacity_tokens += sum(room(reading.row.caches) for reading in readings)
        arrays = cache_arrays(self.caches())
        return sum(array.nbytes for array in arrays)

    def _execute(self, act: Act) -> None:
        if act.name == Verb.RECLAIM:
            for due in self._reclaim(act):
                self._execute(due)
        elif act.name == Verb.ROTATE:
            self._seam.send(Rotate(self._epoch, act.reading, act.threshold, f"live {act.resource}"))
        elif act.name == Verb.PREEMPT and self._rows:
            self._preempt(act)

    def _reclaim(self, act: Act | None = None) -> list[Act]:
        """Free what can be freed without anybody's loss, then read again."""

        def flush() -> None:  # also with the guard off: what is evaluated here is memory won back
            settle(self._groups.caches())

        return self._residency.reclaim(flush, lambda: self._prefix.evict_all("guard"), act)

    def _preempt(self, act: Act) -> None:
        """The newest row gives its memory back; the oldest never does."""
        newest = self._rows[max(self._rows)]
        if len(self._rows) == 1:
            self._fail(
                newest, "memory", f"needs more than the memory limit: {act.reading:.0f} of {act.threshold:.0f} bytes"
            )
            return
        self._drop(newest.seq)
        mx.clear_cache()
        self._residency.read_memory()
        self._seam.send(Preempted(self._epoch, newest.seq))


def open_loop(seam: Seam, pulse: Pulse, snapshot: Snapshot, start: Start, settings: Settings, faults: Faults) -> Loop:
    """Load the model, announce it, and give the loop that runs it. Raises StartupError."""
    from server import attention, device, model, plans

    began = perf_counter()
    if settings.wired_limit:
        maybe_set_recommended_wired_limit()
    if settings.pool_limit is not None:
        mx.set_cache_limit(settings.pool_limit)
    residency = Residency.open(settings, snapshot)  # before the weights, so that a native counter counts them
    if hidden := device.hidden_gpu():
        log.warning("MLX runs on the CPU: %s", hidden)
    plans.avoid()
    attention.install()
    here = f"{device.name()} {device_memory()}"
    trials = TrialResults(cache_folder(settings.cache_dir) / TRIALS, here, model.TRIED_OUT_BY)
    loaded = model.load(
        Path(start.model_path),
        trust_remote_code=settings.trust_remote_code,
        probe=start.probe,
        on_stage=pulse.enter,
        trials=trials,
    )
    residency.read_memory()
    pulse.enter(SERVING)
    seam.send(device.announce(start.epoch, loaded, residency, perf_counter() - began))
    return Loop(seam, pulse, snapshot, start, settings, loaded, residency, faults)
