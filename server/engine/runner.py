"""Carries plans out: an operation after the other, with the clock, the heartbeat and the record around each.

Owns the record of the iteration's operations and what is known of how long they take. Runs in the engine process's
main thread. It decides nothing about rows.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import mlx.core as mx

from server.compute.rows import Row
from server.compute.stopwatch import Stopwatch
from server.engine.durations import Durations
from server.engine.executor import Executor
from server.engine.plan import Census, Operation, Plan, Read, Result, Step, follow
from server.engine.prefill import padded
from server.faults import Faults
from server.ipc.snapshot import Snapshot

T = TypeVar("T")


class ProgressCounter(Protocol):
    """Counts progress; the server takes an engine whose count stands still for stuck."""

    count: int

    def beat(self) -> None: ...


class RowBudget(Protocol):
    """Says how many bytes rows may still take."""

    @property
    def room(self) -> int: ...


class Runner:
    """Owned by the loop."""

    def __init__(
        self,
        executor: Executor,
        rows: dict[int, Row],
        watch: Stopwatch,
        heartbeat: ProgressCounter,
        snapshot: Snapshot,
        faults: Faults,
        memory: RowBudget,
    ) -> None:
        self.executor = executor
        self.record: list[Operation] = []  # of the iteration
        self._rows = rows
        self._watch = watch
        self._heartbeat = heartbeat
        self._snapshot = snapshot
        self._faults = faults
        self._is_sound = not faults.spec
        self._memory = memory
        self._durations = Durations()
        self._leaked: list[mx.array] = []  # by a fault that was asked for

    @property
    def progress(self) -> int:
        """Chunks and steps since the engine began."""
        return self._heartbeat.count

    @property
    def room(self) -> int:
        """Bytes that rows may still take."""
        return self._memory.room

    def begin(self) -> None:
        """A new iteration: its record is empty."""
        self.record = []

    def resumed(self) -> None:
        """A sequence comes that another engine has begun."""
        self._faults.reached("resume")

    def follow(self, plan: Plan[T], *, part: str = "") -> T:
        """Carry out what is planned, and give back to the plan what came of each operation. The time counts for `part`.
        Raises OperationFailure."""
        began = self._watch.clock()
        try:
            return follow(plan, self.run)
        finally:
            if part:
                self._watch.seconds[part] += self._watch.clock() - began

    def run(self, operation: Operation) -> Result:
        """Carry out one operation. Raises OperationFailure."""
        self._before(operation)
        started = self._watch.clock()
        outcome = self.executor.run(operation)
        seconds = self._watch.clock() - started
        self.record.append(operation)
        self._after(operation, seconds)
        if isinstance(operation, (Step, Census)):  # nothing is planned by the room that these leave
            return Result(outcome, seconds)
        return Result(outcome, seconds, self._memory.room)

    def close(self) -> None:
        self._leaked.clear()
        self.executor.close()

    # ------------------------------------------------------------ around an operation
    def _before(self, operation: Operation) -> None:
        """The first of its shape may have to be compiled: the server is more patient with it."""
        if isinstance(operation, Step):
            self._inject(operation)
            self._enter("step", len(self.executor.batches[operation.batch]))
        elif isinstance(operation, Read):
            total = padded(size for _, size in operation.parts)
            self._enter("chunk", 1 << (total - 1).bit_length())

    def _enter(self, kind: str, size: int) -> None:
        self._durations.enter(kind, size)
        self._snapshot.first_shape = self._durations.is_first
        self._snapshot.typical_step_seconds = self._durations.usual

    def _after(self, operation: Operation, seconds: float) -> None:
        if isinstance(operation, Step):
            self._leave(seconds)
            self._note_step(operation)
        elif isinstance(operation, Read):
            self._leave(seconds)
            self._sabotage_reading(operation)

    def _leave(self, seconds: float) -> None:
        self._durations.leave(seconds)
        self._snapshot.first_shape = False
        self._heartbeat.beat()

    def _note_step(self, operation: Step) -> None:
        snapshot = self._snapshot
        batch = self.executor.batches[operation.batch]
        snapshot.steps += 1
        snapshot.batch_sizes[len(batch)] = snapshot.batch_sizes.get(len(batch), 0) + 1

    # ------------------------------------------------------------ faults that were asked for
    def _inject(self, operation: Step) -> None:
        if self._is_sound:
            return
        self._faults.reached("decode")
        batch = self.executor.batches[operation.batch]
        for row in batch.rows:
            if row.tokens[0] in self._faults.poison:
                self._faults.poisoned("decode", row.tokens[0], batch.produced(row))
        for _ in range(self._faults.spec.leak):
            self._leaked.append(mx.array([0] * 64))

    def _sabotage_reading(self, operation: Read) -> None:
        if self._is_sound:
            return
        for seq in operation.seqs:
            row = self._rows[seq]
            if row.rebuilds == 0:
                self._faults.reached("prefill")
                self._faults.poisoned("prefill", row.tokens[0], row.produced)
