"""What a message of the Messages API looks like on the wire.

Owns the order of a message's events, and the message object. Runs on the event loop. Content blocks follow each other,
each whole before the next begins, in the order in which the model wrote them; the plain answer has the same ones.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from server.api.middleware import anthropic_errors
from server.api.output.choices import Choice
from server.api.output.sse import encode
from server.errors import RequestError
from server.text.calls.tool_calls import CallArguments, CallBegin
from server.text.detokenizer import Content, Piece, Reasoning

SIGNATURE = "marathon"  # of every thought: clients send it back, and any is taken

_STILL_OPEN = {"stop_reason": None, "stop_sequence": None, "stop_details": None}

log = logging.getLogger("marathon.api")
Event = dict[str, Any]


class MessagesForm:
    """Form of one request's answer; mutable, for its blocks are numbered and kept.

    Args:
        head: what the message says from beginning to end.
        most: tokens of the answer that were asked for; fewer may fit the context.
        only_calls: a call is forced, so text can only be the stump of a cut tag.
    """

    def __init__(self, head: dict[str, Any], most: int, *, only_calls: bool) -> None:
        self._head = head
        self._most = most
        self._only_calls = only_calls
        self._blocks: list[dict[str, Any]] = []
        self._open = False  # the last of them isn't whole

    # ---------------------------------------------------------------- a stream
    def first(self, choices: list[Choice]) -> bytes:
        """Which part of the prompt was known isn't known yet; the end says it."""
        usage = usage_of(len(choices[0].sequence.prompt), 0, 0)
        begun = {**self._head, "content": [], **_STILL_OPEN, "usage": usage}
        return _event({"type": "message_start", "message": begun})

    def chunks(self, choice: Choice, pieces: list[Piece]) -> bytes:
        events = [event for piece in pieces for event in self._piece_events(piece)]
        if choice.finish:
            events += self._close()
        return b"".join(map(_event, events))

    def alive(self, comment: bytes) -> bytes:
        """With an event, since some clients count only those."""
        return comment + _event({"type": "ping"})

    def last(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(choices[0]), "usage": _counted(usage)}
        return _event(delta) + _event({"type": "message_stop"})

    def failed(self, error: RequestError, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        return _event(anthropic_errors.event(error))

    # ---------------------------------------------------------------- plain
    def keep(self, choice: Choice, pieces: list[Piece]) -> None:
        for piece in pieces:
            for _ in self._piece_events(piece):
                pass

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        content = [_finished(block) for block in self._blocks]
        return {**self._head, "content": content, **self._stop(choices[0]), "usage": _counted(usage)}

    # ---------------------------------------------------------------- blocks
    def _piece_events(self, piece: Piece) -> Iterable[Event]:
        """The events of one piece; one of another kind than the open block ends that one first."""
        match piece:
            case Content(text) if not self._only_calls:
                yield from self._more("text", "text", "text_delta", text)
            case Reasoning(text):
                yield from self._more("thinking", "thinking", "thinking_delta", text)
            case CallBegin(_, id, name):
                yield from self._begin({"type": "tool_use", "id": id, "name": name, "input": ""})
            case CallArguments(_, text):
                self._blocks[-1]["input"] += text
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _more(self, kind: str, member: str, delta: str, text: str) -> Iterable[Event]:
        if not self._open or self._blocks[-1]["type"] != kind:
            yield from self._begin({"type": kind, member: ""})
        self._blocks[-1][member] += text
        yield self._delta({"type": delta, member: text})

    def _begin(self, block: dict[str, Any]) -> Iterable[Event]:
        yield from self._close()
        self._blocks.append(block)
        self._open = True
        shown = dict(block)
        if block["type"] == "tool_use":
            shown["input"] = {}
        elif block["type"] == "thinking":
            shown["signature"] = ""
        yield {"type": "content_block_start", "index": self._index, "content_block": shown}

    def _close(self) -> Iterable[Event]:
        if not self._open:
            return
        self._open = False
        if self._blocks[-1]["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        yield {"type": "content_block_stop", "index": self._index}

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self, choice: Choice) -> dict[str, Any]:
        """Why the answer ended."""
        reason = "end_turn"
        sequence = None
        if choice.finish == "tool_calls":
            reason = "tool_use"
        elif choice.finish == "length" and choice.sequence.max_tokens < self._most:
            reason = "model_context_window_exceeded"
        elif choice.finish == "length":
            reason = "max_tokens"
        elif choice.text.stop:
            reason = "stop_sequence"
            sequence = choice.text.stop
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def _event(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), encode(event))


def _finished(block: dict[str, Any]) -> dict[str, Any]:
    """A block of the plain answer."""
    if block["type"] == "thinking":
        return {**block, "signature": SIGNATURE}
    if block["type"] == "tool_use":
        return {**block, "input": _input(block["input"])}
    return block


def _input(arguments: str) -> msgspec.Raw | dict[str, Any]:
    """A call's arguments as they are streamed: read and written anew, some numbers and half characters would change.
    There is no place for text that is no object."""
    try:
        found = json.loads(arguments or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return msgspec.Raw((arguments or "{}").encode())
    log.warning("arguments of a call are no JSON object and are left out of the answer")
    return {}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def usage_of(prompt: int, cached: int, answer: int) -> dict[str, int]:
    """Token counts by their names in this protocol, which counts the prompt in parts."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer,
    }


def _counted(usage: dict[str, Any]) -> dict[str, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage_of(usage["prompt_tokens"], cached, usage["completion_tokens"])
