"""What a chat answer looks like on the wire.

Owns the bytes of chunks and of the plain answer. Runs on the event loop. What stays the same through a stream is
encoded once; a token then costs one encoded string.
"""

from __future__ import annotations

from typing import Any

from server.api.answer import Choice
from server.api.logprobs import entries
from server.api.sse import encode, event
from server.text import Content, Piece, Reasoning
from server.tokenizer import Tokenizer
from server.toolcalls import CallArguments, CallBegin

ROLE = b'{"role":"assistant","content":null}'


class ChatForm:
    """Form of one request's answer. `only_calls`: a call is forced, so text can only be the stump of a cut tag."""

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer,
        *,
        logprobs: bool,
        include_usage: bool,
        only_calls: bool,
    ) -> None:
        self._head = {"id": id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._only_calls = only_calls
        self._before_index = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":'
        self._after_choice = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def chunks(self, choice: Choice, pieces: list[Piece]) -> bytes:
        """The role comes with the first news; the reason for the end with the last piece."""
        if self._only_calls:
            pieces = [piece for piece in pieces if not isinstance(piece, Content)]
        if not (pieces or choice.finish or (choice.text.tokens and not choice.begun)):
            return b""
        data = b""
        if not choice.begun:
            choice.begun = True
            data = self._chunk(choice, ROLE, None, b"null")
        deltas = [delta_of(piece) for piece in pieces] or ([b"{}"] if choice.finish else [])
        for number, delta in enumerate(deltas, 1):
            finish = choice.finish if number == len(deltas) else None
            data += self._chunk(choice, delta, finish, self._scores(choice))
        return data

    def _chunk(self, choice: Choice, delta: bytes, finish: str | None, logprobs: bytes) -> bytes:
        reason = b'"%b"' % finish.encode() if finish else b"null"
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._before_index,
            choice.index,
            delta,
            logprobs,
            reason,
            self._after_choice,
        )

    def _scores(self, choice: Choice) -> bytes:
        if not self._logprobs or not choice.scored:
            return b"null"
        return encode(entries(self._tokenizer, choice.take_scored()))

    def last(self, usage: dict[str, Any]) -> bytes:
        return event(self._head | {"choices": [], "usage": usage}) if self._include_usage else b""

    # ---------------------------------------------------------------- plain
    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        made = [self._choice(choice) for choice in choices]
        return self._head | {"object": "chat.completion", "choices": made, "usage": usage}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        scores = entries(self._tokenizer, choice.take_scored()) if self._logprobs else None
        return {
            "index": choice.index,
            "message": message_of(choice) | ({"content": None} if self._only_calls else {}),
            "logprobs": scores,
            "finish_reason": choice.finish,
        }


def delta_of(piece: Piece) -> bytes:
    """The piece's JSON object."""
    match piece:
        case Content(text):
            return b'{"content":%b}' % encode(text)
        case Reasoning(text):
            coded = encode(text)
            return b'{"reasoning_content":%b,"reasoning":%b}' % (coded, coded)
        case CallBegin(index, id, name):
            function = {"name": name, "arguments": ""}
            return encode({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]})
        case CallArguments(index, text):
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, encode(text))


def message_of(choice: Choice) -> dict[str, Any]:
    """The plain answer's message. Beside calls, no content is null, as clients are used to."""
    answer = choice.answer
    content = answer.content if answer.content or not answer.calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message
