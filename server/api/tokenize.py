"""POST /tokenize, /detokenize, /apply-template and both counts of a prompt's tokens, GET /tokenizer_info.

Owns both customary forms: `content` in, as llama.cpp has it, and `prompt` or `messages` in, as vLLM has it. Tokenising
and the making of the answer's bytes, which may be more than the request's, happen off the event loop. Never needs an
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api import responses
from server.api.chat import conversation
from server.api.context import AppContext, ServedModel
from server.api.input import body, refusals
from server.api.input.conversation import Conversation
from server.api.input.members import unknown
from server.api.input.responses_schema import ResponsesRequest
from server.api.input.schema import ChatRequest, DetokenizeRequest, Rendering, TemplateRequest, TokenizeRequest
from server.api.input.sequences import Bounds
from server.api.middleware.security import owner_of
from server.api.openapi import body as documented
from server.api.openapi import errors
from server.api.output.schema import DetokenizeAnswer, InputTokensAnswer, TemplateAnswer, TokenizeAnswer
from server.api.output.slices import array
from server.api.output.slices import encode as to_json
from server.api.prepare import counted, render
from server.api.stored.answers import StoredAnswers
from server.api.stored.earlier import resolved, shifted
from server.errors import InvalidValue
from server.metrics import OTHER
from server.text.tokenizer import Tokenizer

Asked = TypeVar("Asked", TokenizeRequest, TemplateRequest, DetokenizeRequest, ChatRequest, ResponsesRequest)
CHAT_FIELDS = ("messages", *Rendering.model_fields)


def routes(served: AppContext) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post(
        "/tokenize",
        response_model=TokenizeAnswer,
        responses=errors(400, 404, 413, 415),
        openapi_extra=documented(TokenizeRequest),
    )
    async def tokenize(http: Request) -> Response:
        """Text or a conversation as token ids."""
        return await _answer(served, http, TokenizeRequest, encode)

    @router.post(
        "/apply-template",
        response_model=TemplateAnswer,
        responses=errors(400, 404, 413, 415),
        openapi_extra=documented(TemplateRequest),
    )
    async def apply_template(http: Request) -> Response:
        """A conversation as the text that the model reads."""
        return await _answer(served, http, TemplateRequest, apply)

    @router.post(
        "/detokenize",
        response_model=DetokenizeAnswer,
        response_model_exclude_unset=True,
        responses=errors(400, 404, 413, 415),
        openapi_extra=documented(DetokenizeRequest),
    )
    async def detokenize(http: Request) -> Response:
        """Token ids as text, special tokens spelled out."""
        return await _answer(served, http, DetokenizeRequest, decode)

    @router.get("/tokenizer_info", responses=errors())
    async def tokenizer_info() -> dict[str, Any]:
        """What the model's files say about its tokenizer, chat template included."""
        return served.tokenizer.info

    return router


def counting(served: AppContext, answers: StoredAnswers, prefix: str) -> APIRouter:
    router = APIRouter(prefix=prefix, tags=["tokens"])

    @router.post(
        "/chat/completions/input_tokens",
        response_model=InputTokensAnswer,
        responses=errors(400, 404, 413, 415),
        openapi_extra=documented(ChatRequest),
    )
    async def input_tokens(http: Request) -> Response:
        """How many tokens the prompt of a chat has."""
        return await _answer(served, http, ChatRequest, count)

    @router.post(
        "/responses/input_tokens",
        response_model=InputTokensAnswer,
        responses=errors(400, 404, 413, 415, 503),
        openapi_extra=documented(ResponsesRequest),
    )
    async def response_input_tokens(http: Request) -> Response:
        """How many tokens the prompt of a response has, earlier responses and items named by their ids included."""
        sent = await body.read(http, served.settings.max_body_bytes)
        content, earlier = await resolved(answers, sent, owner_of(http.scope))
        return await shifted(_of_content(served, content, ResponsesRequest, count_response), earlier)

    return router


async def _answer(
    served: AppContext, http: Request, form: type[Asked], work: Callable[[ServedModel, Asked, Bounds | None], bytes]
) -> Response:
    """Answer a request whose body has this form."""
    return await _of_content(served, await body.read(http, served.settings.max_body_bytes), form, work)


