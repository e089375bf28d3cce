"""One answer on its way to those who read it, and to the journal.

Owns the pair of transcripts that a streamed chat needs: one tells the events, the other puts the plain answer together,
since each takes from a choice what it tells. A response tells both at once. Runs on the event loop.
"""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, cast

from server.api.input.large_requests import Packer, Unpacker
from server.api.output.respond import PreparedRequest
from server.api.output.responses import ResponsesForm
from server.api.stored.transcript import Transcript, retell
from server.errors import RequestError
from server.ipc.sequence import TokenSequence
from server.journal.record import Status, StoredTokens
from server.supervision.generation import GenerationDelta, GenerationHandle
from server.text.tokenizer import Tokenizer


def copied(prepared: PreparedRequest, tokenizer: Tokenizer) -> PreparedRequest:
    """The same request with texts of its own, as long as nothing was read with it."""
    file = io.BytesIO()
    Packer(file, tokenizer).dump(prepared.texts)
    file.seek(0)
    return replace(prepared, texts=Unpacker(file, tokenizer).load())


class Telling:
    """Mutable, owned by the run of an answer.

    Attributes:
        cached: by choice, prompt tokens that came from the prefix cache; None as long as it isn't known.
    """

    def __init__(
        self, prepared: PreparedRequest, sequences: Sequence[TokenSequence], tokenizer: Tokenizer, *, streams: bool
    ) -> None:
        """`streams`: the client reads events. Of a response there are always some."""
        tells_both = isinstance(prepared.form, ResponsesForm)
        self._plain: Transcript | None = None
        if streams and not tells_both:
            self._plain = Transcript(copied(prepared, tokenizer), sequences, streams=False)
        self._told = Transcript(prepared, sequences, streams=streams or tells_both)

    @property
    def is_told(self) -> bool:
        """Every choice has come to its end."""
        return self._told.is_told

    @property
    def status(self) -> Status:
        """How an answer that has come to its end ended."""
        return self._told.status

    @property
    def outcome(self) -> str | None:
        """What the metrics call it, where they couldn't know."""
        if any(choice.finish == "tool_calls" for choice in self._told.choices):
            return "tool_calls"
        return None

    @property
    def cached(self) -> list[int | None]:
        return self._told.cached

    @property
    def finishes(self) -> list[str | None]:
        """By choice, as the journal has it."""
        return self._told.finishes

    @property
    def usage(self) -> dict[str, Any]:
        return self._told.usage

    @property
    def unfinished(self) -> list[int]:
        """Choices that haven't come to their end."""
        return [choice.index for choice in self._told.choices if choice.finish is None]

    @property
    def answer(self) -> bytes | None:
        """The final object, once the end was told."""
        return (self._plain or self._told).answer

    def know_cached(self, cached: Sequence[int | None]) -> None:
        """By choice, what the first engine said."""
        for transcript in filter(None, (self._told, self._plain)):
            transcript.know_cached(cached)

    def has_stopped(self, index: int) -> bool:
        """A choice has met a stop string."""
        return self._told.choices[index].text.stopped

    def snapshot(self, status: Status) -> dict[str, Any]:
        """The response as it is now."""
        return cast(ResponsesForm, self._told.form).snapshot(self._told.choices, status)

    def sign_of_life(self, comment: bytes, number: int) -> bytes:
        return self._told.form.sign_of_life(comment, number)

    def follow(self, live: GenerationHandle, indices: Sequence[int]) -> None:
        """Tells how long the choices `indices` take."""
        for transcript in filter(None, (self._told, self._plain)):
            for index, generation in zip(indices, live.generations, strict=True):
                transcript.choices[index].generation = generation

    # ---------------------------------------------------------------- events, as bytes
    def begin(self) -> bytes:
        return self._told.begin()

    def start(self) -> bytes:
        return self._told.start()

    def feed(self, index: int, delta: GenerationDelta) -> bytes:
        if self._plain is not None:
            self._plain.feed(index, delta)
        return self._told.feed(index, delta)

    async def retell(
        self, stored: Sequence[StoredTokens], finishes: Sequence[str | None]
    ) -> AsyncGenerator[bytes, None]:
        """Events of what the journal has of an answer that goes on."""
        if self._plain is not None:
            async for _ in retell(self._plain, stored, finishes):
                pass
        async for data in retell(self._told, stored, finishes):
            yield data

    def complete(self, ended: float) -> bytes:
        if self._plain is not None:
            self._plain.complete(ended)
        return self._told.complete(ended)

    def cancel(self, ended: float) -> bytes:
        return self._told.cancel(ended)

    def fail(self, error: RequestError, ended: float) -> bytes:
        return self._told.fail(error, ended)
