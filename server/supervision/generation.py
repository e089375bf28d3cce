"""What the server keeps of each live generation, and how its reader gets at it.

Owns `GenerationHandle` (one request), its `Generation`s (one a choice) and the `GenerationDelta`s read from them.
Event-loop thread only. Never talks to an engine: whatever needs one is asked of the `GenerationOwner`, which is the
scheduler.

A generation is its sequence and every id delivered so far; that is all it takes to continue it elsewhere. Ids are
kept once: a reader that falls behind costs a larger slice, never a queue. Where they go to a `TokenLog`, too, its
reader gets them only after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Literal, Protocol

import msgspec

from server.errors import RequestError
from server.ipc.sequence import Finish, TokenLogprobs, TokenSequence
from server.ipc.snapshot import PromptProgress
from server.journal.record import NewTokens
from server.supervision.probation import DeathRecord

Cause = Literal["crash", "stall", "rotation", "preemption", "restart"]
Phase = Literal["queued", "prefill", "decode"]


class GenerationDelta(msgspec.Struct, frozen=True):
    """News of one choice: ids delivered since the last read. A drawn stop id is the last of them."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] = []  # aligned with `tokens` when asked for
    finish: Finish | None = None  # exactly once a choice
    cached: int | None = None  # prompt tokens from the prefix cache, with the first Delta
    prompt_logprobs: list[TokenLogprobs] | None = None


class TokenLog(Protocol):
    """Where the ids of a request are saved before they are read."""

    def append(self, news: NewTokens, then: Callable[[], None]) -> None:
        """Take news of a choice. Calls `then` on the event loop, in order: once they are saved, or once it is sure that
        they can't be."""
        ...


@dataclass(slots=True, eq=False)
class Generation:
    """One sequence on its way. Written by the scheduler and its output router, read by its `GenerationHandle`."""

    seq: int
    index: int  # among the sequences given to open
    sequence: TokenSequence
    live: GenerationHandle
    generated: list[int] = field(default_factory=list)
    past: DeathRecord = field(default_factory=DeathRecord)
    taken: bool = False  # the engine that it is in has begun to work on it
    ended: bool = False  # finished, cancelled or failed: no engine has it or will
    reason: Finish | None = None  # why it finished
    # timing, by the scheduler's clock; 0 is "not yet"
    submitted: float = 0.0  # to the first engine
    first: float = 0.0  # token
    last: float = 0.0  # token
    # set while it waits to be continued
    cause: Cause | None = None
    lost: float = 0.0
    waits: list[tuple[str, float]] = field(default_factory=list)  # what it waited for since, and seconds
    submitted_again: float = 0.0
    survived: int = 0  # engines that ended under it, and times that it gave its memory back
    # not read yet
    read: int = 0  # ids handed to the reader
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    started: bool = False  # by some engine: `cached` is known
    # of one whose ids are saved
    log: TokenLog | None = None
    logged: int = 0  # ids that the log was given
    saved: int = 0  # ids that may be read
    saving: int = 0  # entries of which the log hasn't said that they may be
    silenced: bool = False  # cancelled by its reader

    @property
    def length(self) -> int:
        """Positions it occupies."""
        return len(self.sequence.prompt) + len(self.generated)

    @property
    def phase(self) -> Phase:
        if not self.submitted:
            return "queued"
        if self.generated:
            return "decode"
        return "prefill"

    def news(self) -> GenerationDelta | None:
        """What the reader hasn't had yet; None if it has had all."""
        end = len(self.generated)
        if self.log is not None:
            end = self.saved
        if self.read == end and self.finish is None:
            return None
        tokens = self.generated[self.read : end]
        logprobs = self.logprobs
        if logprobs:
            self.logprobs = logprobs[len(tokens) :]
            logprobs = logprobs[: len(tokens)]
        delta = GenerationDelta(tokens, logprobs, self.finish, self.cached, self.prompt_logprobs)
        self.read = end
        self.finish = None
        self.cached = None
        self.prompt_logprobs = None
        return delta

    def is_over(self) -> bool:
        """Nothing will come of it any more and nothing is left to read."""
        return self.ended and self.finish is None and (self.silenced or not self.saving)

    def silence(self) -> None:
        """Drop what its reader will not read: the reader has left."""
        self.silenced = True
        self.read = len(self.generated)
        self.finish = None

    def go_on(self, generated: Sequence[int], now: float) -> None:
        """It has these ids from an earlier life of the server; they were saved and read then."""
        self.generated = list(generated)
        self.read = self.logged = self.saved = self.past.mark = len(self.generated)
        self.cause = "restart"
        self.lost = now
        if self.generated:
            self.started = True
            self.first = self.last = now

    # ---------------------------------------------------------------- saved before it is read
    def save(self) -> None:
        """Give the log what it hasn't had."""
        assert self.log is not None
        start = self.logged
        cached = None
        if not start:
            cached = self.cached
        self.logged = len(self.generated)
        self.saving += 1
        logprobs = self.logprobs[start - self.read :]
        news = NewTokens(self.index, self.generated[start:], logprobs, self.reason, cached)
        self.log.append(news, partial(self._may_be_read, self.logged, self.reason))

    def _may_be_read(self, end: int, finish: Finish | None) -> None:
        self.saving -= 1
        self.saved = end
        if not self.silenced:
            self.finish = finish
        self.live.wake()


