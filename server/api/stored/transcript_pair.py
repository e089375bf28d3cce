"""One answer on its way to its readers, and to the journal.

Owns the pair of transcripts that a streamed chat needs: one makes the events, the other puts the plain answer together,
since each takes the pieces that it uses away from its choices. A response needs one, whose last event has the whole
answer. Runs on the event loop.
"""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, cast

from server.api.input.large_requests import Packer, Unpacker
from server.api.output.respond import PreparedRequest
from server.api.output.responses import ResponsesForm
from server.api.stored.transcript import Transcript, restored_events
from server.errors import RequestError
from server.ipc.sequence import TokenSequence
from server.journal.record import Status, StoredTokens
from server.supervision.generation import GenerationDelta, GenerationHandle
from server.text.tokenizer import Tokenizer


def copied(prepared: PreparedRequest, tokenizer: Tokenizer) -> PreparedRequest:
    """Return the same request with texts of its own, as long as nothing was read with it."""
    file = io.BytesIO()
    Packer(file, tokenizer).dump(prepared.texts)
    file.seek(0)
    return replace(prepared, texts=Unpacker(file, tokenizer).load())


class TranscriptPair:
    """The transcripts of one answer. Mutable, owned by the run of that answer.

    Attributes:
        cached: by choice, prompt tokens that came from the prefix cache; None as long as it isn't known.
    """

    def __init__(
        self, prepared: PreparedRequest, sequences: Sequence[TokenSequence], tokenizer: Tokenizer, *, streams: bool
    ) -> None:
        """`streams`: the client reads events. Of a response there are always some."""
        always_streams = isinstance(prepared.form, ResponsesForm)
        self._plain: Transcript | None = None
        if streams and not always_streams:
            self._plain = Transcript(copied(prepared, tokenizer), sequences, streams=False)
        self._events = Transcript(prepared, sequences, streams=streams or always_streams)

    @property
    def is_complete(self) -> bool:
        """Every choice has come to its end."""
        return self._events.is_complete

    @property
    def status(self) -> Status:
        """How an answer that has come to its end ended."""
        return self._events.status

    @property
    def outcome(self) -> str | None:
        """The label of the metrics, where they can't know it themselves."""
        if any(choice.finish == "tool_calls" for choice in self._events.choices):
            return "tool_calls"
        return None

    @property
    def cached(self) -> list[int | None]:
        return self._events.cached

    @property
    def finishes(self) -> list[str | None]:
        """By choice, as the journal has it."""
        return self._events.finishes

    @property
    def usage(self) -> dict[str, Any]:
        return self._events.usage

    @property
    def unfinished(self) -> list[int]:
        """Choices that haven't come to their end."""
        return [choice.index for choice in self._events.choices if choice.finish is None]

    @property
    def answer(self) -> bytes | None:
        """The final object, once the answer has ended."""
        return (self._plain or self._events).answer

    def know_cached(self, cached: Sequence[int | None]) -> None:
        """By choice, what the first engine said."""
        for transcript in filter(None, (self._events, self._plain)):
            transcript.know_cached(cached)

    def has_stopped(self, index: int) -> bool:
        """A choice has met a stop string."""
        return self._events.choices[index].text.stopped

    def snapshot(self, status: Status) -> dict[str, Any]:
        """The response as it is now."""
        return cast(ResponsesForm, self._events.form).snapshot(self._events.choices, status)

    def sign_of_life(self, comment: bytes, number: int) -> bytes:
        return self._events.form.sign_of_life(comment, number)

    def follow(self, live: GenerationHandle, indices: Sequence[int]) -> None:
        """Let the transcripts read how long the choices `indices` take."""
        for transcript in filter(None, (self._events, self._plain)):
            for index, generation in zip(indices, live.generations, strict=True):
                transcript.choices[index].generation = generation

    # ---------------------------------------------------------------- events, as bytes
    def begin(self) -> bytes:
        return self._events.begin()

    def start(self) -> bytes:
        return self._events.start()

    def feed(self, index: int, delta: GenerationDelta) -> bytes:
        if self._plain is not None:
            self._plain.feed(index, delta)
        return self._events.feed(index, delta)

    async def restored_events(
        self, stored: Sequence[StoredTokens], finishes: Sequence[str | None]
    ) -> AsyncGenerator[bytes, None]:
        """Make the events of the tokens that the journal has, for an answer that goes on."""
        if self._plain is not None:
            async for _ in restored_events(self._plain, stored, finishes):
                pass
        async for data in restored_events(self._events, stored, finishes):
            yield data

    def complete(self, ended: float) -> bytes:
        if self._plain is not None:
            self._plain.complete(ended)
        return self._events.complete(ended)

    def cancel(self, ended: float) -> bytes:
        return self._events.cancel(ended)

    def fail(self, error: RequestError, ended: float) -> bytes:
        return self._events.fail(error, ended)
