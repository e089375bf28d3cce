"""The wire types of the Responses API: what a client gets.

Owns the documented shape of a response, its items and its events. Routes build plain dictionaries; the tests hold them
against these shapes. Runs at start only.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from server.api.output.schema import CompletionDetails, Shape, TokenLogprob

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputPart(Shape):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[TokenLogprob] | None = Field(None, description="where they are asked for")


class ResponseItem(Shape):
    """A message, a thought, a call of a function or of a custom tool."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: ItemStatus
    role: Literal["assistant"] | None = None
    content: list[OutputPart] | None = None
    summary: list[Any] | None = Field(None, description="of a thought: always empty, `content` has all of it")
    encrypted_content: str | None = Field(None, description="of a thought, with `include`: to be sent back as it is")
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = Field(None, description="of a tool that was declared in one")
    arguments: str | None = None
    input: str | None = Field(None, description="of a custom tool's call")


class InputDetails(Shape):
    cached_tokens: int = Field(description="prompt tokens that needed no work, known from an earlier prompt")
    cache_write_tokens: int = Field(description="always 0")


class ResponseUsage(Shape):
    input_tokens: int = Field(description="tokens of the prompt, those that were cached included")
    input_tokens_details: InputDetails
    output_tokens: int = Field(description="tokens drawn, an end token included")
    output_tokens_details: CompletionDetails
    total_tokens: int


class ResponseError(Shape):
    code: str = Field(description="`invalid_prompt` where trying again would fail again")
    message: str


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class ResponseObject(Shape):
    """Answer of POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    store: bool = Field(description="the response is kept and can be asked for by its id")
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class DeletedResponse(Shape):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ListedItem(Shape):
    """An item as a client sent it; what it has besides depends on its type."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str


class InputItemList(Shape):
    """Answer of GET /v1/responses/{id}/input_items."""

    object: Literal["list"]
    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseEvent(Shape):
    """One event of a streamed response; which members it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: ResponseItem | None = None
    part: OutputPart | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[TokenLogprob] | None = None
    arguments: str | None = None
    name: str | None = None
    input: str | None = None