class GenerationOwner(Protocol):
    """Runs the generations of a handle."""

    def clock(self) -> float: ...

    def release(self, generation: Generation) -> None: ...

    def leave(self, live: GenerationHandle) -> None: ...  # which releases what still runs

    def prefill_progress(self, live: GenerationHandle) -> PromptProgress | None: ...


class GenerationHandle:
    """One request: an async context manager; leaving it cancels whatever still runs.

    Enter it right after `Supervisor.open`, or `close` it: until then its rows have no owner.

    Attributes:
        sequences: as given to open.
        arrived: by the scheduler's clock.
        outcome: label of `marathon_requests_total`; set it to say more than the scheduler can see (tool_calls).
        background: goes on at the next start of the server, so that a drain doesn't wait for it.
    """

    def __init__(
        self,
        keeper: GenerationOwner,
        sequences: Sequence[TokenSequence],
        endpoint: str,
        seqs: Sequence[int],
        *,
        log: TokenLog | None = None,
        background: bool = False,
    ) -> None:
        self.sequences = list(sequences)
        self.endpoint = endpoint
        self.arrived = keeper.clock()
        self.outcome: str | None = None
        self.background = background
        self.generations = [
            Generation(seq, i, s, self, log=log) for i, (seq, s) in enumerate(zip(seqs, sequences, strict=True))
        ]
        self.error: RequestError | None = None
        self.first = 0.0  # first token of any choice
        self.expiry: asyncio.TimerHandle | None = None
        self.waiter: asyncio.Future[None] | None = None
        self._keeper = keeper
        self._left = False
        self._alarm: asyncio.TimerHandle | None = None
        self._wake_at = 0.0

    async def __aenter__(self) -> GenerationHandle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.outcome is None and kind is not None and issubclass(kind, Exception):
            self.outcome = "error"
        self.close()

    def close(self) -> None:
        """Cancels whatever still runs; idempotent."""
        if self._left:
            return
        self._left = True
        for timer in (self.expiry, self._alarm):
            if timer is not None:
                timer.cancel()
        self._keeper.leave(self)

    @property
    def prefill_progress(self) -> PromptProgress | None:
        """How far the reading of its prompt is, while that goes on; of several prompts the one that is furthest."""
        return self._keeper.prefill_progress(self)

    @property
    def done(self) -> bool:
        """Nothing will come any more and nothing is left to read."""
        return self.error is None and all(map(Generation.is_over, self.generations))

    def cancel(self, index: int) -> None:
        """Stops one choice; no further Delta for it. Idempotent."""
        generation = self.generations[index]
        self._keeper.release(generation)
        generation.silence()

    async def read(self, timeout: float) -> list[tuple[int, GenerationDelta]]:
        """News of the choices, as (index, Delta); [] after `timeout` seconds of silence.

        Raises a RequestError when the request can't go on, after what came before it was read.
        """
        if not (news := self._news()):
            if self.done:
                raise RuntimeError("all choices of this request have been read to their end")
            await self._wait(timeout)
            news = self._news()
        return news

    def _news(self) -> list[tuple[int, GenerationDelta]]:
        news = [(g.index, delta) for g in self.generations if (delta := g.news()) is not None]
        if not news and self.error is not None and not self._is_saving:
            raise self.error
        return news

    @property
    def _is_saving(self) -> bool:
        """Some of its ids aren't saved yet; their reader gets them before an error."""
        return any(generation.saving and not generation.silenced for generation in self.generations)

    # ---------------------------------------------------------------- waiting
    async def _wait(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        self.waiter = loop.create_future()
        self._wake_at = loop.time() + timeout
        if self._alarm is None or self._alarm.when() > self._wake_at:
            self._set_alarm(loop)
        try:
            await self.waiter
        finally:
            self.waiter = None

    def _set_alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = loop.call_at(self._wake_at, self._rouse, loop)

    def _rouse(self, loop: asyncio.AbstractEventLoop) -> None:
        """The alarm. It isn't moved at each read, a timer a token would cost more than the token; it looks again."""
        self._alarm = None
        if self.waiter is None:
            return
        if loop.time() < self._wake_at:
            self._set_alarm(loop)
        else:
            self.wake()

    def wake(self) -> None:
        """Lets the reader look. Any number of calls before it runs are one."""
        if (waiter := self.waiter) is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, error: RequestError) -> None:
        """The request can't go on; the reader learns of it once it has read what came before."""
        if self.error is None:
            self.error = error
            if not self._is_saving:
                self.wake()
