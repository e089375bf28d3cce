"""What a chat answer looks like on the wire.

Owns the bytes of chunks and of the plain answer. Runs on the event loop. What stays the same through a stream is
encoded once; a token then costs one encoded string.
"""

from __future__ import annotations

from typing import Any

from server.api.output.choices import Choice
from server.api.output.logprobs import entries
from server.api.output.options import ChunkFrame, Extras, members, reason_of, usage_so_far
from server.api.output.sse import DONE, DataEvents, encode, event
from server.errors import Cancellation
from server.text.calls.tool_calls import CallArguments, CallBegin
from server.text.detokenizer import Content, Piece, Reasoning
from server.text.tokenizer import Tokenizer

ROLE = b'{"role":"assistant","content":null}'


class ChatForm(DataEvents):
    """Form of one request's answer. `only_calls`: a call is forced, so text can only be the stump of a cut tag.
    `thoughts`: whether reasoning is shown. `head`: what is the same in every chunk. `echo`: what each choice begins
    with. `verbose`: whether the prompt's text is sent."""

    def __init__(
        self,
        head: dict[str, Any],
        tokenizer: Tokenizer,
        extras: Extras,
        *,
        only_calls: bool,
        thoughts: bool,
        echo: str,
        verbose: bool,
    ) -> None:
        self.ended: float | None = None
        self.final: dict[str, Any] = {}
        self._head = head
        self._tokenizer = tokenizer
        self._extras = extras
        self._spell = extras.spelling(tokenizer)
        self._only_calls = only_calls
        self._hidden = (Content,) * only_calls + (Reasoning,) * (not thoughts)
        self._echo = echo
        self._verbose = verbose
        self._frame = ChunkFrame(head, extras)
        self._has_extras = self._frame.has_extras or verbose

    def chunks(self, choice: Choice, pieces: list[Piece]) -> bytes:
        """The role comes with the first news. The reason for the end has a chunk of its own after the last piece, as
        OpenAI sends it: some clients take no text from a chunk that has a reason."""
        if self._hidden:
            pieces = [piece for piece in pieces if not isinstance(piece, self._hidden)]
        if not (pieces or choice.finish or (choice.text.tokens and not choice.begun)):
            return b""
        data = b""
        if not choice.begun:
            choice.begun = True
            data = self._chunk(choice, ROLE, None, b"null", begins=True)
            if self._echo:
                data += self._chunk(choice, delta_of(Content(self._echo)), None, b"null")
        for piece in pieces:
            data += self._chunk(choice, delta_of(piece), None, self._scores(choice))
        if choice.finish:
            data += self._chunk(choice, b"{}", choice.finish, self._scores(choice))
        return data

    def _chunk(
        self, choice: Choice, delta: bytes, finish: str | None, logprobs: bytes, *, begins: bool = False
    ) -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._frame.before_index,
            choice.index,
            delta,
            logprobs,
            reason_of(finish),
            self._rest(choice, begins) if self._has_extras else self._frame.after_choice,
        )

    def _rest(self, choice: Choice, begins: bool) -> bytes:
        """Return the end of a chunk that has more than its delta; the first one has the prompt."""
        inside = b""
        if not begins:
            inside = members(self._extras.ids(choice))
        outside = members(self._of_prompt(choice) if begins else self._extras.times(choice))
        if self._extras.each_usage:
            outside += members({"usage": usage_so_far(choice, 0 if begins else choice.text.tokens)})
        elif self._extras.usage:
            outside += b',"usage":null'
        return inside + b"}]" + outside + b"}\n\n"

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """The members that describe the prompt; only the first chunk has them."""
        ids = self._extras.prompt_ids(choice)
        if not self._verbose:
            return ids
        return ids | {"__verbose": {"prompt": self._tokenizer.decode(choice.sequence.prompt, special=True)}}

    def _scores(self, choice: Choice) -> bytes:
        if self._extras.top_logprobs is None or not choice.scored:
            return b"null"
        return encode(entries(self._spell, choice.take_scored(), self._extras.top_logprobs))

    def last(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        if not self._extras.usage:
            return DONE
        return event(self._head | {"choices": [], "usage": usage} | self._extras.times(choices[0])) + DONE

    # ---------------------------------------------------------------- an answer that is kept
    def started(self, choices: list[Choice]) -> bytes:
        return b""

    def broken(self, error: dict[str, Any], choices: list[Choice], usage: dict[str, Any]) -> bytes:
        return event({"error": error})

    def cancelled(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        return event(Cancellation("The answer was deleted.").body())

    def sign_of_life(self, comment: bytes, number: int) -> bytes:
        return comment

    # ---------------------------------------------------------------- plain
    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        made = [self._choice(choice) for choice in choices]
        prompt = {
            "prompt_logprobs": self._extras.prompt_scores(choices[0], self._tokenizer),
            "prompt_token_ids": None,
            **self._of_prompt(choices[0]),
            **self._extras.times(choices[0]),
        }
        return self._head | {"object": "chat.completion", "choices": made, "usage": usage} | prompt

    def _choice(self, choice: Choice) -> dict[str, Any]:
        top = self._extras.top_logprobs
        message = message_of(choice, thoughts=Reasoning not in self._hidden)
        if self._only_calls:
            message["content"] = None
        elif self._echo:
            message["content"] = self._echo + (message["content"] or "")
        return {
            "index": choice.index,
            "message": message,
            "logprobs": entries(self._spell, choice.take_scored(), top) if top is not None else None,
            "finish_reason": choice.finish,
            "token_ids": None,
            **self._extras.ids(choice),
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


def message_of(choice: Choice, *, thoughts: bool) -> dict[str, Any]:
    """The plain answer's message. Beside calls, no content is null, as clients are used to."""
    answer = choice.answer
    content = None
    if answer.content or not answer.calls:
        content = answer.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning and thoughts:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message
