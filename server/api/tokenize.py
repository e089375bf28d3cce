"""POST /tokenize, /detokenize, /apply-template and /v1/chat/completions/input_tokens, GET /tokenizer_info.

Owns both customary forms: `content` in, as llama.cpp has it, and `prompt` or `messages` in, as vLLM has it. Tokenising
happens in the worker thread. Never needs an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request

from server.api.chat import render
from server.api.context import Served
from server.api.input import body, refusals, tools
from server.api.input.members import unknown
from server.api.input.schema import ChatRequest, DetokenizeRequest, Rendering, TemplateRequest, TokenizeRequest
from server.api.input.sequences import Bounds
from server.api.openapi import body as documented
from server.api.openapi import errors
from server.api.output.schema import Counted, Rendered, Text, Tokens
from server.errors import InvalidValue
from server.metrics import OTHER
from server.text.tokenizer import Tokenizer

Asked = TypeVar("Asked", TokenizeRequest, TemplateRequest, DetokenizeRequest, ChatRequest)
Answer = dict[str, Any]
CHAT_FIELDS = ("messages", *Rendering.model_fields)


def routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post(
        "/tokenize",
        response_model=Tokens,
        responses=errors(400, 404, 413, 415),
        openapi_extra=documented(TokenizeRequest),
    )
    async def tokenize(http: Request) -> Any:
        """Text or a conversation as token ids."""
        return await _answer(served, http, TokenizeRequest, encode)

    @router.post(
        "/apply-template",
        response_model=Rendered,
        responses=errors(400, 404, 413, 415),
        openapi_extra=documented(TemplateRequest),
    )
    async def apply_template(http: Request) -> Any:
        """A conversation as the text that the model reads."""
        return await _answer(served, http, TemplateRequest, apply)

    @router.post(
        "/detokenize",
        response_model=Text,
        response_model_exclude_unset=True,
        responses=errors(400, 404, 413, 415),
        openapi_extra=documented(DetokenizeRequest),
    )
    async def detokenize(http: Request) -> Any:
        """Token ids as text, special tokens spelled out."""
        return await _answer(served, http, DetokenizeRequest, decode)

    @router.get("/tokenizer_info", responses=errors())
    async def tokenizer_info() -> dict[str, Any]:
        """What the model's files say about its tokenizer, chat template included."""
        return served.tokenizer.info

    return router


def counting(served: Served, prefix: str) -> APIRouter:
    router = APIRouter(prefix=prefix, tags=["tokens"])

    @router.post(
        "/chat/completions/input_tokens",
        response_model=Counted,
        responses=errors(400, 404, 413, 415),
        openapi_extra=documented(ChatRequest),
    )
    async def input_tokens(http: Request) -> Any:
        """How many tokens the prompt of a chat has."""
        return await _answer(served, http, ChatRequest, count)

    return router


async def _answer(served: Served, http: Request, form: type[Asked], work: Callable[[Served, Asked], Answer]) -> Answer:
    """The answer to a body of this form; unknown members are noted once it is known to be right."""
    content = await body.read(http, served.settings.max_body_bytes)
    answer, names = await served.think(_understood, served, content, form, work)
    served.note_unknown(OTHER, names)
    return answer


def _understood(
    served: Served, content: bytes, form: type[Asked], work: Callable[[Served, Asked], Answer]
) -> tuple[Answer, list[str]]:
    request = body.validate(form, content)
    served.check_model(request.model)
    return work(served, request), unknown(request)


def encode(served: Served, request: TokenizeRequest) -> dict[str, Any]:
    ids = _ids(request, served)
    answer: dict[str, Any] = {
        "tokens": [_piece(token, served.tokenizer) for token in ids] if request.with_pieces else ids,
        "count": len(ids),
        "max_model_len": served.context,
    }
    return answer | {"token_strs": [served.tokenizer.piece(i) for i in ids] if request.return_token_strs else None}


def _ids(request: TokenizeRequest, served: Served) -> list[int]:
    tokenizer = served.tokenizer
    if request.messages is not None:
        return [*tokenizer.encode("", bos=bool(request.add_special_tokens)), *_rendered(request, served)]
    if request.content is not None:
        return tokenizer.encode(request.content, special=True, bos=bool(request.add_special))
    if request.prompt is not None:
        return tokenizer.encode(request.prompt, special=True, bos=request.add_special_tokens is not False)
    raise InvalidValue("One of content, prompt and messages is needed", param="prompt")


def _rendered(request: TokenizeRequest | TemplateRequest, served: Served) -> list[int]:
    return _read(ChatRequest.model_validate({name: getattr(request, name) for name in CHAT_FIELDS}), served)


def _read(chat: ChatRequest, served: Served) -> list[int]:
    refusals.check_chat(chat, served.settings)
    return render(served.tokenizer, chat, tools.read(chat)).ids


def count(served: Served, request: ChatRequest) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": len(_read(request, served))}


def apply(served: Served, request: TemplateRequest) -> dict[str, Any]:
    return {"prompt": served.tokenizer.decode(_rendered(request, served), special=True)}


def _piece(token: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """llama.cpp's form: text where it is text, else bytes."""
    data = tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": data.decode("utf-8")}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}


def decode(served: Served, request: DetokenizeRequest) -> dict[str, Any]:
    if known := served.supervisor.known:  # whoever asks before there is an engine may ask for any id
        Bounds.of(known, served.settings).check_ids(request.tokens, "tokens")
    text = served.tokenizer.decode(request.tokens, special=True)
    return {"prompt": text} if request.model is not None else {"content": text, "prompt": text}
