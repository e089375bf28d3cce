"""The wire types of the Responses API: what a client may send.

Owns shape, bounds and description of its fields; the rules are those of `api/input/schema`. An input item is one type
with the members of all kinds, since clients send some of them without saying of which kind they are; what each kind
needs is the business of `api/input/responses_input`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from server.api.input.schema import (
    IGNORED,
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    STRICT,
    Many,
    ReasoningOptions,
    SamplingFields,
    Schema,
    UnofferedField,
    Wire,
    by_kind,
    content_kind,
    elsewhere,
    string_or_object,
)

MAX_TOOLS = 1024
LABEL = "comes back with the answer and can't change it"
HOSTED = frozenset({  # items of tools on OpenAI's servers, or of clients' tools that those know
    "additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction",
    "computer_call", "computer_call_output", "file_search_call", "image_generation_call", "local_shell_call",
    "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools",
    "shell_call", "shell_call_output", "tool_search_call", "tool_search_output", "web_search_call",
})  # fmt: skip


class InputPart(Wire):
    """One part of an item's content."""

    type: str = Field(
        description="`input_text`, `output_text`, `reasoning_text`, `summary_text`, `text` or `refusal`; no others",
        examples=["input_text"],
    )
    text: str | None = Field(None, description="the text", examples=["Hello!"])
    refusal: str | None = Field(None, description="the text of a refusal")
    annotations: Any = Field(None, description=IGNORED)
    logprobs: Any = Field(None, description=IGNORED)


PartsOrText = Annotated[
    Annotated[str, Tag("#text")] | Annotated[Many[InputPart], Tag("#parts")],
    by_kind(content_kind, "a string or an array of content parts"),
]


class InputItem(Wire):
    """One item of the conversation."""

    type: str | None = Field(None, description="kind of item; absent: a message", examples=["message"])
    id: str | None = Field(None, description=IGNORED)
    status: str | None = Field(None, description=IGNORED)
    role: Literal["developer", "system", "user", "assistant"] | None = Field(
        None, description="who speaks, in a message", examples=["user"]
    )
    content: PartsOrText | None = Field(
        None, description="what a message says, or a reasoning item thinks", examples=["Hello!"]
    )
    phase: Any = Field(None, description=IGNORED)
    summary: Many[InputPart] | None = Field(None, description="of a reasoning item: read where there is nothing else")
    encrypted_content: str | None = Field(
        None,
        description="of a reasoning item: the thought as an earlier answer gave it; read where `content` is absent",
    )
    call_id: str | None = Field(None, description="the call, of calls and their outputs", examples=["call_1"])
    name: str | None = Field(None, description="which tool was called", examples=["get_time"])
    namespace: str | None = Field(None, description="the namespace of the tool")
    arguments: str | None = Field(None, description="arguments of a function call as a JSON string")
    input: str | None = Field(None, description="input of a custom tool's call")
    output: PartsOrText | None = Field(None, description="what came of a call")

    @model_validator(mode="before")
    @classmethod
    def _hosted_items_are_left_out(cls, value: Any) -> Any:
        """Their members have forms of their own."""
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind in HOSTED:
            return {"type": kind}
        return value


def _input_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "#text"
    return "#items" if isinstance(value, list) else None


Input = Annotated[
    Annotated[str, Tag("#text")] | Annotated[Many[InputItem], Field(max_length=MAX_MESSAGES), Tag("#items")],
    by_kind(_input_kind, "a string or an array of items"),
]


class CustomFormat(Wire):
    """The form of a custom tool's input."""

    type: str = Field(description="`text` or `grammar`", examples=["text"])
    syntax: str | None = Field(None, description="of a grammar: `lark` or `regex`")
    definition: str | None = Field(None, description="the grammar, which is shown to the model and not enforced")


class ResponseTool(Wire):
    """A tool: `function`, `custom` or `namespace`. Hosted tools, which run on OpenAI's servers, are left out."""

    type: str = Field(description="kind of tool", examples=["function"])
    name: str | None = Field(None, description="its name", examples=["get_time"])
    description: str | None = Field(None, description="what it does")
    parameters: dict[str, Any] | None = Field(None, description="of a function: JSON schema of its arguments")
    strict: bool | None = Field(None, description=STRICT)
    format: CustomFormat | None = Field(None, description="of a custom tool")
    tools: Many[ResponseTool] | None = Field(None, description="of a namespace: its functions and custom tools")
    defer_loading: Any = Field(None, description=IGNORED + "; the tool is listed")


class ToolName(Wire):
    """One tool of an `allowed_tools` choice."""

    type: str = Field(description="kind of tool", examples=["function"])
    name: str | None = Field(None, description="its name", examples=["get_time"])
    namespace: str | None = Field(None, description="its namespace")


class FlatChoice(Wire):
    """A forced tool, or a list of allowed ones."""

    type: str = Field(description="`function`, `custom` or `allowed_tools`", examples=["function"])
    name: str | None = Field(None, description="of a function or custom tool: which one", examples=["get_time"])
    namespace: str | None = Field(None, description="its namespace")
    mode: Literal["auto", "required"] | None = Field(None, description="of allowed tools: whether a call is forced")
    tools: Many[ToolName] | None = Field(None, description="of allowed tools: which")


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#string")] | Annotated[FlatChoice, Tag("#object")],
    by_kind(string_or_object, "none, auto, required or an object that names a tool"),
]


