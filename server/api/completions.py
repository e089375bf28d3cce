"""POST /v1/completions.

Owns the understanding of a completion request and the shape of its answer. Everything up to the sequences happens in
the worker thread; then the event loop opens and follows them (`respond`).
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.context import AppContext, ServedModel
from server.api.input import body, refusals, response_format
from server.api.input.members import unknown
from server.api.input.schema import CompletionRequest, Prompt
from server.api.input.sequences import COMPLETION_TOKENS, Bounds, most_tokens, predicted, sequences, truncated
from server.api.openapi import GENERATION, errors, streamed
from server.api.openapi import body as documented
from server.api.output.choices import Choice
from server.api.output.logprobs import Lists, merged
from server.api.output.options import ChunkFrame, Extras, members, reason_of, usage_so_far
from server.api.output.respond import PreparedRequest, answer
from server.api.output.schema import TextCompletion
from server.api.output.sse import DONE, DataEvents, encode, event
from server.errors import InvalidValue
from server.grammar import build
from server.ipc.sequence import Grammar
from server.text.detokenizer import Content, Piece, TextState
from server.text.tokenizer import Tokenizer

ENDPOINT = "completions"


def routes(served: AppContext, prefix: str) -> APIRouter:
    router = APIRouter(prefix=prefix, tags=["generation"])

    @router.post(
        "/completions",
        response_model=TextCompletion,
        responses={200: streamed(TextCompletion), **errors(*GENERATION)},
        openapi_extra=documented(CompletionRequest),
    )
    async def completions(http: Request) -> Response:
        """What follows a text, whole or as an event stream."""
        return await answer(served, http, ENDPOINT, prepare)

    return router


def prepare(served: ServedModel, content: bytes, bounds: Bounds) -> PreparedRequest:
    """Bytes → sequences. Raises RequestError that names the field at fault."""
    request = body.validate(CompletionRequest, content)
    served.check_model(request.model)
    refusals.check_completion(request, served.settings)
    given = split(request.prompt)
    if request.max_tokens is None:
        max_tokens = predicted(request, COMPLETION_TOKENS)
    else:
        max_tokens = request.max_tokens
    bos = request.add_special_tokens is not False
    most = most_tokens(request, bounds)
    whole = [tokenised(prompt, served.tokenizer, bounds, bos=bos, most=most) for prompt in given]
    prompts = [truncated(ids, request, bounds, max_tokens) for ids in whole]
    made = sequences(
        request,
        prompts,
        tokenizer=served.tokenizer,
        bounds=bounds,
        max_tokens=max_tokens,
        logprobs=-1 if request.logprobs is None else request.logprobs,
        prompt_logprobs=bool(request.echo) and request.logprobs is not None,
        grammar=_constraint(request, served, bounds),
    )
    stops = [stop for stop in request.stop or [] if stop]
    shown = request.shows_special
    ends = made[0].stop_ids
    texts = [TextState(served.tokenizer, stops=stops, stop_ids=ends, chat=False, show_special=shown) for _ in made]
    read = [text if ids is all_ids else ids for text, ids, all_ids in zip(given, prompts, whole, strict=True)]
    shown_prompts = []
    if request.echo:
        shown_prompts = [_spelled(prompt, served.tokenizer) for prompt in read]
    form = _form(request, served, [prompt for prompt in shown_prompts for _ in range(request.n or 1)])
    return PreparedRequest(request, made, texts, form, unknown(request))


def _constraint(request: CompletionRequest, served: ServedModel, bounds: Bounds) -> Grammar | None:
    form = response_format.read(request, served.settings)
    if form is None:
        return None
    prove = served.checker.fault
    form = response_format.checked(form, served.tokenizer, bounds.vocabulary, prove)
    return build.answer(form.schema, rule=form.rule, param=form.param, prove=prove)


def split(prompt: Prompt) -> list[str | list[int]]:
    """The prompts of any of the four forms."""
    if isinstance(prompt, str):
        return [prompt]
    several: list[Any] = prompt
    if isinstance(several[0], str | list):
        return several
    return [several]


def tokenised(
    prompt: str | list[int], tokenizer: Tokenizer, bounds: Bounds, *, bos: bool = True, most: int | None = None
) -> list[int]:
    """Ids; text gets the model's begin token if `bos`, ids are taken as they are. Raises ContextLengthError for a
    text that is far longer than `most` tokens.

    The author of a bare prompt writes all of it: what spells a control token is one, as templates rendered by the
    client need it. In chat messages it stays text.
    """
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, special=True, bos=bos, most=most)
    else:
        ids = prompt
    bounds.check_ids(ids, "prompt")
    if not ids:
        raise InvalidValue("prompt: an empty text gives this model nothing to begin with", param="prompt")
    return ids


def _spelled(prompt: str | list[int], tokenizer: Tokenizer) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prompt, special=True)


def _form(request: CompletionRequest, served: ServedModel, prompts: list[str]) -> CompletionForm:
    head = {
        "id": "cmpl-" + secrets.token_hex(12),
        "object": "text_completion",
        "created": int(time.time()),
        "model": served.name,
        "system_fingerprint": served.build,
    }
    extras = Extras.of(request, request.logprobs)
    return CompletionForm(head, served.tokenizer, extras, prompts if request.echo else None, request.shows_special)


@dataclass(slots=True)
class CompletionForm(DataEvents):
    """What the answer looks like on the wire; mutable, of one request, for text offsets go on from chunk to chunk.

    Attributes:
        echo: what precedes each choice.
        shows_special: whether the text shows special tokens.
    """

    head: dict[str, Any]
    tokenizer: Tokenizer
    extras: Extras
    echo: list[str] | None
    shows_special: bool
    lists: dict[int, Lists] = field(default_factory=dict)
    frame: ChunkFrame = field(init=False)

    def __post_init__(self) -> None:
        self.frame = ChunkFrame(self.head, self.extras)

    def chunks(self, choice: Choice, pieces: list[Piece]) -> bytes:
        """The reason for the end has a chunk of its own, as in a chat."""
        text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        begins = not choice.begun and bool(choice.text.tokens or choice.finish)
        data = b""
        if text or (begins and self.echo):
            data = self._chunk(choice, text, None)
        if choice.finish:
            return data + self._chunk(choice, "", choice.finish)
        return data

    def _chunk(self, choice: Choice, text: str, finish: str | None) -> bytes:
        begins = not choice.begun
        scores = b"null"
        if self.extras.top_logprobs is not None:
            scores = encode(self._scores(choice))
        if begins and self.echo is not None:
            text = self.echo[choice.index] + text
        choice.begun = True
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self.frame.before_index,
            choice.index,
            encode(text),
            scores,
            reason_of(finish),
            self._rest(choice, begins) if self.frame.has_extras else self.frame.after_choice,
        )

    def _rest(self, choice: Choice, begins: bool) -> bytes:
        """Return the end of a chunk that has more than its text; the first one has the prompt."""
        inside = self.extras.ids(choice)
        if begins:
            inside = self.extras.prompt_ids(choice) | inside
        outside = self.extras.times(choice)
        if self.extras.each_usage:
            outside = {"usage": usage_so_far(choice, choice.text.tokens)} | outside
        elif self.extras.usage:
            outside = {"usage": None} | outside
        return members(inside) + b"}]" + members(outside) + b"}\n\n"

    def last(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        if not self.extras.usage:
            return DONE
        return event(self.head | {"choices": [], "usage": usage} | self.extras.times(choices[0])) + DONE

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        made = [self._choice(choice) | self._more(choice) for choice in choices]
        return self.head | {"choices": made, "usage": usage} | self.extras.times(choices[0])

    def _more(self, choice: Choice) -> dict[str, Any]:
        scores = self.extras.prompt_scores(choice, self.tokenizer)
        nothing = {"prompt_logprobs": scores, "prompt_token_ids": None, "token_ids": None}
        return nothing | self.extras.prompt_ids(choice) | self.extras.ids(choice)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text = choice.answer.content
        if self.echo is not None:
            text = self.echo[choice.index] + text
        scores = None
        if self.extras.top_logprobs is not None:
            scores = self._scores(choice)
        return {"index": choice.index, "text": text, "logprobs": scores, "finish_reason": choice.finish}

    def _new_lists(self) -> Lists:
        count = self.extras.top_logprobs or 0
        spell = self.extras.spelling(self.tokenizer)
        return Lists(self.tokenizer, count, spell, shows_special=self.shows_special)

    def _scores(self, choice: Choice) -> dict[str, Any]:
        lists = self.lists.setdefault(choice.index, self._new_lists())
        scored = choice.take_scored()
        if not choice.begun and self.echo is not None:
            prompt = lists.prompt(choice.sequence.prompt, choice.prompt_logprobs or [])
            return merged(prompt, lists.answer(scored))
        return lists.answer(scored)
