"""The OpenAPI document.

Owns what FastAPI can't see by itself: request bodies, which are read and checked by hand, event streams, and the
error answers of each route. It is made once, in a thread, when it is first asked for: that takes some 100 ms.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from server.api.input.messages_schema import MessagesPrompt, MessagesRequest
from server.api.input.responses_schema import ResponsesRequest
from server.api.input.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    MetadataRequest,
    TemplateRequest,
    TokenizeRequest,
)
from server.api.output.messages_schema import AnthropicErrorBody, MessageEvent
from server.api.output.responses_schema import ResponseEvent
from server.api.output.schema import ChatCompletionChunk, ErrorBody, TextCompletion
from server.api.output.sse import encode

REQUESTS: list[type[BaseModel]] = [
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    TemplateRequest,
    ResponsesRequest,
    MessagesRequest,
    MessagesPrompt,
    MetadataRequest,
]
CHUNKS: list[type[BaseModel]] = [
    ChatCompletionChunk,
    TextCompletion,
    ResponseEvent,
    MessageEvent,
    ErrorBody,
    AnthropicErrorBody,
]
REASONS = {
    400: "a value can't be taken, or what it asks for isn't offered",
    401: "an API key is needed",
    403: "the Host or Origin header names a foreign place",
    404: "no such model or URL",
    405: "no such method",
    409: "the model that is served didn't make this answer",
    408: "the deadline has passed, or the request stopped coming",
    413: "the body is too large",
    415: "the body's content coding or charset isn't decoded",
    429: "too many requests wait already",
    500: "the server made a mistake, or this generation can't go on",
    503: "no engine is ready, the server is about to end, or what should be stored can't be",
}
GENERATION = (400, 404, 408, 413, 415, 429, 503)


def errors(*statuses: int, form: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """Documentation of a route's error answers; those that any route may give are added.

    By reference: of a model FastAPI would build a validator for each status of each route, which took half of the time
    that an application takes to be made.
    """
    every = sorted({*statuses, 401, 403, 405, 500})
    content = {"application/json": {"schema": _reference(form)}}
    return {status: {"description": REASONS[status], "content": content} for status in every}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def body(model: type[BaseModel]) -> dict[str, Any]:
    """Documentation of a body that the route reads by hand."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _reference(model)}}}}


def events(*kinds: type[BaseModel]) -> dict[str, Any]:
    """The same of a stream whose events have names and which has no [DONE]: an error is an event like others."""
    schema = {"anyOf": [_reference(kind) for kind in kinds]}
    payload = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    event = {
        "description": "each has the type of its data as its name; the last one says how the answer ended",
        "type": "object",
        "required": ["event", "data"],
        "properties": {"event": {"type": "string"}, "data": payload},
    }
    return {"content": {"text/event-stream": {"itemSchema": event}}}


def streamed(chunk: type[BaseModel]) -> dict[str, Any]:
    """Documentation of an answer that may be an event stream instead, event by event: `itemSchema` is OpenAPI 3.2's
    word, which FastAPI, too, uses for streams."""
    schema = {"anyOf": [_reference(chunk), _reference(ErrorBody)]}
    payload = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    event = {
        "description": f"each is a {chunk.__name__}, the last one [DONE]; an error ends the stream instead",
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [payload, {"const": "[DONE]"}]}},
    }
    return {"content": {"text/event-stream": {"itemSchema": event}}}


def event_stream(description: str) -> dict[str, Any]:
    """Documentation of an answer that is always an event stream."""
    text = {"type": "string"}
    event = {"type": "object", "required": ["event", "data"], "properties": {"event": text, "data": text}}
    return {"description": description, "content": {"text/event-stream": {"itemSchema": event}}}


def routes(app: FastAPI) -> APIRouter:
    """The route of the document itself, which it doesn't name."""
    router = APIRouter(include_in_schema=False)

    @router.get("/openapi.json")
    async def openapi() -> Response:
        """What there is to ask for."""
        return Response(await asyncio.to_thread(encoded, app), media_type="application/json")

    return router


def encoded(app: FastAPI) -> bytes:
    """The document as it is sent, made once.

    It takes a quarter of a second of the interpreter's time: a server makes it while it starts, before there is a
    stream that would wait.
    """
    made: bytes | None = getattr(app.state, "document", None)
    if made is None:
        made = app.state.document = encode(app.openapi())
    return made


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document."""
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    made["components"]["schemas"] |= schemas(REQUESTS, "validation") | schemas(CHUNKS, "serialization")
    return made


def schemas(models: list[type[BaseModel]], mode: Literal["validation", "serialization"]) -> dict[str, Any]:
    """Of these models and all that they consist of, by name."""
    _, made = models_json_schema([(model, mode) for model in models], ref_template="#/components/schemas/{model}")
    found: dict[str, Any] = made["$defs"]
    return found
