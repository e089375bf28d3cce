"""Metrics of the journal, and the verbs that count.

Owns the families about stored answers. Runs on the event loop; a scrape reads what is known there and never asks
SQLite. No verb raises or waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import Metric

from server.journal.record import FINAL, STATUSES, Status
from server.journal.state import JournalState
from server.telemetry.series import Counter, Family, Histogram, metric

COMMIT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

WRITABLE = Family("marathon_journal_writable", "1: answers can be stored; 0: they can't. Absent without one.", "gauge")
BYTES = Family("marathon_journal_bytes", "What stored answers take on disk.", "gauge")
LIMIT = Family("marathon_journal_limit_bytes", "What they may take; the oldest are removed beyond it.", "gauge")
STORED = Family("marathon_stored_answers", "Answers in the journal, by status.", "gauge", ("status",))
READERS = Family("marathon_stored_answer_readers", "Streams of stored answers that are being read.", "gauge")


class JournalView(Protocol):
    """What a scrape reads."""

    @property
    def state(self) -> JournalState: ...


class JournalMetrics:
    """What is counted of stored answers. Set `view` to the journal; before that there are the counts alone."""

    def __init__(self) -> None:
        self.view: JournalView | None = None
        self._ended = Counter(
            "marathon_stored_answers_ended_total", "Stored answers that came to a final status, by that.", status=FINAL
        )
        self._commits = Histogram("marathon_journal_commit_seconds", "How long transactions took.", COMMIT)
        self._failures = Counter("marathon_journal_failures_total", "Changes that couldn't be written at once.")
        self._unsaved = Counter(
            "marathon_journal_unsaved_tokens_total", "Tokens of stored answers that were sent before they were saved."
        )
        self._counted = (self._ended, self._commits, self._failures, self._unsaved)

    @property
    def state(self) -> JournalState | None:
        """Of the journal at this moment; None before there is one."""
        if self.view is None:
            return None
        return self.view.state

    def families(self) -> list[Family]:
        """Every family, whether it has samples now or not."""
        return [WRITABLE, BYTES, LIMIT, STORED, READERS, *(counted.family for counted in self._counted)]

    def collect(self) -> Iterator[Metric]:
        """Yield what there is to report now: gauges only where there is a journal."""
        yield from (counted.collect() for counted in self._counted)
        state = self.state
        if state is None or state.condition == "off":
            return
        yield metric(WRITABLE, {(): float(state.condition == "on")})
        yield metric(BYTES, {(): state.bytes})
        yield metric(LIMIT, {(): state.limit})
        yield metric(STORED, {(status,): state.stored.get(status, 0) for status in STATUSES})
        yield metric(READERS, {(): state.readers})

    # ---------------------------------------------------------------- verbs
    def ended(self, status: Status) -> None:
        """A stored answer has its final status."""
        self._ended.add(1, status)

    def committed(self, seconds: float) -> None:
        """One transaction."""
        self._commits.observe(seconds)

    def failed(self) -> None:
        self._failures.add(1)

    def unsaved(self, tokens: int) -> None:
        """Tokens that go to their readers although they couldn't be written."""
        self._unsaved.add(tokens)
