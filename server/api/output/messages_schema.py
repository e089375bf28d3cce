"""The wire types of the Messages API: what a client gets.

Owns the documented shape of a message, its blocks, events and errors. Routes build plain dictionaries; the tests hold
them against these shapes. Runs at start only.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from server.api.output.schema import Shape

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageUsage(Shape):
    input_tokens: int = Field(description="prompt tokens but for the cached ones; at the beginning of a stream: all")
    cache_creation_input_tokens: int = Field(description="always 0")
    cache_read_input_tokens: int = Field(description="prompt tokens that needed no work")
    output_tokens: int = Field(description="tokens drawn, an end token included")


class OutputBlock(Shape):
    """A thought, a text or a call."""

    type: Literal["thinking", "text", "tool_use"]
    thinking: str | None = None
    signature: str | None = Field(None, description="of a thought: the same for all")
    text: str | None = None
    id: str | None = Field(None, description="of a call: the id that its result names")
    name: str | None = None
    input: dict[str, Any] | None = Field(None, description="of a call: its arguments; in a stream empty at first")


class AnthropicMessage(Shape):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None = Field(description="the string that ended the answer")
    stop_details: None = None
    usage: MessageUsage


class BlockDelta(Shape):
    """The next part of a block, or, in `message_delta`, why the answer ended."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    stop_details: None = None


class MessageEvent(Shape):
    """One event of a streamed message."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: AnthropicMessage | None = None
    index: int | None = Field(None, description="place of the block in the message")
    content_block: OutputBlock | None = None
    delta: BlockDelta | None = None
    usage: MessageUsage | None = None


class TokenCount(Shape):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class AnthropicError(Shape):
    type: str = Field(description="kind of error", examples=["invalid_request_error"])
    message: str = Field(description="what is wrong, for people", examples=["messages: Field required"])
    details: dict[str, Any] | None = Field(None, description="of a refused `thread`: what the SDKs know it by")


class AnthropicErrorBody(Shape):
    """Body of every answer on these routes that isn't a success; without the request's id an event of a stream."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str | None = None
