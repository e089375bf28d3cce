"""The making of one stored answer.

Owns its generation from beginning to end, whether it has readers or not: the engine's tokens go into the transcript
and its event log, and how the answer ended is decided here, once. Event-loop thread only. Never waits for a reader and
never writes to a client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from server.api.output.responses import error_of
from server.api.output.sse import KEEPALIVE, PREFILL, encode
from server.api.stored.event_log import EventLog
from server.api.stored.transcript_pair import TranscriptPair
from server.errors import Cancellation, Draining, InternalError, RequestError
from server.journal.journal import Journal
from server.journal.record import Record, Status
from server.supervision.generation import GenerationHandle

LOOK_SECONDS = (0.02, 1.0)  # shortest and longest time between two looks whether an engine has begun
READ_SECONDS = 60.0
CANCELLED = "The answer was cancelled by another request."

log = logging.getLogger("marathon.api")


class AnswerRun:
    """One answer while it is made.

    Attributes:
        record: as the journal had it at first.
        log: the events so far; empty until the run has begun.
        transcripts: None for an answer of an earlier server, as long as it isn't taken up.
        status: as the API names it.
        answer: the final object.
        error: why it failed.
        ended: set once it is known how it ended and the journal knows, too, or once the server's end interrupts it.
    """

    def __init__(self, record: Record, journal: Journal, transcripts: TranscriptPair | None = None) -> None:
        self.record = record
        self.log = EventLog()
        self.transcripts = transcripts
        self.status: Status = record.status
        self.answer: bytes | None = None
        self.error: RequestError | None = None
        self.ended = asyncio.Event()
        self._journal = journal
        self._live: GenerationHandle | None = None
        self._is_wanted = True
        self._is_decided = False
        self._look = LOOK_SECONDS[0]

    # ---------------------------------------------------------------- what others may ask
    def cancel(self) -> None:
        """Ends it as soon as what came before has been noted. Idempotent; does nothing once it has ended."""
        self._is_wanted = False
        if self._live is not None:
            self._live.outcome = "cancelled"
            self._live.fail(Cancellation(CANCELLED))

    def leave(self) -> None:
        """Its own client has gone: the end of an answer in the foreground."""
        if not self.record.background:
            self.cancel()

    def close(self) -> None:
        """The stream of its own client is over, however."""
        if not self.ended.is_set():
            self.leave()

    @property
    def is_generated(self) -> bool:
        """It has a generation, which ends it."""
        return self._live is not None

    def snapshot(self) -> dict[str, Any] | None:
        """The response as it is now; None until the run has begun."""
        if self.transcripts is None:
            return None
        return self.transcripts.snapshot(self.status)

    @property
    def facts(self) -> dict[str, Any]:
        """For the access log."""
        if self.transcripts is None:
            return {}
        usage = self.transcripts.usage
        return {
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "finish": self.status,
        }

    def alive(self, number: int) -> bytes:
        """A sign of life for a reader whose last event has this number."""
        comment = KEEPALIVE
        if self._live is not None and (progress := self._live.prefill_progress):
            comment = PREFILL % (progress.done, progress.total)
        if self.transcripts is None or number < 0:
            return comment
        return self.transcripts.sign_of_life(comment, number)

    # ---------------------------------------------------------------- its life
    async def make(self, transcripts: TranscriptPair, live: GenerationHandle, indices: Sequence[int]) -> None:
        """Reads `live`, whose sequences are the answer's choices `indices`, to its end, and decides how it ended."""
        if self._is_decided:
            live.close()
            return
        self.transcripts = transcripts
        self._live = live
        transcripts.follow(live, indices)
        if not self._is_wanted:
            self.cancel()
        try:
            async with live:
                await self._follow(transcripts, live, indices)
                live.outcome = transcripts.outcome
            await self.decide()
        except Draining as error:
            if self.record.background:
                self._let_go()
            else:
                await self.fail(error)
        except Cancellation:
            await self.abandon()
        except RequestError as error:
            await self.fail(error)
        except Exception:
            log.exception("%s failed", self.record.id)
            await self.fail(InternalError("The server made a mistake; its log knows more."))

    async def _follow(self, transcripts: TranscriptPair, live: GenerationHandle, indices: Sequence[int]) -> None:
        while not transcripts.is_complete:
            for place, delta in await live.read(self._patience()):
                self.log.add(transcripts.feed(indices[place], delta))
                if transcripts.has_stopped(indices[place]):
                    live.cancel(place)
            if self.status == "queued" and any(generation.submitted for generation in live.generations):
                await self._begin(transcripts)

    def _patience(self) -> float:
        """Seconds until it is looked at again: often while it isn't known whether an engine has begun."""
        if self.status != "queued":
            return READ_SECONDS
        self._look = min(self._look * 2, LOOK_SECONDS[1])
        return self._look

    async def _begin(self, transcripts: TranscriptPair) -> None:
        self.status = "in_progress"
        self.log.add(transcripts.start())
        await self._journal.begin(self.record.id)

    # ---------------------------------------------------------------- its end
    async def decide(self) -> None:
        """It has come to its end."""
        assert self.transcripts is not None
        ended = time.time()
        data = self.transcripts.complete(ended)
        await self._end(self.transcripts.status, data, ended)

    async def abandon(self) -> None:
        """It isn't wanted any more."""
        ended = time.time()
        data = b""
        if self.transcripts is not None:
            data = self.transcripts.cancel(ended)
        await self._end("cancelled", data, ended)

    async def fail(self, error: RequestError) -> None:
        """It can't go on."""
        self.error = error
        ended = time.time()
        data = b""
        if self.transcripts is not None:
            data = self.transcripts.fail(error, ended)
        await self._end("failed", data, ended)

    async def _end(self, status: Status, data: bytes, ended: float) -> None:
        """The journal knows before any reader does."""
        if self._is_decided:
            return
        self._is_decided = True
        facts: dict[str, Any] = {"ended": ended}
        if self.transcripts is not None:
            self.answer = self.transcripts.answer
            facts |= {"answer": self.answer, "finishes": self.transcripts.finishes, "cached": self.transcripts.cached}
        if self.error is not None:
            facts["error"] = encode(error_of(self.error))
        await self._journal.finish(self.record.id, status, **facts)
        self.status = status
        self.log.add(data)
        self._let_go()
        log.info("%s is %s", self.record.id, status)

    def _let_go(self) -> None:
        self._live = None
        self.log.end()
        self.ended.set()