class TextFormat(Wire):
    """What the answer's text must look like."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="kind of format", examples=["json_object"])
    name: str | None = Field(None, description="name of the schema", examples=["city"])
    description: str | None = Field(None, description="what it is for")
    schema_: Schema | None = Field(
        None, alias="schema", description="required for `json_schema`; the answer follows it"
    )
    strict: bool | None = Field(None, description="the schema is followed with and without it")


class TextOptions(Wire):
    """Options of the answer's text."""

    format: TextFormat | None = Field(None, description="its form; absent: any text")
    verbosity: Any = Field(None, description=IGNORED)


class ResponseStreamOptions(Wire):
    """Options of a stream."""

    include_obfuscation: bool | None = Field(None, description=IGNORED + ": nothing is added")


class BackgroundOptions(Wire):
    """Options of a background response."""

    completion_window: Annotated[Any, UnofferedField(("soonest",), "an answer begins as soon as there is room")] = None


class ResponsesRequest(SamplingFields):
    """Body of POST /v1/responses."""

    input: Input = Field(description="a text of the user's, or the conversation so far", examples=["Hello!"])
    instructions: str | None = Field(None, description="a system message before the input")
    tools: Many[ResponseTool] | None = Field(None, max_length=MAX_TOOLS, description="tools that the model may call")
    tool_choice: ResponseToolChoice | None = Field(None, description="whether and what is called", examples=["auto"])
    parallel_tool_calls: bool | None = Field(None, description="false: a forced call is a single one", examples=[True])
    text: TextOptions | None = Field(None, description="form of the answer's text")
    reasoning: ReasoningOptions | None = Field(None, description="how much the model should think")
    include: Many[str] | None = Field(
        None,
        description="`reasoning.encrypted_content`, `message.output_text.logprobs`; others have nothing to include",
        examples=[["reasoning.encrypted_content"]],
    )
    max_output_tokens: int | None = Field(
        None, ge=1, description="most tokens of the answer; absent: what fits the context", examples=[256]
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="alternatives a token; more than 0 asks for log probabilities"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the chat template", examples=[{"enable_thinking": False}]
    )
    stream_options: ResponseStreamOptions | None = Field(None, description="options of a stream")
    store: bool | None = Field(
        None, description="keep the response, so that it can be asked for; absent: as `--store-responses` says"
    )
    background: bool | None = Field(
        None, description="go on without the client, and over restarts of the server; only of stored responses"
    )
    background_options: BackgroundOptions | None = Field(None, description="options of a background response")
    previous_response_id: str | None = Field(
        None,
        description="a stored response that this one goes on from: its input and output come before `input`; its "
        "`instructions` don't",
        examples=["resp_0123456789abcdef01234567"],
    )
    conversation: Annotated[
        Any,
        UnofferedField(
            (),
            "`previous_response_id` goes on from a response",
            "`conversation` isn't offered; use `previous_response_id`",
        ),
    ] = None
    prompt: Annotated[Any, UnofferedField((), "there are no stored prompts")] = None
    truncation: Annotated[
        Any,
        UnofferedField(("disabled",), "it would drop what was said", "truncation isn't offered: nothing is dropped"),
    ] = None
    context_management: Annotated[Any, UnofferedField(([],), "the server doesn't compact")] = None
    moderation: Annotated[Any, UnofferedField((), "the server doesn't moderate")] = None
    metadata: dict[str, Any] | None = Field(None, description="comes back with the answer")
    max_tool_calls: Any = Field(None, description=IGNORED + ": it limits hosted tools")
    service_tier: Any = Field(None, description=IGNORED)
    safety_identifier: str | None = Field(None, description=LABEL)
    prompt_cache_key: str | None = Field(None, description=LABEL)
    prompt_cache_retention: Any = Field(None, description=IGNORED)
    prompt_cache_options: Any = Field(None, description=IGNORED)
    client_metadata: Any = Field(None, description=IGNORED)
    user: str | None = Field(None, description=LABEL)
    include_reasoning: Annotated[Any, UnofferedField((True,), "thoughts are items of their own")] = None
    skip_special_tokens: Annotated[Any, UnofferedField((True,))] = None
    include_stop_str_in_output: Annotated[Any, UnofferedField((False,))] = None
    previous_input_messages: Annotated[Any, UnofferedField(([],), "`input` has the whole conversation")] = None
    max_tokens: Annotated[Any, elsewhere("`max_output_tokens`")] = None
    max_completion_tokens: Annotated[Any, elsewhere("`max_output_tokens`")] = None
    response_format: Annotated[Any, elsewhere("`text.format`", {"type": "text"})] = None
    reasoning_effort: Annotated[Any, elsewhere("`reasoning.effort`")] = None
    logprobs: Annotated[Any, elsewhere("`top_logprobs`", False)] = None
    messages: Annotated[Any, elsewhere("`input`")] = None
    n: Annotated[Any, UnofferedField((1,), "a response is one answer")] = None
