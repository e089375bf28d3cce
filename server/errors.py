"""The error tree, and its wire form.

Owns every failure that Marathon reports to a client or on the command line. Runs in both processes; does no I/O.

    MarathonError
    ├── StartupError                  one line on stderr, exit code 2; never reaches HTTP
    └── RequestError                  has status, type, code, param; rendered as an HTTP answer or as an SSE event
        ├── InvalidValue              400  a field has a value that it can't have
        ├── UnsupportedParameter      400  the field is known, but what it asks for isn't offered
        ├── ContextLengthError        400  the prompt doesn't fit the context
        ├── ExceedsMemory             400  the sequence could never fit the memory limit, even alone
        ├── GrammarFailure            400  the answer's form can't be followed any further
        ├── InvalidApiKey             401
        ├── Forbidden                 403  foreign Origin or Host
        ├── PreviousNotFound          400  previous_response_id names no stored response
        ├── ModelNotFound             404
        ├── AnswerNotFound            404  no stored answer has this id, or another key made it
        ├── UnknownUrl                404
        ├── MethodError               405
        ├── UnknownMethod             501  no route has such a method
        ├── RequestTimeout            408  the request's deadline passed, or it stopped coming
        ├── AnotherModel              409  a stored answer can be made again by its own model alone
        ├── Cancellation              409  another request cancelled or deleted the answer
        ├── RequestTooLarge           413
        ├── UnsupportedMediaType      415  a content coding or charset that isn't decoded
        ├── HeadTooLarge              431
        ├── QueueFull                 429  retry later
        ├── NotReady                  503  no engine
        ├── Draining                  503  shutting down
        ├── JournalUnavailable        503  the answer can't be stored
        └── InternalError             500
            └── GenerationError       500  this generation can't be continued; retrying would repeat it
                └── FatalPrompt       400  its prompt has killed engines
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

NO_RETRY = {"x-should-retry": "false"}  # OpenAI's and Anthropic's SDKs repeat 408, 409, 429 and 5xx without it


def joined_lines(text: str) -> str:
    """The text on one line, its white space made single spaces."""
    return " ".join(text.split())


def one_line(error: BaseException, longest: int = 300) -> str:
    """The error's words on one line, cut where they get long: a list that follows a colon stays with it."""
    words = joined_lines(str(error)) or type(error).__name__
    if len(words) > longest:
        words = words[:longest].rpartition(" ")[0].rstrip(" ,;:") + " …"
    return words.rstrip(" :")


class MarathonError(Exception):
    """Root of the tree. `str(error)` is the sentence for the user."""


class StartupError(MarathonError):
    """The server can't start as configured: a bad setting, a taken port, a missing or broken model."""


class RequestError(MarathonError):
    """A request can't be answered as asked.

    Attributes:
        status: HTTP status before the first byte.
        type, code: OpenAI's machine-readable names.
        param: the request field at fault, or None.
        retry_after: seconds, sent as `Retry-After`, or None.
        numbers: what the message says, for programs: further members of the error object.
        reason: label of `marathon_requests_rejected_total`.
        own_headers: of the response, always the same for the class.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    reason: ClassVar[str] = "invalid"
    own_headers: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.numbers = numbers or {}

    def body(self) -> dict[str, Any]:
        """The OpenAI error object: `{"error": {message, type, param, code}}`, and the numbers there are."""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**fields, **self.numbers}}

    def headers(self) -> dict[str, str]:
        """Response headers that belong to the error."""
        headers = dict(self.own_headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        return headers


class InvalidValue(RequestError):
    """A field is missing, has the wrong type, or is out of range."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class UnsupportedParameter(RequestError):
    """A known field asks for something that isn't offered. Never ignored in silence."""

    status = 400
    type = "invalid_request_error"
    code = "unsupported_parameter"
    reason = "unsupported"


class ContextLengthError(RequestError):
    """Prompt and answer don't fit the model's context; the message names both numbers."""

    status = 400
    type = "invalid_request_error"
    code = "context_length_exceeded"
    reason = "context_length"

    @classmethod
    def of(cls, tokens: int, context: int, *, at_least: bool = False) -> ContextLengthError:
        """For a prompt of so many tokens, or `at_least` so many: what can't fit isn't counted to its end."""
        if at_least:
            count = f"at least {tokens}"
        else:
            count = str(tokens)
        return cls(
            # OpenAI's words first and llama.cpp's then: clients look for either to know what has happened.
            f"This model's maximum context length is {context} tokens. However, the prompt of {count} tokens exceeds "
            "the available context size: at least one token of the answer has to fit, too.",
            numbers={"n_prompt_tokens": tokens, "n_ctx": context},  # llama.cpp's names
        )


