"""What a response looks like on the wire.

Owns the order and the numbers of a response's events, and the response object. Runs on the event loop. The plain
answer is the object that a stream ends with, made by the same steps, so that they can't differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from server.api.input.responses_tools import FUNCTION, Identities, ToolIdentity
from server.api.output.choices import Choice
from server.api.output.logprobs import entries
from server.api.output.responses_items import Event, MessageItem, OutputItem, ReasoningItem, call_item
from server.api.output.sse import encode
from server.errors import ExceedsMemory, GenerationError, GrammarFailure, QueueFull, RequestError
from server.text.calls.tool_calls import CallArguments, CallBegin
from server.text.detokenizer import Content, Piece, Reasoning
from server.text.tokenizer import Tokenizer

# Clients repeat a whole request after `server_error`, and after none of the others.
_CODES: tuple[tuple[type[RequestError], str], ...] = (
    (GenerationError, "invalid_prompt"),
    (ExceedsMemory, "invalid_prompt"),
    (GrammarFailure, "invalid_prompt"),
    (QueueFull, "rate_limit_exceeded"),
)


class ResponsesForm:
    """Form of one request's answer; mutable, for its events are numbered and its items are kept.

    Attributes:
        ended: when the answer ended, in unix time; None: now.
        final: the response object of its last event.

    Args:
        head: what the response object says from beginning to end.
        identities: the client's tools by the names that the model has for them.
        top: alternatives of each token of the text; None: no log probabilities.
        seals: thoughts come with `encrypted_content`.
        only_calls: a call is forced, so text can only be the stump of a cut tag.
    """

    def __init__(
        self,
        head: dict[str, Any],
        tokenizer: Tokenizer,
        identities: Identities,
        *,
        top: int | None,
        seals: bool,
        only_calls: bool,
    ) -> None:
        self.ended: float | None = None
        self.final: dict[str, Any] = {}
        self._head = head
        self._tokenizer = tokenizer
        self._identities = identities
        self._top = top
        self._seals = seals
        self._only_calls = only_calls
        self._number = 0
        self._open: OutputItem | None = None
        self._done: list[dict[str, Any]] = []

    # ---------------------------------------------------------------- a stream
    def first(self, choices: list[Choice]) -> bytes:
        if self._head.get("background"):
            waits = {"response": self._response(choices, "queued")}
            return self._events([("response.created", waits), ("response.queued", waits)])
        begun = {"response": self._response(choices, "in_progress")}
        return self._events([("response.created", begun), ("response.in_progress", begun)])

    def started(self, choices: list[Choice]) -> bytes:
        """An engine has begun with it: an event for answers in the background alone, others are as good as begun."""
        if not self._head.get("background"):
            return b""
        return self._events([("response.in_progress", {"response": self._response(choices, "in_progress")})])

    def chunks(self, choice: Choice, pieces: list[Piece]) -> bytes:
        data = b"".join([self._events(self._piece_events(choice, piece)) for piece in pieces])
        if choice.finish:
            data += self._events(self._finish(choice))
        return data

    def alive(self, comment: bytes) -> bytes:
        """With an event, since some clients count only those. It repeats the last number: the events don't depend
        on how long it took."""
        return self.sign_of_life(comment, max(0, self._number - 1))

    def sign_of_life(self, comment: bytes, number: int) -> bytes:
        """The same for a reader whose last event had this number."""
        keepalive = {"type": "keepalive", "sequence_number": number}
        return comment + b"event: keepalive\ndata: " + encode(keepalive) + b"\n\n"

    def last(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        return self._end(self.whole(choices, usage))

    def failed(self, error: RequestError, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        return self.broken(error_of(error), choices, usage)

    def broken(self, error: dict[str, Any], choices: list[Choice], usage: dict[str, Any]) -> bytes:
        """The end of an answer that failed; `error` as the response object has it."""
        data = self.interrupted()
        return data + self._end(self._response(choices, "failed", usage) | {"error": error})

    def cancelled(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        """The end of an answer that its client wanted no more of. OpenAI documents no such event; its webhooks have one
        of this name."""
        data = self.interrupted()
        return data + self._end(self._response(choices, "cancelled", usage))

    def interrupted(self) -> bytes:
        """The end of the open item, which will get no more."""
        return self._events(self._close("incomplete"))

    def ending(self, answer: bytes, status: str) -> bytes:
        """The last event again, from the response object that it had."""
        return self._events([(f"response.{status}", {"response": msgspec.Raw(answer)})])

    def _end(self, response: dict[str, Any]) -> bytes:
        self.final = response
        return self._events([(f"response.{response['status']}", {"response": response})])

    def _events(self, events: Iterable[Event]) -> bytes:
        data = b""
        for kind, members in events:
            encoded = encode({"type": kind, "sequence_number": self._number, **members})
            data += b"event: %b\ndata: %b\n\n" % (kind.encode(), encoded)
            self._number += 1
        return data

    # ---------------------------------------------------------------- plain
    @property
    def id(self) -> str:
        return str(self._head["id"])

    def snapshot(self, choices: list[Choice], status: str) -> dict[str, Any]:
        """The response as it is now, the item that forms included."""
        made = self._response(choices, status)
        if self._open is not None:
            made["output"].append(self._open.shape("in_progress"))
        return made

    def unstored(self) -> None:
        """The answer can't be kept, and says so."""
        self._head = self._head | {"store": False}

    def keep(self, choice: Choice, pieces: list[Piece]) -> None:
        self.chunks(choice, pieces)

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        if choices[0].finish != "length":
            return self._response(choices, "completed", usage)
        return self._response(choices, "incomplete", usage) | {"incomplete_details": {"reason": "max_output_tokens"}}

    def _response(self, choices: list[Choice], status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        draws = choices[0].sequence.sampling
        completed = None
        if status == "completed":
            completed = int(self.ended or time.time())
        return self._head | {
            "status": status,
            "completed_at": completed,
            "output": list(self._done),
            "temperature": draws.temperature,
            "top_p": draws.top_p,
            "usage": usage and usage_of(usage),
        }

    # ---------------------------------------------------------------- items
    def _piece_events(self, choice: Choice, piece: Piece) -> Iterable[Event]:
        """The events of one piece; one of another kind than the open item ends that one first."""
        match piece:
            case Content(text) if not self._only_calls:
                yield from self._enter(MessageItem)
                yield from self._more(text, self._scores(choice))
            case Reasoning(text):
                yield from self._enter(ReasoningItem)
                yield from self._more(text, [])
            case CallBegin(_, id, name):
                yield from self._close("completed")
                tool = self._identities.get(name) or ToolIdentity(FUNCTION, name)
                yield from self._begin(call_item(self.id, len(self._done), id, tool))
            case CallArguments(_, text):
                yield from self._more(text, [])

    def _enter(self, kind: type[MessageItem] | type[ReasoningItem]) -> Iterable[Event]:
        if isinstance(self._open, kind):
            return
        yield from self._close("completed")
        place = len(self._done)
        if kind is MessageItem:
            yield from self._begin(MessageItem(self.id, place))
        else:
            yield from self._begin(ReasoningItem(self.id, place, seals=self._seals))

    def _begin(self, item: OutputItem) -> Iterable[Event]:
        self._open = item
        yield from item.begin()

    def _more(self, text: str, logprobs: list[dict[str, Any]]) -> Iterable[Event]:
        assert self._open is not None
        return self._open.add(text, logprobs)

    def _close(self, status: str) -> Iterable[Event]:
        item = self._open
        self._open = None
        if item is None:
            return
        yield from item.end(status)
        self._done.append(item.shape(status))

    def _finish(self, choice: Choice) -> Iterable[Event]:
        """The end of the last item; an answer without a word is an empty message."""
        if self._open is None and not self._done:
            yield from self._begin(MessageItem(self.id, 0))
        status = "completed"
        if choice.finish == "length":
            status = "incomplete"
        yield from self._close(status)

    def _scores(self, choice: Choice) -> list[dict[str, Any]]:
        """Of the tokens of text that no event has had yet."""
        if self._top is None:
            return []
        scored = choice.take_scored_text()
        found: list[dict[str, Any]] = entries(self._tokenizer.spell, scored, self._top)["content"]
        return found


def error_of(error: RequestError) -> dict[str, Any]:
    """Return an error as the response object has it."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), "server_error")
    return {"code": code, "message": error.message}


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """Token counts by their names in this protocol."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
