"""Grammars that are still being compiled.

Owns which rows wait for their grammar. A side thread compiles; this is the engine process's main thread, which looks
whether something is done and never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from server.compute.rows import Row
from server.engine.constraints import Grammars, Matcher

COMPILE_SECONDS = 20.0


class PendingGrammars:
    """The rows that wait for their grammar. Owned by the loop."""

    def __init__(self, grammars: Grammars, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called in the side thread when a grammar is done."""
        self._wake = wake
        self._grammars = grammars
        self._futures: dict[int, tuple[Row, Future[Matcher]]] = {}
        self._is_reported = False  # a grammar can't be compiled, and the server knows

    @property
    def is_busy(self) -> bool:
        """Whether a grammar is being compiled."""
        return self._grammars.seconds() > 0

    def begin(self, row: Row) -> None:
        """Compile the row's grammar, if it has one, and replay what was generated."""
        if row.sequence.grammar is not None:
            generated = row.tokens[len(row.sequence.prompt) :]
            future = self._grammars.compile(row.sequence, generated)
            self._futures[row.seq] = row, future
            future.add_done_callback(lambda _: self._wake())

    def cancel(self, seq: int) -> None:
        """The row has gone; one that has no grammar is no fault."""
        if seq in self._futures:
            _, future = self._futures.pop(seq)
            future.cancel()

    def take(self) -> list[tuple[Row, str]]:
        """Give the grammars that are ready to their rows; returns those whose grammar can't be compiled, and why."""
        failed = []
        for row, future in [entry for entry in self._futures.values() if entry[1].done()]:
            del self._futures[row.seq]
            if error := future.exception():
                failed.append((row, f"the grammar can't be compiled: {error}"))
            else:
                row.constraint = future.result()
        return failed

    def endless(self) -> tuple[float, list[Row]] | None:
        """A grammar that goes on and on: for how many seconds, and whose it is. Reported once.

        What the server has checked takes a second. One that takes longer can't be stopped, whether its row is still
        there or not, so the row ends and the process is replaced.
        """
        seconds = self._grammars.seconds()
        if self._is_reported or seconds <= COMPILE_SECONDS:
            return None
        self._is_reported = True
        return seconds, [row for row, future in self._futures.values() if future.running()]

    def close(self) -> None:
        self._grammars.close()
