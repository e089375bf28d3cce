"""After a failed operation: which rows are rebuilt from their tokens, and which end.

Owns how often each row was rebuilt since its last token. Runs in the engine process's main thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from server.compute.rows import Row, StepOutput
from server.engine.groups import Groups
from server.engine.pending_grammars import PendingGrammars
from server.engine.plan import Abandon, OperationFailure, Seqs
from server.engine.prefill import Prefill
from server.engine.runner import Runner

MOST_REBUILDS = 2  # once together with the rows beside it, then alone
_FATAL = ("resource limit", "unable to allocate", "out of memory", "command buffer", "cudaerror", "device lost")

log = logging.getLogger("marathon.engine")


class DeviceWedge(Exception):
    """The allocator or the device queue can't go on in this process."""


def is_fatal(error: BaseException) -> bool:
    """Whether MLX's own words say that the process must be replaced."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _FATAL)


class Recovery:
    """Owned by the loop."""

    def __init__(
        self, rows: dict[int, Row], runner: Runner, groups: Groups, prefill: Prefill, pending_grammars: PendingGrammars
    ) -> None:
        self._rows = rows
        self._runner = runner
        self._groups = groups
        self._prefill = prefill
        self._pending_grammars = pending_grammars
        self._rebuilt: set[int] = set()  # rows without a token since they were rebuilt

    def survive(self, failure: Exception) -> list[tuple[Row, str]]:
        """Rebuild the rows of a failed operation from their tokens: once together, then each alone.

        Returns those that failed too often, and why. Raises DeviceWedge for an error of allocator or device, and for
        one that belongs to no operation.
        """
        error: BaseException = failure
        seqs: Seqs = ()
        if isinstance(failure, OperationFailure):
            error = failure.__cause__ or failure
            seqs = failure.seqs
        if is_fatal(error) or not seqs:
            raise DeviceWedge(f"the device can't go on: {error}") from error
        name = type(error).__name__
        log.error("a forward pass failed (rows: %d): %s: %s", len(seqs), name, error)
        ended = []
        for row in self._lost(seqs):
            row.rebuilds += 1
            if row.rebuilds > MOST_REBUILDS:
                ended.append((row, f"its forward pass fails: {name}"))
            else:
                row.solo = row.rebuilds > 1
                self._rebuild(row)
        return ended

    def _lost(self, seqs: Iterable[int]) -> list[Row]:
        """The rows whose caches are gone: those of the operation, their batch mates, and any that had left one place
        and not reached another."""
        lost = set(seqs)
        for number in self._groups.holding(lost):
            lost.update(row.seq for row in self._runner.executor.batches[number].rows)
            self._runner.run(Abandon(number))
        held = {row.seq for row in self._groups.all_rows()}
        lost.update(seq for seq in self._rows if seq not in held and not self._prefill.holds(seq))
        return [row for seq, row in self._rows.items() if seq in lost]

    def _rebuild(self, row: Row) -> None:
        self._prefill.remove(row.seq)
        self._pending_grammars.cancel(row.seq)
        self._rebuilt.add(row.seq)
        row.reset()
        self._pending_grammars.begin(row)
        self._prefill.insert(row)

    def forget(self, seq: int) -> None:
        """The row has gone."""
        self._rebuilt.discard(seq)

    def forgive(self, drawn: list[StepOutput]) -> None:
        """A rebuilt row that has delivered a token may fail anew; one that had to be set apart stays so."""
        if not self._rebuilt:
            return
        for seq in self._rebuilt.intersection(seq for news in drawn for seq in news.seqs):
            self._rebuilt.discard(seq)
            row = self._rows.get(seq)
            if row is not None and not row.solo:
                row.rebuilds = 0
