"""POST /v1/responses.

Owns the understanding of a Responses request, and what its answer repeats of it. Both happen in the worker thread; what
lies between is every protocol's (`prepare`, `respond`), and the keeping of a response is `api/stored`'s.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.context import AppContext, ServedModel
from server.api.input import body, own_input, response_format, responses_input, responses_tools, tools
from server.api.input.conversation import Conversation
from server.api.input.identity import AnswerIdentity, StoreOptions
from server.api.input.members import unknown
from server.api.input.refusals import check_bias, check_unoffered
from server.api.input.response_format import AnswerForm
from server.api.input.responses_schema import ResponsesRequest
from server.api.input.responses_tools import Identities
from server.api.input.schema import Wire, generation
from server.api.input.sequences import Bounds
from server.api.middleware.security import owner_of
from server.api.openapi import GENERATION, errors, events
from server.api.openapi import body as documented
from server.api.output.respond import PreparedRequest, received
from server.api.output.responses import ResponsesForm
from server.api.output.responses_schema import ResponseEvent, ResponseObject
from server.api.prepare import prepared
from server.api.stored.answers import StoredAnswers
from server.api.stored.earlier import resolved, shifted
from server.api.stored.respond import respond_kept
from server.errors import InvalidValue, UnsupportedParameter
from server.settings import Settings

ENDPOINT = "responses"
OFF = "off"
SEALED_THOUGHTS = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


def routes(served: AppContext, answers: StoredAnswers, prefix: str) -> APIRouter:
    router = APIRouter(prefix=prefix, tags=["generation"])

    @router.post(
        "/responses",
        response_model=ResponseObject,
        responses={200: events(ResponseEvent), **errors(*GENERATION)},
        openapi_extra=documented(ResponsesRequest),
    )
    async def create_response(http: Request) -> Response:
        """The model's next turn of a conversation of items, whole or as an event stream."""
        return await create(served, answers, http)

    return router


async def create(served: AppContext, answers: StoredAnswers, http: Request) -> Response:
    """The HTTP answer to a request for a response. Raises RequestError before the first byte."""
    sent, bounds = await received(served, http, ENDPOINT)
    content, earlier = await resolved(answers, sent, owner_of(http.scope))
    understood = await shifted(served.prepare(prepare, content, bounds, None, earlier), earlier)
    return await respond_kept(served, answers, http, "response", understood, content)


def prepare(
    served: ServedModel,
    content: bytes,
    bounds: Bounds,
    identity: AnswerIdentity | None = None,
    earlier: int = 0,
) -> PreparedRequest:
    """Bytes → sequences. Raises RequestError that names the field at fault.

    `identity`: of an answer that is stored already. `earlier`: how many of the input's items are those of the previous
    response.
    """
    request = body.validate(ResponsesRequest, content)
    if identity is None:
        served.check_model(request.model)
        identity = AnswerIdentity.draw("resp_", served.name)
        store = store_options(request, served.settings, identity, earlier)
        keeps = store is not None
    else:
        store = None
        keeps = True
    check(request)
    said, identities = conversation(request, served.settings)
    form = _form(_head(request, identity, keeps), request, said, identities, served)
    return prepared(served, said, bounds, form, unknown(request), identity=identity, store=store)


def store_options(
    request: ResponsesRequest, settings: Settings, identity: AnswerIdentity, earlier: int
) -> StoreOptions | None:
    """How the answer is kept; None where it isn't. Raises as `is_kept` does."""
    if not is_kept(request, settings):
        return None
    background = bool(request.background)
    own = own_input.encoded(own_input.of_response(request, identity.id, earlier))
    explicit = bool(request.store) or background
    return StoreOptions(identity, explicit, background, _texts(request.metadata), own)


