"""POST /v1/chat/completions.

Owns the understanding of a chat request, and the form of its answer. Both happen in the worker thread; what lies
between is every protocol's (`prepare`, `respond`).
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.context import AppContext, ServedModel
from server.api.input import body, own_input, refusals, response_format, tools
from server.api.input.conversation import Conversation
from server.api.input.identity import AnswerIdentity, StoreOptions
from server.api.input.members import unknown
from server.api.input.schema import ChatRequest
from server.api.input.sequences import Bounds, predicted
from server.api.input.turns import spoken, text_of
from server.api.openapi import GENERATION, errors, streamed
from server.api.openapi import body as documented
from server.api.output.chat import ChatForm
from server.api.output.options import Extras
from server.api.output.respond import PreparedRequest, received
from server.api.output.schema import ChatCompletion, ChatCompletionChunk
from server.api.prepare import prepared
from server.api.stored.answers import StoredAnswers
from server.api.stored.respond import respond_kept
from server.settings import Settings

ENDPOINT = "chat"
OFF = "off"


def routes(served: AppContext, answers: StoredAnswers, prefix: str) -> APIRouter:
    router = APIRouter(prefix=prefix, tags=["generation"])

    @router.post(
        "/chat/completions",
        response_model=ChatCompletion,
        responses={200: streamed(ChatCompletionChunk), **errors(*GENERATION)},
        openapi_extra=documented(ChatRequest),
    )
    async def chat_completions(http: Request) -> Response:
        """The model's next turn of a conversation, whole or as an event stream."""
        content, bounds = await received(served, http, ENDPOINT)
        understood = await served.prepare(prepare, content, bounds)
        return await respond_kept(served, answers, http, "chat", understood, content)

    return router


def prepare(
    served: ServedModel, content: bytes, bounds: Bounds, identity: AnswerIdentity | None = None
) -> PreparedRequest:
    """Bytes → sequences. Raises RequestError that names the field at fault. `identity`: of an answer that is stored
    already."""
    request = body.validate(ChatRequest, content)
    store = None
    if identity is None:
        served.check_model(request.model)
        identity = AnswerIdentity.draw("chatcmpl-", served.name)
        store = store_options(request, served.settings, identity)
    refusals.check_chat(request, served.settings)
    said = conversation(request, served.settings)
    form = _form(request, said, served, identity)
    return prepared(served, said, bounds, form, unknown(request), identity=identity, store=store)


def store_options(request: ChatRequest, settings: Settings, identity: AnswerIdentity) -> StoreOptions | None:
    """How the answer is kept; None where it isn't. A stored chat goes on without its client."""
    if request.store is not True or settings.journal == OFF:
        return None
    metadata = own_input.metadata(request.metadata)
    messages = own_input.encoded(own_input.of_chat(request, identity.id))
    return StoreOptions(identity, True, True, metadata, messages)


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


def _form(request: ChatRequest, said: Conversation, served: ServedModel, identity: AnswerIdentity) -> ChatForm:
    head = {
        "id": identity.id,
        "object": "chat.completion.chunk",
        "created": identity.created,
        "model": identity.model,
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
