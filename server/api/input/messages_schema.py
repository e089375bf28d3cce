"""The wire types of the Messages API: what a client may send.

Owns shape, bounds and description of its fields; the rules are those of `api/input/schema`. A content block is one type
with the members of all kinds; what each kind needs is the business of `api/input/messages_input`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from server.api.input.schema import (
    IGNORED,
    MAX_MESSAGES,
    STRICT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Effort,
    Many,
    Schema,
    StopString,
    ThinkingOptions,
    UnofferedField,
    Wire,
    by_kind,
    content_kind,
    elsewhere,
)

MAX_TOOLS = 1024
MAX_STOP_SEQUENCES = 128


class ContentBlock(Wire):
    """One block of a message's content, of the system text or of a tool's result."""

    type: str = Field(
        description="`text`; of the assistant's also `thinking`, `redacted_thinking` (which is left out) and "
        "`tool_use`; of the user's also `tool_result`; in a tool's result also `tool_reference`; no others",
        examples=["text"],
    )
    text: str | None = Field(None, description="the text", examples=["Hello!"])
    thinking: str | None = Field(None, description="the text of a thought")
    signature: Any = Field(None, description=IGNORED + "; any is taken")
    data: Any = Field(None, description=IGNORED + ": of a redacted thought")
    id: str | None = Field(None, description="of a call: the id that its result names", examples=["call_1"])
    name: str | None = Field(None, description="of a call: the tool", examples=["get_time"])
    input: dict[str, Any] | None = Field(None, description="of a call: its arguments")
    caller: Any = Field(None, description=IGNORED)
    tool_use_id: str | None = Field(None, description="of a result: the call that it answers", examples=["call_1"])
    content: BlocksOrText | None = Field(None, description="of a result: what came of the call")
    is_error: bool | None = Field(None, description="of a result: the call failed, and the model is shown that")
    tool_name: str | None = Field(
        None, description="of a reference: the tool, whose definition the model reads at this place"
    )
    citations: Any = Field(None, description=IGNORED)
    cache_control: Any = Field(None, description=IGNORED)


BlocksOrText = Annotated[
    Annotated[str, Tag("#text")] | Annotated[Many[ContentBlock], Tag("#parts")],
    by_kind(content_kind, "a string or an array of content blocks"),
]


class InputMessage(Wire):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"] = Field(
        description="who speaks; a system text stays where it stands", examples=["user"]
    )
    content: BlocksOrText = Field(description="what is said", examples=["What is the capital of France?"])


class ToolDefinition(Wire):
    """A tool of the client's. Anthropic's own tools, which have another type, are left out."""

    type: str | None = Field(None, description="`custom` or absent; tools of other types are left out")
    name: str = Field(description="its name", examples=["get_time"])
    description: str | None = Field(None, description="what it does")
    input_schema: dict[str, Any] | None = Field(
        None,
        description="JSON schema of its arguments",
        examples=[{"type": "object", "properties": {"city": {"type": "string"}}}],
    )
    defer_loading: bool | None = Field(
        None, description="true: it isn't listed; the model reads its definition where a `tool_reference` names it"
    )
    strict: bool | None = Field(None, description=STRICT)
    input_examples: Any = Field(None, description=IGNORED)
    allowed_callers: Any = Field(None, description=IGNORED)
    eager_input_streaming: Any = Field(None, description=IGNORED + "; arguments come as they form")
    cache_control: Any = Field(None, description=IGNORED)


class TypedToolChoice(Wire):
    """Whether and what is called."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        description="`any`: some tool must be called, `tool`: the named one", examples=["auto"]
    )
    name: str | None = Field(None, description="with `tool`: which one", examples=["get_time"])
    disable_parallel_tool_use: bool | None = Field(None, description="true: a forced call is a single one")


class OutputFormat(Wire):
    """What the answer's text must look like."""

    type: Literal["json_schema"] = Field(description="`json_schema`", examples=["json_schema"])
    schema_: Schema = Field(
        alias="schema", description="the JSON schema; the answer follows it", examples=[{"type": "object"}]
    )


class OutputOptions(Wire):
    """Form and effort of the answer."""

    effort: Effort | None = Field(None, description="handed to templates that know it", examples=["low"])
    format: OutputFormat | None = Field(None, description="form of the answer's text; absent: any text")
    task_budget: Any = Field(None, description=IGNORED)


class MessagesPrompt(Wire):
    """Body of POST /v1/messages/count_tokens: what the prompt depends on."""

    model: str | None = Field(
        None, description="id of the served model, one of its aliases, or `default`", examples=["default"]
    )
    messages: Many[InputMessage] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="the conversation so far, oldest first; where the assistant's text is the last, the answer goes on "
        "with it",
    )
    system: BlocksOrText | None = Field(None, description="a system text before the messages", examples=["Be brief."])
    tools: Many[ToolDefinition] | None = Field(None, max_length=MAX_TOOLS, description="tools that the model may call")
    tool_choice: TypedToolChoice | None = Field(None, description="whether and what is called; absent: auto")
    thinking: ThinkingOptions | None = Field(None, description="whether the model may think first")
    output_config: OutputOptions | None = Field(None, description="form and effort of the answer")
    output_format: OutputFormat | None = Field(None, description="older name of `output_config.format`")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the chat template", examples=[{"enable_thinking": False}]
    )
    mcp_servers: Annotated[Any, UnofferedField(([],), "the server calls no tools itself")] = None
    compaction: Annotated[Any, UnofferedField((), "the client shortens its conversations itself")] = None
    thread: Annotated[Any, UnofferedField((), "no conversation is held here; each request has all its messages")] = None
    context_management: Any = Field(None, description=IGNORED + ": the whole conversation is read")
    cache_control: Any = Field(None, description=IGNORED + ": what was read is kept anyway")


class MessagesRequest(MessagesPrompt):
    """Body of POST /v1/messages."""

    max_tokens: int = Field(
        ge=1, description="most tokens of the answer; what doesn't fit the context is cut", examples=[256]
    )
    stream: bool | None = Field(None, description="send the answer as server-sent events", examples=[False])
    stop_sequences: Annotated[Many[StopString], Field(max_length=MAX_STOP_SEQUENCES)] | None = Field(
        None, description="strings that end the answer and aren't part of it", examples=[["\n"]]
    )
    temperature: float | None = TEMPERATURE
    top_p: float | None = TOP_P
    top_k: int | None = TOP_K
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="repeats the draw whatever else runs; absent: a new one each time"
    )
    metadata: Any = Field(None, description=IGNORED)
    service_tier: Any = Field(None, description=IGNORED)
    speed: Any = Field(None, description=IGNORED)
    container: Any = Field(None, description=IGNORED)
    inference_geo: Any = Field(None, description=IGNORED)
    user_profile_id: Any = Field(None, description=IGNORED)
    max_completion_tokens: Annotated[Any, elsewhere("`max_tokens`")] = None
    stop: Annotated[Any, elsewhere("`stop_sequences`", [])] = None
    response_format: Annotated[Any, elsewhere("`output_config.format`", {"type": "text"})] = None
    reasoning_effort: Annotated[Any, elsewhere("`output_config.effort`")] = None
    n: Annotated[Any, UnofferedField((1,), "a message is one answer")] = None
    min_p: Annotated[Any, UnofferedField((0,))] = None
    presence_penalty: Annotated[Any, UnofferedField((0,))] = None
    frequency_penalty: Annotated[Any, UnofferedField((0,))] = None
    repetition_penalty: Annotated[Any, UnofferedField((1,))] = None
