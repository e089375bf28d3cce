"""The wire types: what a client gets.

Owns the documented shape of every answer. Routes build plain dictionaries, which costs less; the tests hold them
against these shapes. Runs at start only.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


# ---------------------------------------------------------------- errors
class Error(Shape):
    message: str = Field(description="what is wrong, for people", examples=["messages: Field required"])
    type: str = Field(description="kind of error", examples=["invalid_request_error"])
    param: str | None = Field(description="the request field at fault", examples=["messages"])
    code: str | None = Field(description="the error, for programs", examples=["invalid_value"])
    n_prompt_tokens: int | None = Field(None, description="with context_length_exceeded: tokens of the prompt")
    n_ctx: int | None = Field(None, description="with context_length_exceeded: tokens that the context has")


class ErrorBody(Shape):
    """Body of every answer that isn't a success."""

    error: Error


# ---------------------------------------------------------------- what completions share
class PromptDetails(Shape):
    cached_tokens: int = Field(description="prompt tokens that needed no work, known from an earlier prompt")


class CompletionDetails(Shape):
    reasoning_tokens: int = Field(description="tokens of the reasoning, tags included")


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int = Field(description="tokens drawn, an end token included")
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Timings(Shape):
    """Of one answer, with `timings_per_token`; of the first one where several share an event."""

    cache_n: int = Field(description="prompt tokens that needed no work")
    prompt_n: int = Field(description="prompt tokens that were read")
    prompt_ms: float = Field(description="from the engine's getting the prompt to the first token")
    prompt_per_second: float
    predicted_n: int = Field(description="tokens drawn so far")
    predicted_ms: float = Field(description="from the first token to the last")
    predicted_per_second: float = Field(description="0 until there is a second token")


# ---------------------------------------------------------------- chat
class Alternative(Shape):
    token: str = Field(description="decoded text; � where it isn't whole characters")
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Shape):
    name: str | None = None
    arguments: str = ""


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ToolCallDelta(Shape):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="the same as `reasoning_content`")
    tool_calls: list[ToolCall] | None = None


class MessageDelta(Shape):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


PromptLogprobs = list[dict[str, dict[str, float | int | str | None]] | None]
ChatFinish = Literal["stop", "length", "tool_calls"]


class ChatChoice(Shape):
    index: int
    message: AnswerMessage
    finish_reason: ChatFinish
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = Field(description="with `return_token_ids`")


class ChunkChoice(Shape):
    index: int
    delta: MessageDelta
    finish_reason: ChatFinish | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = Field(None, description="with `return_token_ids`")


class Verbose(Shape):
    prompt: str = Field(description="the conversation as the model read it")


class ChatCompletion(Shape):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str = Field(description="the same for the same versions of the server and MLX")
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = Field(description="with `return_token_ids`")
    prompt_logprobs: PromptLogprobs | None = Field(description="with `prompt_logprobs`: a token by its id, and others")
    timings: Timings | None = Field(None, description="with `timings_per_token`")
    verbose: Verbose | None = Field(None, alias="__verbose", description="with `verbose`")


class ChatCompletionChunk(Shape):
    """One event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = Field(None, description="in the first event, with `return_token_ids`")
    timings: Timings | None = Field(None, description="with `timings_per_token`, but not in an answer's first event")
    verbose: Verbose | None = Field(None, alias="__verbose", description="in the first event, with `verbose`")


class StoredChoice(Shape):
    index: int
    message: AnswerMessage
    finish_reason: ChatFinish | None = Field(description="null where it has not come to an end")
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = Field(description="with `return_token_ids`")


class StoredError(Shape):
    code: str
    message: str


class StoredChat(Shape):
    """Answer of GET /v1/chat/completions/{id}: the completion, its metadata, and its error if it has failed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[StoredChoice]
    metadata: dict[str, str]
    error: StoredError | None = None
    system_fingerprint: str | None = None
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    timings: Timings | None = None
    verbose: Verbose | None = Field(None, alias="__verbose")


class ChatList(Shape):
    """Answer of GET /v1/chat/completions."""

    object: Literal["list"]
    data: list[StoredChat]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredMessage(Shape):
    """A message as a client sent it."""

    model_config = ConfigDict(extra="allow")

    id: str
    role: str


class MessageList(Shape):
    """Answer of GET /v1/chat/completions/{id}/messages."""

    object: Literal["list"]
    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedChat(Shape):
    """Answer of DELETE /v1/chat/completions/{id}."""

    object: Literal["chat.completion.deleted"]
    id: str
    deleted: Literal[True]


# ---------------------------------------------------------------- text completions
class TextLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Shape):
    text: str
    index: int
    finish_reason: Literal["stop", "length"] | None
    logprobs: TextLogprobs | None
    token_ids: list[int] | None = Field(None, description="with `return_token_ids`")
    prompt_token_ids: list[int] | None = Field(None, description="with `return_token_ids`")
    prompt_logprobs: PromptLogprobs | None = Field(None, description="with `prompt_logprobs`")


class TextCompletion(Shape):
    """Answer of POST /v1/completions, and one event of a streamed one (whose finish_reason is null until the last)."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | None = None
    timings: Timings | None = Field(None, description="with `timings_per_token`")


# ---------------------------------------------------------------- the rest
class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="id of the served model")
    max_model_len: int | None = Field(description="positions of the context, once known")


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Shape):
    """Answer of POST /tokenize, with the fields of both customary forms."""

    tokens: list[Any] = Field(description="ids, or with `with_pieces` objects of id and piece")
    count: int
    max_model_len: int | None = None
    token_strs: list[str] | None = Field(description="with `return_token_strs`: tokens as the vocabulary writes them")


class InputTokensAnswer(Shape):
    """Answer of POST /v1/chat/completions/input_tokens, as llama.cpp names it."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class TemplateAnswer(Shape):
    """Answer of POST /apply-template."""

    prompt: str


class DetokenizeAnswer(Shape):
    """Answer of POST /detokenize, under both customary names."""

    content: str | None = Field(None, description="unless the request names the model, which only vLLM's clients do")
    prompt: str
