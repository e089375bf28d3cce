"""An answer made from its tokens: the same events for every reader, at any time.

Owns the way from a request, tokens and an end to events and to the final object. The events depend on nothing else:
tokens are read one by one, however many come together, and the end is apart from the last token. Runs on the event
loop. A run feeds it while the answer forms; a replay feeds it what the journal kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol, cast

import msgspec

from server.api.output.choices import Choice, usage_of
from server.api.output.respond import PreparedRequest, ProtocolFormat
from server.api.output.responses import ResponsesForm
from server.api.output.sse import encode
from server.errors import RequestError
from server.ipc.sequence import Finish, TokenSequence
from server.journal.record import Record, Status, StoredTokens
from server.supervision.generation import GenerationDelta
from server.text.detokenizer import Piece

SLICE = 64  # tokens that are read before other tasks have their turn
STOPPED = "stopped"  # by a stop string


class StoredFormat(ProtocolFormat, Protocol):
    """The form of an answer that can be kept.

    Attributes:
        ended: when the answer ended, in unix time.
        final: the object that the last event had.
    """

    ended: float | None
    final: dict[str, Any]

    def started(self, choices: list[Choice]) -> bytes:
        """Events once an engine has begun with it."""

    def broken(self, error: dict[str, Any], choices: list[Choice], usage: dict[str, Any]) -> bytes:
        """Events of the end of an answer that failed with this error."""

    def cancelled(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        """Events of the end of an answer that was cancelled."""

    def sign_of_life(self, comment: bytes, number: int) -> bytes:
        """For a reader whose last event had this number."""


class Transcript:
    """One answer; mutable, owned by its run or its replay. Every method that adds to it returns new events as bytes."""

    def __init__(self, prepared: PreparedRequest, sequences: Sequence[TokenSequence], *, streams: bool) -> None:
        """`sequences`: those that the answer began with; prepared again, others would have other seeds. `streams`: its
        pieces become events; else they are put together for the plain answer."""
        self.form = cast(StoredFormat, prepared.form)
        self.cached: list[int | None] = [None] * len(sequences)
        self.choices = [
            Choice(i, sequence, text, keeps_ids=bool(prepared.request.return_token_ids))
            for i, (sequence, text) in enumerate(zip(sequences, prepared.texts, strict=True))
        ]
        self._per_prompt = prepared.request.n or 1
        self._streams = streams
        self._has_started = False

    @property
    def is_complete(self) -> bool:
        """Every choice has come to its end."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def status(self) -> Status:
        """How an answer that has come to its end ended."""
        if any(choice.finish == "length" for choice in self.choices):
            return "incomplete"
        return "completed"

    @property
    def usage(self) -> dict[str, Any]:
        return usage_of(self.choices, self._per_prompt)

    @property
    def finishes(self) -> list[str | None]:
        """How each choice ended, as the journal keeps it."""
        return [STOPPED if choice.text.stopped else choice.finish for choice in self.choices]

    def know_cached(self, cached: Sequence[int | None]) -> None:
        """By choice, what the first engine said."""
        self.cached = list(cached)
        for choice, count in zip(self.choices, cached, strict=True):
            choice.cached = count or 0

    # ---------------------------------------------------------------- as it forms
    def begin(self) -> bytes:
        return self.form.first(self.choices)

    def start(self) -> bytes:
        """An engine has begun with it. Only the first call makes events."""
        if self._has_started:
            return b""
        self._has_started = True
        return self.form.started(self.choices)

    def feed(self, index: int, delta: GenerationDelta) -> bytes:
        """News of one choice, token by token; what follows a stop string is left out."""
        choice = self.choices[index]
        data = [self._note(choice, delta)]
        for place, token in enumerate(delta.tokens):
            if choice.finish is None:
                data.append(self._take(choice, GenerationDelta([token], delta.logprobs[place : place + 1])))
        if delta.finish is not None and choice.finish is None:
            data.append(self._take(choice, GenerationDelta([], finish=delta.finish)))
        return b"".join(data)

    def _note(self, choice: Choice, delta: GenerationDelta) -> bytes:
        """Note what only a first delta has. After a restart another engine says it again; the first value stays."""
        if self.cached[choice.index] is None and delta.cached is not None:
            self.cached[choice.index] = choice.cached = delta.cached
        if delta.prompt_logprobs is not None:
            choice.prompt_logprobs = delta.prompt_logprobs
        return self.start()

    def _take(self, choice: Choice, delta: GenerationDelta) -> bytes:
        return self._add(choice, choice.take(delta))

    def _add(self, choice: Choice, pieces: list[Piece]) -> bytes:
        if self._streams:
            return self.form.chunks(choice, pieces)
        self.form.keep(choice, pieces)
        return b""

    # ---------------------------------------------------------------- its end
    def complete(self, ended: float) -> bytes:
        """The last events of an answer that has come to its end."""
        self.form.ended = ended
        data = self.form.last(self.choices, self.usage)
        if not self._streams:
            self.form.final = self.whole()
        return data

    def cancel(self, ended: float) -> bytes:
        """The last events of an answer that was cancelled."""
        self.form.ended = ended
        return self.start() + self.form.cancelled(self.choices, self.usage)

    def fail(self, error: RequestError, ended: float) -> bytes:
        """The last events of an answer that can't go on."""
        self.form.ended = ended
        return self.start() + self.form.failed(error, self.choices, self.usage)

    def fail_as(self, error: bytes | None) -> bytes:
        """The same for an error as the journal has it."""
        decoded = msgspec.json.decode(error or b"{}")
        return self.start() + self.form.broken(decoded, self.choices, self.usage)

    def whole(self) -> dict[str, Any]:
        """Put the plain answer together. That uses the pieces up: only once, and only for an answer that isn't
        streamed."""
        return self.form.whole(self.choices, self.usage)

    @property
    def answer(self) -> bytes | None:
        """The final object, once the answer has ended with one."""
        if not self.form.final:
            return None
        return encode(self.form.final)


