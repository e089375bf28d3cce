"""Errors as Anthropic's clients know them, on the routes of the Messages API.

Owns which paths are theirs and the form of a refusal there, whatever refuses: a route, the reader of bodies or the
middleware. Pure; any thread.
"""

from __future__ import annotations

from typing import Any

from server.errors import ContextLengthError, GenerationError, RequestError, UnsupportedParameter

_ROOTS = ("/v1/messages", "/messages")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
# The SDK's tool runners then send the whole conversation, as they do to any server that holds none.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def speaks(path: str) -> bool:
    """Whether a request to `path` comes from a client of Anthropic's, also where no route is."""
    return path.startswith(_ROOTS) and path.removeprefix("/v1").removeprefix("/messages")[:1] in ("", "/")


def status(error: RequestError) -> int:
    """The HTTP status. An answer that can't go on would fail again, and after 500 clients try again."""
    if isinstance(error, GenerationError):
        return 400
    return error.status


def error_object(error: RequestError, status: int) -> dict[str, Any]:
    """Type and message, and the details of a refused thread. Agents shorten a conversation that is too long when they
    read these very words."""
    message = error.message
    if isinstance(error, ContextLengthError) and error.numbers:
        most = error.numbers["n_ctx"] - 1  # a token of the answer has to fit, too
        message = f"prompt is too long: {error.numbers['n_prompt_tokens']} tokens > {most} maximum"
    fields = {"type": _TYPES.get(status, "invalid_request_error"), "message": message}
    if isinstance(error, UnsupportedParameter) and error.param == "thread":
        return {**fields, "details": _NO_THREADS}
    return fields


def body(error: RequestError, request_id: str | None = None) -> dict[str, Any]:
    """Body of a refusal."""
    body = {"type": "error", "error": error_object(error, status(error))}
    if request_id is None:
        return body
    return {**body, "request_id": request_id}


def event(error: RequestError) -> dict[str, Any]:
    """What an event in a stream says of an error. Agents repeat the request once, and get the refusal for good."""
    status = error.status
    if isinstance(error, GenerationError):
        status = 500
    return {"type": "error", "error": error_object(error, status)}
