"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's Messages API.

Owns the understanding of a Messages request, which happens in the worker thread; what follows is every protocol's
(`prepare`, `respond`). Counting needs no engine.
"""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.context import AppContext, ServedModel
from server.api.input import body, messages_input, response_format, tools
from server.api.input.conversation import Conversation
from server.api.input.members import unknown
from server.api.input.messages_schema import MessagesPrompt, MessagesRequest
from server.api.input.refusals import check_unoffered
from server.api.input.response_format import AnswerForm
from server.api.input.schema import GenerationRequest, effort_of
from server.api.input.sequences import Bounds
from server.api.openapi import GENERATION, errors, events
from server.api.openapi import body as documented
from server.api.output.messages import MessagesForm
from server.api.output.messages_schema import AnthropicErrorBody, AnthropicMessage, MessageEvent, TokenCount
from server.api.output.respond import PreparedRequest, answer
from server.api.output.sse import encode
from server.api.prepare import counted, prepared, render
from server.errors import InvalidValue
from server.metrics import OTHER
from server.settings import Settings

ENDPOINT = "messages"
_SAMPLING = ("temperature", "top_p", "top_k", "seed", "stream")


def routes(served: AppContext, prefix: str) -> APIRouter:
    router = APIRouter(prefix=prefix, tags=["generation"])

    @router.post(
        "/messages",
        response_model=AnthropicMessage,
        responses={200: events(MessageEvent, AnthropicErrorBody), **errors(*GENERATION, form=AnthropicErrorBody)},
        openapi_extra=documented(MessagesRequest),
    )
    async def create_message(http: Request) -> Response:
        """The model's next turn of a conversation of content blocks, whole or as an event stream."""
        return await answer(served, http, ENDPOINT, prepare)

    @router.post(
        "/messages/count_tokens",
        response_model=TokenCount,
        responses=errors(400, 404, 413, 415, form=AnthropicErrorBody),
        openapi_extra=documented(MessagesPrompt),
    )
    async def count_tokens(http: Request) -> Response:
        """How many tokens the prompt of a message has."""
        content = await body.read(http, served.settings.max_body_bytes)
        tokens, names = await served.prepare(count, content)
        served.note_unknown(OTHER, names)
        return Response(encode({"input_tokens": tokens}), media_type="application/json")

    return router


def prepare(served: ServedModel, content: bytes, bounds: Bounds) -> PreparedRequest:
    """Bytes → sequences. Raises RequestError that names the field at fault."""
    request = body.validate(MessagesRequest, content)
    served.check_model(request.model)
    said = conversation(request, served.settings, sampling(request), request.max_tokens)
    head = {"id": "msg_" + secrets.token_hex(12), "type": "message", "role": "assistant", "model": served.name}
    form = MessagesForm(head, request.max_tokens, only_calls=said.tools.forced)
    return prepared(served, said, bounds, form, unknown(request))


def count(served: ServedModel, content: bytes) -> tuple[int, list[str]]:
    """Tokens of the prompt, and names of the members that no object declares."""
    request = body.validate(MessagesPrompt, content)
    served.check_model(request.model)
    said = conversation(request, served.settings, GenerationRequest.model_construct())
    prompt = counted(served, lambda most: render(served.tokenizer, said, most))
    return len(prompt.ids), unknown(request)


def sampling(request: MessagesRequest) -> GenerationRequest:
    """How tokens are drawn, in the core's words."""
    fields = {name: getattr(request, name) for name in _SAMPLING}
    return GenerationRequest.model_construct(stop=request.stop_sequences, **fields)


def conversation(
    request: MessagesPrompt, settings: Settings, draws: GenerationRequest, most: int | None = None
) -> Conversation:
    """The request in no protocol's words. `most`: tokens of the answer."""
    check_unoffered(request)
    effort = _effort(request)
    variables = request.chat_template_kwargs or {}
    talk = messages_input.messages(request)
    return Conversation(
        messages=talk,
        sampling=draws,
        tools=messages_input.tools(request, settings),
        form=_answer_form(request, settings),
        max_tokens=most,
        effort=effort,
        variables=variables,
        thinks=tools.thinks(effort, variables),
        continues=talk[-1]["role"] == "assistant" and bool(talk[-1]["content"]),
    )


def _effort(request: MessagesPrompt) -> str | None:
    """Switched off is off; else the effort that is named goes before the one that a switch stands for."""
    named = None
    if request.output_config is not None:
        named = request.output_config.effort
    if request.thinking is None:
        return named
    switched = effort_of(request.thinking.type != "disabled")  # `adaptive` is on here
    if switched == "none":
        return switched
    return named or switched


def _answer_form(request: MessagesPrompt, settings: Settings) -> AnswerForm | None:
    form = None
    if request.output_config is not None:
        form = request.output_config.format
    if form is None:
        form = request.output_format
    elif request.output_format is not None:
        raise InvalidValue("output_format is an older name of output_config.format; send one", param="output_format")
    if form is None:
        return None
    param = "output_config.format.schema"
    if request.output_format is not None:
        param = "output_format.schema"
    return response_format.of_schema(form.schema_, settings, param)