# ---------------------------------------------------------------- from the journal
async def restored_events(
    transcript: Transcript, stored: Sequence[StoredTokens], finishes: Sequence[str | None], most: int | None = None
) -> AsyncGenerator[bytes, None]:
    """Make the events of the stored tokens, in slices between which other tasks have their turn. `most`: no more tokens
    than these, of an answer of one choice."""
    for index, choice in enumerate(stored):
        for place in range(0, len(choice.tokens[:most]), SLICE):
            end = place + SLICE
            if most is not None:
                end = min(end, most)
            yield transcript.feed(index, GenerationDelta(choice.tokens[place:end], choice.logprobs[place:end]))
            await asyncio.sleep(0)
        finish = finishes[index]
        if finish is not None and finish != STOPPED:
            yield transcript.feed(index, GenerationDelta([], finish=cast(Finish, finish)))


async def replay(transcript: Transcript, record: Record, stored: Sequence[StoredTokens]) -> AsyncGenerator[bytes, None]:
    """All events of a response that has ended."""
    yield transcript.begin()
    interrupted = record.status in ("failed", "cancelled")
    finishes = record.finishes
    most = None
    if interrupted and record.answer is not None:
        most = _counted_tokens(record.answer)
    if interrupted:
        finishes = [None] * len(stored)
    async for data in restored_events(transcript, stored, finishes, most):
        yield data
    if record.answer is None and record.status == "cancelled":
        yield transcript.cancel(record.ended or record.created)
    elif record.answer is None:
        yield transcript.fail_as(record.error)
    else:
        form = cast(ResponsesForm, transcript.form)
        yield transcript.start() + form.interrupted() + form.ending(record.answer, record.status)


def _counted_tokens(answer: bytes) -> int | None:
    """How many tokens had become events when an answer was interrupted; later ones may have been saved."""
    usage = msgspec.json.decode(answer)["usage"]
    return usage and int(usage["output_tokens"])
