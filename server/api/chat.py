"""POST /v1/chat/completions.

Owns the understanding of a chat request. Everything up to the sequences happens in the worker thread; then the event
loop opens and follows them (`respond`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.context import AppContext, ServedModel
from server.api.input import body, generic_tools, refusals, response_format, tools
from server.api.input.members import unknown
from server.api.input.schema import ChatRequest
from server.api.input.sequences import Bounds, most_tokens, predicted, sequences, truncated
from server.api.input.turns import spoken, text_of
from server.api.middleware.access import record_of
from server.api.openapi import GENERATION, errors, streamed
from server.api.openapi import body as documented
from server.api.output.chat import ChatForm
from server.api.output.options import Extras
from server.api.output.respond import PreparedRequest, respond
from server.api.output.schema import ChatCompletion, ChatCompletionChunk
from server.text.detokenizer import TextState
from server.text.tokenizer import ChatPrompt, Tokenizer

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
        record_of(http.scope).endpoint = ENDPOINT
        content = await body.read(http, served.settings.max_body_bytes)
        bounds = Bounds.of(await served.known(), served.settings)
        return await respond(served, http, ENDPOINT, await served.prepare(prepare, content, bounds))

    return router


def prepare(served: ServedModel, content: bytes, bounds: Bounds) -> PreparedRequest:
    """Bytes → sequences. Raises RequestError that names the field at fault."""
    request = body.validate(ChatRequest, content)
    served.check_model(request.model)
    refusals.check_chat(request, served.settings)
    tokenizer = served.tokenizer
    wish = tools.read(request)
    form = response_format.read(request, served.settings)
    prompt = render(tokenizer, request, wish, most_tokens(request, bounds))
    default = served.settings.default_max_tokens
    max_tokens = request.max_completion_tokens or request.max_tokens or predicted(request, default)
    bounds.check_ids(prompt.ids, "messages")
    ids = truncated(prompt.ids, request, bounds, max_tokens)
    constraint = tools.constraint(
        form,
        wish,
        prompt,
        tokenizer,
        rows=bounds.vocabulary,
        thinks=tools.thinks(request),
        continues=bool(request.continue_final_message),
        prove=served.prover.fault,
    )
    made = sequences(
        request,
        [ids],
        tokenizer=tokenizer,
        bounds=bounds,
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else -1,
        grammar=constraint.grammar if constraint else None,
        marks=prompt.marks if ids is prompt.ids else [len(ids)],
    )
    follows = {}
    if constraint:
        follows = {"follows": True, "reasons": constraint.reasons}
    spelled = {"rows": bounds.vocabulary, "stop_ids": made[0].stop_ids}
    texts = [_text(request, wish, prompt, tokenizer, **spelled, **follows) for _ in made]
    return PreparedRequest(request, made, texts, _form(request, wish, served), unknown(request))


def render(tokenizer: Tokenizer, request: ChatRequest, wish: tools.ToolOptions, most: int | None = None) -> ChatPrompt:
    """The conversation as the model reads it. Raises ContextLengthError where it's far longer than `most` tokens."""
    messages, offered = generic_tools.rewritten(tokenizer, spoken(request.messages), wish.for_template)
    return tokenizer.chat(
        messages,
        tools=offered,
        kwargs=request.chat_template_kwargs,
        reasoning_effort=request.effort,
        continue_final_message=bool(request.continue_final_message),
        begin_answer=request.add_generation_prompt is not False,
        most=most,
    )


def _text(
    request: ChatRequest, wish: tools.ToolOptions, prompt: ChatPrompt, tokenizer: Tokenizer, **more: Any
) -> TextState:
    return TextState(
        tokenizer,
        stops=[stop for stop in request.stop or [] if stop],
        tools=wish.for_template,
        reasoning=prompt.reasoning,
        continues=bool(request.continue_final_message),
        show_special=request.shows_special,
        earlier_calls=list(_earlier_calls(request)),
        **more,
    )


def _earlier_calls(request: ChatRequest) -> Iterator[str]:
    """The ids that the conversation's calls and results have."""
    for message in request.messages:
        yield from (call.id for call in message.tool_calls or [] if call.id)
        if message.tool_call_id:
            yield message.tool_call_id


def _form(request: ChatRequest, wish: tools.ToolOptions, served: ServedModel) -> ChatForm:
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
        only_calls=wish.forced,
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
