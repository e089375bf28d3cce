"""Puts what the engine sends into the generations that it belongs to.

Owns nothing but the way from a `Steps` message to its readers, and the timings that are counted on it. Event-loop
thread only; never decides who runs.

This is the hot path of the server: what `deliver` does for a row, it does some ten thousand times a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from server.ipc import framing, messages
from server.ipc.sequence import Finish
from server.supervision.generation import Generation


class OutputCounts(Protocol):
    """What the metrics count. Every verb is cheap and raises nothing."""

    def generated(self, count: int) -> None: ...
    def inter_token(self, seconds: float, count: int) -> None: ...
    def queue_time(self, seconds: float) -> None: ...
    def prefill_time(self, seconds: float) -> None: ...
    def decode_time(self, seconds: float) -> None: ...
    def prompt(self, tokens: int, cached: int) -> None: ...
    def first_token(self, endpoint: str, seconds: float) -> None: ...
    def finished(
        self, endpoint: str, outcome: str, seconds: float, prompt_tokens: int, generated_tokens: int
    ) -> None: ...
    def disconnected(self, phase: str) -> None: ...
    def engine_restarted(self, reason: str) -> None: ...
    def resumed(self, reason: str, seconds: float) -> None: ...
    def resume_waited(self, part: str, seconds: float) -> None: ...
    def recomputed(self, reason: str, tokens: int) -> None: ...
    def action(self, name: str) -> None: ...


class OutputRouter:
    """Hands on what the engine sends."""

    def __init__(self, counts: OutputCounts, clock: Callable[[], float]) -> None:
        self._counts = counts
        self._clock = clock
        self._to_save: dict[int, Generation] = {}  # of this message

    def deliver(self, step: messages.Steps, running: dict[int, Generation]) -> None:
        """Note what `step` says of the rows that `running` still holds, and wake their readers."""
        if len(step.seqs) != len(step.tokens):
            raise framing.TornFrame(f"{len(step.tokens)} tokens for {len(step.seqs)} rows")
        now = self._clock()
        asked = step.logprobs
        delivered = 0
        gaps: dict[float, int] = {}  # rows of a step nearly always share their last one, and so their gap
        for started in step.started:
            if (begun := running.get(started.seq)) is not None:
                self._started(begun, started)
        for seq, token in zip(step.seqs, step.tokens, strict=True):
            generation = running.get(seq)
            if generation is None:  # cancelled a moment ago
                continue
            delivered += 1
            generation.generated.append(token)
            if asked and seq in asked:
                generation.logprobs.append(asked[seq])
            if generation.cause is not None:
                self._resumed(generation, now)
            if generation.last:
                gaps[generation.last] = gaps.get(generation.last, 0) + 1
            else:
                self._first_token(generation, now)
            generation.last = now
            if generation.log is None:
                generation.live.wake()
            else:
                self._to_save[seq] = generation
        self._count(gaps, delivered, now)

    def finish(self, generation: Generation, reason: Finish) -> None:
        """A generation has come to its end, after its last token."""
        generation.reason = reason
        if generation.log is None:
            generation.finish = reason
            generation.live.wake()
        else:
            self._to_save[generation.seq] = generation

    def save(self) -> None:
        """What the message said of generations that are stored goes to their logs, ends together with last tokens."""
        for generation in self._to_save.values():
            generation.save()
        self._to_save.clear()

    def _count(self, gaps: dict[float, int], tokens: int, now: float) -> None:
        for last, count in gaps.items():
            self._counts.inter_token(now - last, count)
        if tokens:
            self._counts.generated(tokens)

    def _started(self, generation: Generation, started: messages.RowStart) -> None:
        if generation.cause is not None and generation.started:
            self._counts.recomputed(generation.cause, generation.length - 1 - started.reused)  # the last is decoded
        if not generation.started:
            generation.started = True
            generation.cached = started.cached
            generation.prompt_logprobs = started.prompt_logprobs
            self._counts.prompt(len(generation.sequence.prompt), started.cached)

    def _first_token(self, generation: Generation, now: float) -> None:
        generation.first = now
        self._counts.prefill_time(now - generation.submitted)
        live = generation.live
        if not live.first:
            live.first = now
            self._counts.first_token(live.endpoint, now - live.arrived)

    def _resumed(self, generation: Generation, now: float) -> None:
        assert generation.cause is not None
        self._counts.resumed(generation.cause, now - (generation.last or generation.lost))
        for part, seconds in generation.waits:
            self._counts.resume_waited(part, seconds)
        self._counts.resume_waited("read", now - generation.submitted_again)
        generation.cause = None