def is_kept(request: ResponsesRequest, settings: Settings) -> bool:
    """Return whether the answer is stored. Raises for a background response that isn't."""
    background = bool(request.background)
    wanted = request.store
    if wanted is None:
        wanted = settings.store_responses or background
    if background and (not wanted or settings.journal == OFF):
        why = "background needs `store: true`"
        if wanted:
            why = "background responses aren't offered: the server keeps no journal"
        raise UnsupportedParameter(why, param="background")
    return wanted and settings.journal != OFF


def _texts(metadata: dict[str, Any] | None) -> dict[str, str]:
    return {key: str(value) for key, value in (metadata or {}).items()}


def check(request: ResponsesRequest) -> None:
    """Raises for the first option that can't be fulfilled."""
    check_unoffered(request)
    check_bias(request)
    if request.reasoning is not None:
        check_unoffered(request.reasoning, "reasoning.")
    if request.background_options is not None:
        check_unoffered(request.background_options, "background_options.")


def conversation(request: ResponsesRequest, settings: Settings) -> tuple[Conversation, Identities]:
    """The request in no protocol's words, and the tools' names."""
    offered, identities = responses_tools.read(request, settings)
    variables = request.chat_template_kwargs or {}
    effort = None
    if request.reasoning is not None:
        effort = request.reasoning.asked_effort
    logprobs = _top_logprobs(request)
    if logprobs is None:
        logprobs = -1
    said = Conversation(
        messages=responses_input.messages(request.input, request.instructions),
        sampling=generation(request),
        tools=offered,
        form=_answer_form(request, settings),
        max_tokens=request.max_output_tokens or settings.default_max_tokens,
        logprobs=logprobs,
        effort=effort,
        variables=variables,
        thinks=tools.thinks(effort, variables),
        param="input",
    )
    return said, identities


def _top_logprobs(request: ResponsesRequest) -> int | None:
    """Alternatives a token, or None where no log probabilities are asked for."""
    if request.top_logprobs or LOGPROBS in (request.include or []):
        return request.top_logprobs or 0
    return None


def _answer_form(request: ResponsesRequest, settings: Settings) -> AnswerForm | None:
    text = _text_form(request, settings)
    structured = response_format.of_structured(request, settings)
    if text is not None and structured is not None:
        message = f"{structured.param}: the answer's form is given by {text.param} already"
        raise InvalidValue(message, param=structured.param)
    return text or structured


def _text_form(request: ResponsesRequest, settings: Settings) -> AnswerForm | None:
    form = None
    if request.text is not None:
        form = request.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return response_format.of_any_object("text.format")
    if form.schema_ is None:
        raise InvalidValue("text.format: type json_schema needs schema", param="text.format.schema")
    return response_format.of_schema(form.schema_, settings, "text.format.schema")


# ---------------------------------------------------------------- the answer
def _form(
    head: dict[str, Any], request: ResponsesRequest, said: Conversation, identities: Identities, served: ServedModel
) -> ResponsesForm:
    return ResponsesForm(
        head,
        served.tokenizer,
        identities,
        top=_top_logprobs(request),
        seals=SEALED_THOUGHTS in (request.include or []),
        only_calls=said.tools.forced,
    )


def _head(request: ResponsesRequest, identity: AnswerIdentity, keeps: bool) -> dict[str, Any]:
    """What the response object says from beginning to end. `keeps`: it is stored."""
    return {
        "id": identity.id,
        "object": "response",
        "created_at": identity.created,
        "model": identity.model,
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None} | _echoed(request.reasoning),
        "safety_identifier": request.safety_identifier,
        "store": keeps,
        "text": {"format": {"type": "text"}} | _echoed(request.text),
        "tool_choice": _choice(request),
        "tools": [_echoed(tool) for tool in request.tools or []],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
        "user": request.user,
    }


def _choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if isinstance(choice, Wire):
        return _echoed(choice)
    return choice or "auto"


def _echoed(given: Wire | None) -> dict[str, Any]:
    """An object as the client gave it."""
    if given is None:
        return {}
    return given.model_dump(by_alias=True, exclude_none=True)
