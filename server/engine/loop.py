"""The engine's main loop: commands in, prompts within their budget, one step a due group, tokens out.

Owns every row in the engine and the order of an iteration. Runs in the engine process's main thread and is the only
caller of MLX once it runs. It knows nothing of text and HTTP.

An iteration takes the commands, plans what is read, who joins and who is stepped, has each operation carried out, and
publishes what was drawn. What is planned comes from `Prefill` and `Groups`; the executor does it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from pathlib import Path
from time import perf_counter

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import maybe_set_recommended_wired_limit

from server.cache_guard import Guard
from server.compute.rows import Row, StepOutput
from server.compute.stopwatch import Stopwatch
from server.config.cache_folder import TRIALS, cache_folder
from server.engine.channel import SERVING, Channel, Heartbeat
from server.engine.checkpoints import Checkpoints
from server.engine.constraints import Grammars
from server.engine.executor import Executor
from server.engine.groups import Groups
from server.engine.joint_prefill import JointPrefill
from server.engine.model import LoadedModel
from server.engine.outbox import Outbox
from server.engine.pending_grammars import COMPILE_SECONDS, PendingGrammars
from server.engine.plan import Begin, Census, FetchTokens, KeepRead, OperationFailure, Step
from server.engine.prefill import ChunkBudget, Prefill
from server.engine.prefix_cache import PrefixCache
from server.engine.prefix_policy import PrefixPolicy
from server.engine.pressure_response import PressureResponse
from server.engine.recovery import DeviceWedge, Recovery
from server.engine.runner import Runner
from server.engine.state import EngineState
from server.faults import Faults
from server.ipc.messages import Cancel, Command, Drain, End, Reclaim, Start, Submit
from server.ipc.probe import Probe
from server.ipc.sequence import TokenSequence
from server.ipc.snapshot import Snapshot
from server.kv_store.opening import Opening, opened
from server.memory.pressure import PressureAction, Verb
from server.memory.residency import Residency, device_memory
from server.model_files.trial_results import TrialResults
from server.settings import Settings

IDLE_SECONDS = 1.0
WAIT_SECONDS = 0.05  # between two looks while all rows wait for a grammar or the disk, which wake the loop
BUDGET_SHARE = 0.4  # of prefill_stall_ms that one iteration's chunks aim at; the rest is room for a slow chunk
ALONE_SECONDS = 1.0  # an iteration's chunks while no row decodes: commands are heeded in between
PREFIX_SHARE = 0.5  # of the room beside the weights that kept prefixes may fill: they alone never mean pressure
JOIN_AT_LEAST = 4  # complete prompts that end an iteration's prefill early

log = logging.getLogger("marathon.engine")

__all__ = ["DeviceWedge", "Loop", "open_loop", "unfit"]


def unfit(sequence: TokenSequence, generated: list[int], vocabulary: int) -> str:
    """Say why a sequence can't run here, or nothing. An id that the model doesn't have would fail its batch mates."""
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


class State(Enum):
    """Whether the loop has anything to do."""

    RUNNING = "running"
    WAITING = "waiting"  # rows are there, but none could go on in the last iteration
    DRAINING = "draining"


class Loop:
    """Owned by the engine's main thread."""

    def __init__(
        self,
        channel: Channel,
        heartbeat: Heartbeat,
        snapshot: Snapshot,
        start: Start,
        settings: Settings,
        loaded: LoadedModel,
        residency: Residency,
        faults: Faults,
        executor: Executor | None = None,
        clock: Callable[[], float] = perf_counter,
        grammars: Grammars | None = None,
        opening: Opening | None = None,
    ) -> None:
        """Without an `executor` the plans are carried out on this process's device. `grammars`: those that were begun
        before the model was loaded; without them none can be followed. `opening`: the store of KV on disk, if any."""
        guard = Guard(settings.guard, settings.census_steps, snapshot)
        watch = Stopwatch(clock)
        snapshot.step_seconds = watch.seconds
        prefix = PrefixCache(min(settings.prefix_cache, int(PREFIX_SHARE * residency.room)), snapshot)
        self._channel = channel
        self._vocabulary = loaded.probe.vocab_size
        self._budget = settings.prefill_stall_ms / 1000 * BUDGET_SHARE
        executor = executor or Executor(loaded.model, guard, prefix, {}, watch)
        self.rows = executor.rows
        self._policy = PrefixPolicy(prefix, make_prompt_cache(loaded.model), loaded.row_bytes)
        self._prefill = Prefill(
            self._policy, JointPrefill(loaded.probe.reads, self._policy.waits), loaded.longest_chunk
        )
        self._groups = Groups(executor.batches, loaded, settings.long_group_interval)
        self.runner = Runner(executor, self.rows, watch, heartbeat, snapshot, faults, residency)
        self._outbox = Outbox(channel, start.epoch, snapshot, watch)
        self._checkpoints = Checkpoints(
            loaded.model, executor.batches, self._prefill, prefix, heartbeat, snapshot, opening, channel.wake
        )
        executor.marks = self._checkpoints
        grammars = grammars or Grammars(Future())
        grammars.rows = self._vocabulary
        self.pending_grammars = PendingGrammars(grammars, channel.wake)
        self._recovery = Recovery(self.rows, self.runner, self._groups, self._prefill, self.pending_grammars)
        self.engine_state = EngineState(executor, self._groups, self._prefill, loaded, snapshot)
        self._pressure_response = PressureResponse(
            residency, self.runner, self.engine_state, self._outbox, settings.buffer_limit
        )
        self._state = State.RUNNING

    # ------------------------------------------------------------ life
    def run(self) -> None:
        """Run until `Drain`. Raises DeviceWedge when the process must be replaced at once."""
        while self._state is not State.DRAINING:
            self.turn()

    def turn(self) -> None:
        """Take commands, and run one iteration if there are rows."""
        self._take_commands()
        if self.rows:
            self._iterate()
        self._checkpoints.report()

    def close(self) -> None:
        """Free everything in an order that lets the process exit cleanly: without it MLX may abort at exit."""
        self.pending_grammars.close()
        self._checkpoints.close()
        self.rows.clear()
        self._prefill.readings.clear()
        self.runner.close()
        gc.unfreeze()
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        mx.clear_streams()

    # ------------------------------------------------------------ commands
    def _take_commands(self) -> None:
        self._end_endless_grammar()
        if not self.rows or self._state is State.WAITING:
            patience = IDLE_SECONDS
            if self.rows:
                patience = WAIT_SECONDS
            command = self._channel.receive(patience)
            if command is None:
                self._relieve()
                return
            self._obey(command)
        for command in self._channel.received():
            self._obey(command)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Cancel):
            self._cancel(command.seq)
        elif isinstance(command, Reclaim):
            for act in self._pressure_response.reclaim():
                self._preempt(act)
        elif isinstance(command, Drain):
            self._checkpoints.save_leaving(self.rows, ended=False)
            self._state = State.DRAINING

    def _submit(self, command: Submit) -> None:
        sequence = command.sequence
        if command.generated:
            self.runner.resumed()
        self._outbox.taken(command.seq)
        if fault := unfit(sequence, command.generated, self._vocabulary):
            self._outbox.refused(command.seq, fault)
            return
        tokens = sequence.prompt + command.generated
        stops = frozenset(sequence.stop_ids)
        row = Row(command.seq, sequence, tokens, stops=stops, arrived=perf_counter())
        self.rows[row.seq] = row
        self.pending_grammars.begin(row)
        self._prefill.insert(row)
        self._checkpoints.begin(row)

    def _cancel(self, seq: int) -> None:
        """The server wants no more of this row. What it has read is kept as it is of a row that ends by itself."""
        if seq not in self.rows:
            return
        room = self.runner.room
        try:
            self.runner.follow(self._prefill.keep(seq, room))
            self._forget(seq)
            kept = [
                one for one, length in self._groups.lengths([seq]).items() if self._policy.keeps_begun(length, room)
            ]
            self._checkpoints.save_leaving(kept, ended=True)
            self.runner.follow(self._groups.leave([seq], kept))
        except OperationFailure as failure:
            self._forget(seq)
            self._survive(failure)

    def _forget(self, seq: int) -> None:
        """Take a row off every list but that of its batch."""
        self.rows.pop(seq, None)
        self._checkpoints.forget(seq)
        self.pending_grammars.cancel(seq)
        self._recovery.forget(seq)
        self._prefill.remove(seq)

    def _fail(self, row: Row, kind: str, message: str) -> None:
        """End a row with an error."""
        self._forget(row.seq)
        self.runner.follow(self._groups.leave([row.seq]))
        self._outbox.failed(row.seq, kind, message)

    def _survive(self, error: Exception) -> None:
        """Rebuild what a failed operation cost. Raises DeviceWedge when this process can't go on."""
        try:
            ended = self._recovery.survive(error)
        except DeviceWedge:
            self._pressure_response.report_spent()
            raise
        for row, why in ended:
            self._fail(row, "row", why)

    def _end_endless_grammar(self) -> None:
        if found := self.pending_grammars.endless():
            seconds, rows = found
            for row in rows:
                self._fail(row, "grammar", f"its grammar isn't compiled within {COMPILE_SECONDS:g} s")
            self._outbox.rotate(seconds, COMPILE_SECONDS, "seconds of compiling a grammar", is_leak=False)

    # ------------------------------------------------------------ an iteration
    def _iterate(self) -> None:
        before = self.runner.progress
        self.runner.begin()
        drawn: list[StepOutput] = []
        joined: list[Row] = []
        try:
            self._pressure_response.enforce()
            joined = self._read_prompts()
            if joined:
                self.runner.follow(self._groups.join(joined))
            self._relieve()
            self._step(drawn)
        except Exception as error:
            self._survive(error)
        self._deliver(drawn)  # also what groups drew before another one failed
        if joined:
            self._publish_first_tokens(joined)
        self._checkpoints.take(self.runner.record)
        if self._state is not State.DRAINING:
            idle = self.runner.progress == before
            if idle:
                self._state = State.WAITING
            else:
                self._state = State.RUNNING

    def _read_prompts(self) -> list[Row]:
        """Read prompts within the budget; returns the rows that go on to decode."""
        if not self._prefill.readings:
            return []
        self._checkpoints.arrive()
        for row, why in self.pending_grammars.take():
            self._fail(row, "grammar", why)
        self.engine_state.count()  # before, since the first chunk may take long
        decoding = self._groups.rows
        turn = ChunkBudget(
            ALONE_SECONDS, self.runner.room, enough=max(JOIN_AT_LEAST, decoding // 2), patience=self._budget
        )
        if decoding:
            turn.budget = self._budget
        try:
            rows = self.runner.follow(self._prefill.plan(turn), part="prefill")
        finally:
            for operation in self.runner.record:
                if isinstance(operation, Begin):
                    self._outbox.begun(self.rows[operation.seq])
        return [row for row in rows if not self._is_complete(row)]

    def _is_complete(self, row: Row) -> bool:
        """Report the prompt's logprobs of a row that asked; whether it asked for nothing more."""
        if row.sequence.prompt_logprobs:
            self._outbox.scored(row)
        if row.sequence.max_tokens > row.produced:
            return False
        self._outbox.publish([], [End(row.seq, "length")])
        if self._policy.keeps_read(row.read, self.runner.room):
            self.runner.run(KeepRead(row.seq, row.read))
        self._forget(row.seq)
        return True

    def _step(self, drawn: list[StepOutput]) -> None:
        """Step the groups that are due; what each one read is added to `drawn`."""
        for batch in self.runner.follow(self._groups.due()):
            result = self.runner.run(Step(batch, self._checkpoints.newest(batch)))
            self._groups.note(batch, result.seconds)
            drawn.append(result.outcome)
        if drawn and self.runner.executor.is_census_due():
            self.runner.run(Census())

    def _publish_first_tokens(self, joined: list[Row]) -> None:
        """Report the first tokens of rows that joined in this iteration: the next one may begin with a long chunk."""
        drawn: list[StepOutput] = []
        try:
            for batch in self._groups.unfetched({row.seq for row in joined}):
                drawn.append(self.runner.run(FetchTokens(batch)).outcome)
        except OperationFailure as failure:
            self._survive(failure)
        self._deliver(drawn)

    def _deliver(self, drawn: list[StepOutput]) -> None:
        """Publish what was drawn, and let rows go that have ended."""
        ended = [(row.seq, finish) for news in drawn for row, finish in news.ended]
        failed = [pair for news in drawn for pair in news.failed]
        self._outbox.publish(drawn, [End(seq, finish) for seq, finish in ended])
        self._recovery.forgive(drawn)
        if not (ended or failed):
            return
        self._checkpoints.save_leaving([seq for seq, _ in ended], ended=True)
        for seq, _ in ended:
            self._forget(seq)
        for row, message in failed:
            self._forget(row.seq)
            self._outbox.failed(row.seq, "grammar", message)
        room = self.runner.room
        try:
            gone = [seq for seq, _ in ended]
            kept = [seq for seq, length in self._groups.lengths(gone).items() if self._policy.keeps_read(length, room)]
            self.runner.follow(self._groups.leave(gone, kept))
            lost = [row.seq for row, _ in failed]
            kept = [seq for seq, length in self._groups.lengths(lost).items() if self._policy.keeps_begun(length, room)]
            self.runner.follow(self._groups.leave(lost, kept))
        except OperationFailure as failure:
            self._survive(failure)

    # ------------------------------------------------------------ memory
    def _relieve(self) -> None:
        """Act on what memory and live buffers call for, until there is room for the next step."""
        while True:
            rows = len(self.rows)
            for act in self._pressure_response.due():
                self._preempt(act)
            if len(self.rows) == rows:
                return

    def _preempt(self, act: PressureAction) -> None:
        """The newest row gives its memory back; the oldest never does."""
        if act.name != Verb.PREEMPT or not self.rows:
            return
        newest = self.rows[max(self.rows)]
        if len(self.rows) == 1:
            needed = f"needs more than the memory limit: {act.reading:.0f} of {act.threshold:.0f} bytes"
            self._fail(newest, "memory", needed)
            return
        self._checkpoints.save_leaving([newest.seq], ended=False)
        self._forget(newest.seq)
        self.runner.follow(self._groups.leave([newest.seq]))
        self._pressure_response.read_again()
        self._outbox.preempted(newest.seq)


def open_loop(
    channel: Channel, heartbeat: Heartbeat, snapshot: Snapshot, start: Start, settings: Settings, faults: Faults
) -> Loop:
    """Load the model, announce it, and give the loop that runs it. Raises StartupError."""
    from server.compute import attention, cudnn_shapes
    from server.engine import device, model

    began = perf_counter()
    if settings.wired_limit:
        maybe_set_recommended_wired_limit()
    if settings.pool_limit is not None:
        mx.set_cache_limit(settings.pool_limit)
    grammars = Grammars(channel.tokens)  # a second of work that stops every other thread: not once rows are running
    residency = Residency.open(settings, snapshot)  # before the weights, so that a native counter counts them
    if hidden := device.hidden_gpu():
        log.warning("MLX runs on the CPU: %s", hidden)
    cudnn_shapes.avoid()
    attention.install()
    here = f"{device.name()} {device_memory()}"
    opening = opened(settings, faults.spec, Path(start.model_path), here)  # hashes the weights while they are loaded
    trials = TrialResults(Probe, cache_folder(settings.cache_dir) / TRIALS, here, model.TRIED_OUT_BY)
    loaded = model.load(
        Path(start.model_path),
        trust_remote_code=settings.trust_remote_code,
        probe=start.probe,
        on_stage=heartbeat.enter,
        trials=trials,
        on_read=heartbeat.note_weights,
        files=start.files,
    )
    if opening is not None:
        opening.learn(loaded.model, batches=loaded.batches)
    residency.note_weights()
    heartbeat.enter(SERVING)
    channel.send(device.announce(start.epoch, loaded, residency, perf_counter() - began))
    return Loop(
        channel, heartbeat, snapshot, start, settings, loaded, residency, faults, grammars=grammars, opening=opening
    )