async def _of_content(
    served: AppContext, content: bytes, form: type[Asked], work: Callable[[ServedModel, Asked, Bounds | None], bytes]
) -> Response:
    """Answer a body of this form; unknown members are noted once it is known to be right. As long as there has been no
    engine, the bounds of its model aren't known."""
    bounds = None
    if known := served.supervisor.engine.known:
        bounds = Bounds.of(known, served.settings)
    answer, names = await served.prepare(_understood, content, form, work, bounds)
    served.note_unknown(OTHER, names)
    return Response(answer, media_type="application/json")


def _understood(
    model: ServedModel,
    content: bytes,
    form: type[Asked],
    work: Callable[[ServedModel, Asked, Bounds | None], bytes],
    bounds: Bounds | None,
) -> tuple[bytes, list[str]]:
    request = body.validate(form, content)
    model.check_model(request.model)
    return work(model, request, bounds), unknown(request)


def encode(model: ServedModel, request: TokenizeRequest, bounds: Bounds | None) -> bytes:
    ids = _ids(request, model)
    tokenizer = model.tokenizer
    tokens: Iterable[Any] = ids
    if request.with_pieces:
        tokens = (_piece(token, tokenizer) for token in ids)
    return to_json({
        "tokens": array(tokens),
        "count": len(ids),
        "max_model_len": bounds.context if bounds else model.settings.allowed_context(tokenizer.context),
        "token_strs": array(map(tokenizer.piece, ids)) if request.return_token_strs else None,
    })  # fmt: skip


def _ids(request: TokenizeRequest, model: ServedModel) -> list[int]:
    tokenizer = model.tokenizer
    if request.messages is not None:
        return [*tokenizer.encode("", bos=bool(request.add_special_tokens)), *_rendered(request, model)]
    if request.content is not None:
        return _encoded(request.content, bool(request.add_special), model)
    if request.prompt is not None:
        return _encoded(request.prompt, request.add_special_tokens is not False, model)
    raise InvalidValue("One of content, prompt and messages is needed", param="prompt")


def _encoded(text: str, bos: bool, model: ServedModel) -> list[int]:
    return counted(model, lambda most: model.tokenizer.encode(text, special=True, bos=bos, most=most))


def _rendered(request: TokenizeRequest | TemplateRequest, model: ServedModel) -> list[int]:
    return _read(ChatRequest.model_validate({name: getattr(request, name) for name in CHAT_FIELDS}), model)


def _read(chat: ChatRequest, model: ServedModel) -> list[int]:
    refusals.check_chat(chat, model.settings)
    return _prompt(model, conversation(chat, model.settings))


def _prompt(model: ServedModel, said: Conversation) -> list[int]:
    return counted(model, lambda most: render(model.tokenizer, said, most)).ids


def count(model: ServedModel, request: ChatRequest, bounds: Bounds | None) -> bytes:
    return to_json({"object": "response.input_tokens", "input_tokens": len(_read(request, model))})


def count_response(model: ServedModel, request: ResponsesRequest, bounds: Bounds | None) -> bytes:
    responses.is_kept(request, model.settings)
    responses.check(request)
    said, _ = responses.conversation(request, model.settings)
    return to_json({"object": "response.input_tokens", "input_tokens": len(_prompt(model, said))})


def apply(model: ServedModel, request: TemplateRequest, bounds: Bounds | None) -> bytes:
    return to_json({"prompt": model.tokenizer.decode(_rendered(request, model), special=True)})


def _piece(token: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """llama.cpp's form: text where it is text, else bytes."""
    data = tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": data.decode("utf-8")}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}


def decode(model: ServedModel, request: DetokenizeRequest, bounds: Bounds | None) -> bytes:
    if bounds:  # before there is an engine, any id may be asked for
        bounds.check_ids(request.tokens, "tokens")
    text = model.tokenizer.decode(request.tokens, special=True)
    return to_json({"prompt": text} if request.model is not None else {"content": text, "prompt": text})
