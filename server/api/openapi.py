"""The OpenAPI document.

Owns what FastAPI can't see by itself: request bodies, which are read and checked by hand, event streams, and the
error answers of each route. Runs at start.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.api.shapes import ErrorBody
from server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TemplateRequest, TokenizeRequest

REQUESTS: list[type[BaseModel]] = [
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    TemplateRequest,
]
REASONS = {
    400: "a value can't be taken, or what it asks for isn't offered",
    401: "an API key is needed",
    403: "the Host or Origin header names a foreign place",
    404: "no such model or URL",
    405: "no such method",
    408: "the deadline has passed",
    413: "the body is too large",
    429: "too many requests wait already",
    500: "the server made a mistake, or this generation can't go on",
    503: "no engine is ready, or the server is about to end",
}
GENERATION = (400, 404, 408, 413, 429, 503)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Documentation of a route's error answers; those that any route may give are added."""
    every = sorted({*statuses, 401, 403, 405, 500})
    return {status: {"model": ErrorBody, "description": REASONS[status]} for status in every}


def body(model: type[BaseModel]) -> dict[str, Any]:
    """Documentation of a body that the route reads by hand."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def streamed(chunk: type[BaseModel]) -> dict[str, Any]:
    """Documentation of an answer that may be an event stream instead."""
    description = f"server-sent events, each a {chunk.__name__}, then `[DONE]`"
    return {"content": {"text/event-stream": {"schema": {"type": "string", "description": description}}}}


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document, made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, requests = models_json_schema(
            [(model, "validation") for model in REQUESTS], ref_template="#/components/schemas/{model}"
        )
        made["components"]["schemas"] |= requests["$defs"]
        app.openapi_schema = made
    return app.openapi_schema