class ExceedsMemory(RequestError):
    """The sequence could never run within the memory limit, even alone; the message names both numbers."""

    status = 400
    type = "invalid_request_error"
    code = "memory_limit_exceeded"
    reason = "memory_guard"


class GrammarFailure(RequestError):
    """The grammar of the answer's form can't be followed to its end: it allows nothing more, or too much to keep in
    mind. Found while the answer is drawn; another draw may do better, the same one won't."""

    status = 400
    type = "invalid_request_error"
    code = "grammar_failed"
    own_headers: ClassVar[Mapping[str, str]] = NO_RETRY


class InvalidApiKey(RequestError):
    """An API key is configured and the request has none or another."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"
    reason = "auth"
    own_headers: ClassVar[Mapping[str, str]] = {"WWW-Authenticate": "Bearer"}


class Forbidden(RequestError):
    """The Host or Origin header names a place that isn't allowed (DNS rebinding, cross-site requests)."""

    status = 403
    type = "permission_error"
    code = "forbidden"
    reason = "auth"


class ModelNotFound(RequestError):
    """The request names a model that isn't served."""

    status = 404
    type = "not_found_error"
    code = "model_not_found"


class PreviousNotFound(RequestError):
    """The response to go on from isn't stored."""

    status = 400
    type = "invalid_request_error"
    code = "previous_response_not_found"


class AnswerNotFound(RequestError):
    """There is no stored answer of this id, or it belongs to another API key."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class AnotherModel(RequestError):
    """A stored answer can't be made again or continued: the model that is served isn't the one that makes it."""

    status = 409
    type = "invalid_request_error"
    code = "another_model"
    own_headers = NO_RETRY


class Cancellation(RequestError):
    """Another request has cancelled or deleted the answer that this one waits for."""

    status = 409
    type = "invalid_request_error"
    code = "cancelled"
    own_headers = NO_RETRY


class UnknownUrl(RequestError):
    """No such route."""

    status = 404
    type = "not_found_error"
    code = "unknown_url"


class MethodError(RequestError):
    """The route exists, the method doesn't."""

    status = 405
    type = "not_found_error"
    code = "method_not_allowed"


class UnknownMethod(RequestError):
    """HTTP has no such method, as far as the server knows."""

    status = 501
    type = "not_found_error"
    code = "unknown_method"
    own_headers = NO_RETRY


class RequestTimeout(RequestError):
    """The deadline that the request or the server set has passed, queue time counting; or the client stopped in the
    middle of its request."""

    status = 408
    type = "server_error"
    code = "timeout"
    own_headers = NO_RETRY


class RequestTooLarge(RequestError):
    """The body is larger than the cap."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"
    reason = "body_too_large"


class UnsupportedMediaType(RequestError):
    """The body comes in a content coding or charset that isn't decoded; the message names it."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"
    reason = "unsupported"
    own_headers: ClassVar[Mapping[str, str]] = {"Accept-Encoding": "gzip, deflate"}


class HeadTooLarge(RequestError):
    """The request's first line and headers are larger than the server takes."""

    status = 431
    type = "invalid_request_error"
    code = "head_too_large"
    reason = "body_too_large"


class QueueFull(RequestError):
    """As many requests wait as may wait."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    reason = "queue_full"


class NotReady(RequestError):
    """No engine is up."""

    status = 503
    type = "server_error"
    code = "not_ready"
    reason = "not_ready"


class Draining(RequestError):
    """The server is shutting down and takes no new work."""

    status = 503
    type = "server_error"
    code = "draining"
    reason = "shutdown"


class JournalUnavailable(RequestError):
    """The answer was to be stored and can't be; the message says why."""

    status = 503
    type = "server_error"
    code = "journal_unavailable"
    reason = "journal"
    own_headers = NO_RETRY


class InternalError(RequestError):
    """A fault of the server's own. The message carries no path and no traceback."""

    status = 500
    type = "server_error"
    code = "internal_error"


class GenerationError(InternalError):
    """This generation ended with an error and retrying would repeat it."""

    code = "generation_failed"
    own_headers = NO_RETRY


class FatalPrompt(GenerationError):
    """The engine was lost again and again while it worked on this prompt. The same prompt is refused for a minute."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_prompt"
