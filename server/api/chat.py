"""POST /v1/chat/completions.

Owns the understanding of a chat request, and the form of its answer. Both happen in the worker thread; what lies
between is every protocol's (`prepare`, `respond`).
"""

from __future__ import annotations

import secrets
import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.context import AppContext, ServedModel
from server.api.input import body, refusals, response_format, tools
from server.api.input.conversation import Conversation
from server.api.input.members import unknown
from server.api.input.schema import ChatRequest
from server.api.input.sequences import Bounds, predicted
from server.api.input.turns import spoken, text_of
from server.api.openapi import GENERATION, errors, streamed
from server.api.openapi import body as documented
from server.api.output.chat import ChatForm
from server.api.output.options import Extras
from server.api.output.respond import PreparedRequest, answer
from server.api.output.schema import ChatCompletion, ChatCompletionChunk
from server.api.prepare import prepared
from server.settings import Settings

ENDPOINT = "chat"


def routes(served: AppContext, prefix: str) -> APIRouter:
    router = APIRouter(prefix=prefix, tags=["generation"])

    @router.post(
        "/chat/completions",
        response_model=ChatCompletion,
        responses={200: streamed(ChatCompletionChunk), **errors(*GENERATION)},
        openapi_extra=documented(ChatRequest),
    )
    async def chat_completions(http: Request) -> Response:
        """The model's next turn of a conversation, whole or as an event stream."""
        return await answer(served, http, ENDPOINT, prepare)

    return router


def prepare(served: ServedModel, content: bytes, bounds: Bounds) -> PreparedRequest:
    """Bytes → sequences. Raises RequestError that names the field at fault."""
    request = body.validate(ChatRequest, content)
    served.check_model(request.model)
    refusals.check_chat(request, served.settings)
    said = conversation(request, served.settings)
    return prepared(served, said, bounds, _form(request, said, served), unknown(request))


def conversation(request: ChatRequest, settings: Settings) -> Conversation:
    """The request in no protocol's words."""
    most = request.max_completion_tokens or request.max_tokens
    logprobs = -1
    if request.logprobs:
        logprobs = request.top_logprobs or 0
    return Conversation(
        messages=spoken(request.messages),
        sampling=request,
        tools=tools.read(request),
        form=response_format.read(request, settings),
        max_tokens=most or predicted(request, settings.default_max_tokens),
        logprobs=logprobs,
        effort=request.effort,
        variables=request.chat_template_kwargs or {},
        thinks=tools.thinks(request.effort, request.chat_template_kwargs or {}),
        continues=bool(request.continue_final_message),
        begins=request.add_generation_prompt is not False,
    )


def _form(request: ChatRequest, said: Conversation, served: ServedModel) -> ChatForm:
    head = {
        "id": "chatcmpl-" + secrets.token_hex(12),
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": served.name,
        "system_fingerprint": served.build,
    }
    top = None
    if request.logprobs:
        top = request.top_logprobs or 0
    return ChatForm(
        head,
        served.tokenizer,
        Extras.of(request, top),
        only_calls=said.tools.forced,
        thoughts=request.shows_reasoning,
        echo=_echo(request),
        verbose=bool(request.verbose),
    )


def _echo(request: ChatRequest) -> str:
    """What the answer begins with."""
    last = request.messages[-1]
    if request.echo and last.role == "assistant":
        return text_of(last)
    return ""
