"""What the engine says to the server: tokens, ends and failures of rows.

Owns what is to be said with the next message. Runs in the engine process's main thread. It never decides what happens
to a row.
"""

from __future__ import annotations

import logging
from typing import Protocol

from server.compute.rows import Row, StepOutput
from server.compute.stopwatch import Stopwatch
from server.ipc.messages import End, Event, Preemption, Rotate, RowFailure, RowIntake, RowStart, Steps
from server.ipc.snapshot import Snapshot

log = logging.getLogger("marathon.engine")


class Sender(Protocol):
    def send(self, event: Event) -> None: ...


class Outbox:
    """Owned by the loop."""

    def __init__(self, sender: Sender, epoch: int, snapshot: Snapshot, watch: Stopwatch) -> None:
        self._sender = sender
        self._epoch = epoch
        self._snapshot = snapshot
        self._watch = watch
        self._started: list[RowStart] = []

    def taken(self, seq: int) -> None:
        """The engine has a sequence."""
        self._sender.send(RowIntake(self._epoch, seq))

    def begun(self, row: Row) -> None:
        """The row's first chunk is next."""
        prompt = len(row.sequence.prompt)
        found = min(row.cached, prompt)
        self._snapshot.prompt_tokens += prompt
        self._snapshot.cached_tokens += found
        self._count_tier(row)
        if not row.sequence.prompt_logprobs:
            self._started.append(RowStart(row.seq, found, reused=row.cached))

    def _count_tier(self, row: Row) -> None:
        """Where what the row begins with came from."""
        tier = "none"
        if row.is_from_disk:
            tier = "disk"
        elif row.cached:
            tier = "memory"
        lookups = self._snapshot.kv_lookups
        lookups[tier] = lookups.get(tier, 0) + 1
        tokens = self._snapshot.kv_lookup_tokens
        tokens[tier] = tokens.get(tier, 0) + row.cached
        tokens["none"] = tokens.get("none", 0) + len(row.tokens) - 1 - row.cached

    def scored(self, row: Row) -> None:
        """The prompt is read of a row that asked for its log probabilities."""
        self._started.append(RowStart(row.seq, 0, row.prompt_scores))

    def publish(self, drawn: list[StepOutput], ends: list[End]) -> None:
        """Send all that the rows of an iteration have to say in one message."""
        self._watch.start()
        self._snapshot.generated_tokens += sum(len(news.tokens) for news in drawn)
        self._send_steps(drawn, ends)
        self._watch.lap("publish")

    def _send_steps(self, drawn: list[StepOutput], ends: list[End]) -> None:
        started = self._started
        self._started = []
        if len(drawn) == 1 and not (ends or started or drawn[0].logprobs):
            self._sender.send(Steps(self._epoch, drawn[0].seqs, drawn[0].tokens))
            return
        seqs = [seq for news in drawn for seq in news.seqs]
        if not (seqs or ends or started):
            return
        tokens = [token for news in drawn for token in news.tokens]
        logprobs = {seq: value for news in drawn for seq, value in news.logprobs.items()}
        self._sender.send(Steps(self._epoch, seqs, tokens, ends, started, logprobs))

    def failed(self, seq: int, kind: str, message: str) -> None:
        """A row has ended with an error."""
        log.error("sequence %d ends: %s", seq, message)
        self._sender.send(RowFailure(self._epoch, seq, kind, message))

    def refused(self, seq: int, message: str) -> None:
        """A sequence can't be run here."""
        self._sender.send(RowFailure(self._epoch, seq, "row", message))

    def preempted(self, seq: int) -> None:
        """A row has given its memory back and is to be resumed later."""
        self._sender.send(Preemption(self._epoch, seq))

    def rotate(
        self, reading: float, threshold: float, reason: str, *, is_leak: bool = True, late: bool = False
    ) -> None:
        """The process should be replaced."""
        self._sender.send(Rotate(self._epoch, reading, threshold, reason, is_leak=is_leak, late=late))
