"""The wire types: what a client may send.

Owns the shape, the bounds and the description of every request field; /openapi.json is made from it. Runs in the
server's worker thread (validation) and at start (the document). Never decides whether a well-formed request can be
fulfilled: that is `api/input/refusals.py`. It is longer than most modules because every field says here what it does.

Three rules hold everywhere: types are strict (`"hot"` is no temperature), null means absent, and an unknown member is
never an error, but kept aside so that it can be counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from server.errors import InvalidValue

MAX_STOPS = 4
MAX_MESSAGES = 32_768
MAX_BIAS = 100
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
INTEGERS = frozenset({
    "best_of", "logprobs", "max_completion_tokens", "max_tokens", "min_tokens", "n", "n_predict", "prompt_logprobs",
    "max_output_tokens", "seed", "top_k", "top_logprobs", "truncate_prompt_tokens",
})  # fmt: skip
IGNORED = "accepted and ignored: it can't change the answer"
STRICT = "a schema of which a forced call couldn't follow all is refused; else as much as can be is followed"


@dataclass(frozen=True, slots=True)
class UnofferedField:
    """Marks a known field that this server can't honour.

    Attributes:
        neutral: values that ask for nothing and are therefore let through; null always is.
        reason: why it isn't offered, for the documentation.
        refusal: the error's sentence; where it is empty, one with the field's name is made.
    """

    neutral: tuple[Any, ...] = ()
    reason: str = "it would change the answer"
    refusal: str = ""

    @property
    def description(self) -> str:
        allowed = "".join(f", but for {json.dumps(value)}" for value in self.neutral)
        return f"refused{allowed}: {self.reason}"

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(core) | {"description": self.description}


class Wire(BaseModel):
    """Any object that a client sends."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: v for k, v in value.items() if v is not None}
        return value


AUDIO = UnofferedField((), "text only", "Audio isn't offered")


def elsewhere(place: str, *neutral: Any) -> UnofferedField:
    """Marks a field that other routes have: `place` is what this one has for it."""
    return UnofferedField(neutral, f"use {place}", f"this route has another field for it; use {place}")


@cache
def unoffered(form: type[Wire]) -> Mapping[str, UnofferedField]:
    """The fields of `form` that ask for what isn't offered."""
    marks = ((name, mark) for name, info in form.model_fields.items() for mark in info.metadata)
    return {name: mark for name, mark in marks if isinstance(mark, UnofferedField)}


# ---------------------------------------------------------------- unions
# A union is decided by the JSON type first, so that an error names the branch that was meant. Tags begin with
# "#" and are left out of an error's path.
def content_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "#text"
    if isinstance(value, list):
        return "#parts"
    return None


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "#text"
    if not isinstance(value, list) or not value:
        return None
    if isinstance(value[0], str | list):
        return "#several"
    return "#ids"


def _one_prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "#text"
    if isinstance(value, list):
        return "#list"
    return None


def _pairs_as_object(value: Any) -> Any:
    """llama.cpp's form of a bias: pairs of id and weight, false for never."""
    if not isinstance(value, list) or not value:
        return value
    if not all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int for pair in value):
        return value
    return {str(token): -100 if weight is False else weight for token, weight in value}


def _first_wrong_weight(value: Any) -> Any:
    """A bias, or the first member of it that is none: pydantic would report all of them, and take memory for each."""
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        members = value.items()
    for token, weight in members:
        if type(weight) not in (int, float) or not -MAX_BIAS <= weight <= MAX_BIAS:
            return {token: weight}
    return value


def string_or_object(value: Any) -> str | None:
    if isinstance(value, str):
        return "#string"
    if isinstance(value, dict):
        return "#object"
    return None


def _object_or_bool(value: Any) -> str | None:
    if isinstance(value, dict):
        return "#object"
    if isinstance(value, bool):
        return "#bool"
    return None


def by_kind(kind: Any, wanted: str) -> Discriminator:
    return Discriminator(kind, custom_error_type="wrong_type", custom_error_message=f"Input should be {wanted}")


def _one_is_a_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    return value


def _not_zero(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("wrong_value", "Input should be -1 or at least 1")
    return value


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Item = TypeVar("Item")
Many = Annotated[
    list[Item], Field(fail_fast=True)
]  # only the first fault is reported, and a million of them take gigabytes
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(max_length=1024)]
Stop = Annotated[
    Many[StopString],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_one_is_a_list),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOPS}]}
    ),
]
OnePrompt = Annotated[
    Annotated[str, Tag("#text")] | Annotated[Many[TokenId], Field(min_length=1), Tag("#list")],
    by_kind(_one_prompt_kind, "a string or token ids"),
]
Prompt = Annotated[
    Annotated[str, Tag("#text")] | Annotated[Many[TokenId], Tag("#ids")] | Annotated[Many[OnePrompt], Tag("#several")],
    by_kind(_prompt_kind, "a string, strings, token ids or lists of token ids, and not an empty array"),
]
_WEIGHT = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
Bias = Annotated[
    dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    BeforeValidator(_first_wrong_weight),
    BeforeValidator(_pairs_as_object),  # the last one is the first to run
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": _WEIGHT},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "array",
                        "prefixItems": [{"type": "integer"}, {"anyOf": [_WEIGHT, {"const": False}]}],
                        "minItems": 2,
                        "maxItems": 2,
                    },
                },
            ]
        }
    ),
]


# ---------------------------------------------------------------- messages
class Part(Wire):
    """One part of a message's content."""

    type: str = Field(
        description="`text`, or `refusal` in what the assistant said; other kinds are refused", examples=["text"]
    )
    text: str | None = Field(None, description="the text of a text part", examples=["Hello!"])
    refusal: str | None = Field(None, description="the text of a refusal part", examples=["I can't help with that."])
    cache_control: Any = Field(None, description=IGNORED)


Content = Annotated[
    Annotated[str, Tag("#text")] | Annotated[Many[Part], Tag("#parts")],
    by_kind(content_kind, "a string or an array of content parts"),
]


Arguments = Annotated[
    Annotated[str, Tag("#string")] | Annotated[dict[str, Any], Tag("#object")],
    by_kind(string_or_object, "a string or an object"),
]


SchemaOrText = Annotated[
    Annotated[str, Tag("#string")] | Annotated[dict[str, Any], Tag("#object")],
    by_kind(string_or_object, "a JSON schema as an object or as text"),
]


Schema = Annotated[
    Annotated[dict[str, Any], Tag("#object")] | Annotated[bool, Tag("#bool")],
    by_kind(_object_or_bool, "a JSON schema as an object"),
]


class CalledFunction(Wire):
    """Which function an earlier answer called."""

    name: str = Field(description="name of the function", examples=["get_time"])
    arguments: Arguments = Field(
        "", description="arguments, usually as a JSON string; it need not parse", examples=['{"city": "Oslo"}']
    )


class CalledTool(Wire):
    """A tool call of an earlier answer."""

    id: str | None = Field(None, description="id that the tool's message refers to", examples=["call_1"])
    type: Literal["function"] = Field("function", description="`function`", examples=["function"])
    function: CalledFunction = Field(description="what was called")
    index: int | None = Field(None, description="place among the calls of a streamed answer; " + IGNORED)


class Message(Wire):
    """One turn of the conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"] = Field(
        description="who speaks; `developer` is `system`, `function` is the older name of `tool`", examples=["user"]
    )
    content: Content | None = Field(
        None, description="what is said; may be absent beside tool calls", examples=["What is the capital of France?"]
    )
    name: str | None = Field(None, description="name of the speaker, for templates that show it", examples=["Ada"])
    tool_calls: Many[CalledTool] | None = Field(None, description="calls that the assistant made")
    tool_call_id: str | None = Field(None, description="the call that a tool's message answers", examples=["call_1"])
    reasoning_content: str | None = Field(None, description="earlier reasoning, for templates that want it back")
    reasoning: str | None = Field(None, description="another name of `reasoning_content`")
    refusal: str | None = Field(None, description="the assistant's words when it refused; part of what it said")
    function_call: CalledFunction | None = Field(None, description="older form of one tool call of the assistant")
    audio: Annotated[Any, AUDIO] = None
    annotations: Any = Field(None, description=IGNORED)
    cache_control: Any = Field(None, description=IGNORED)


# ---------------------------------------------------------------- tools and formats
class Function(Wire):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="its name", examples=["get_time"])
    description: str | None = Field(None, description="what it does", examples=["Time in a city."])
    parameters: dict[str, Any] | None = Field(
        None,
        description="JSON schema of its arguments",
        examples=[{"type": "object", "properties": {"city": {"type": "string"}}}],
    )
    strict: bool | None = Field(None, description=STRICT)


class Tool(Wire):
    """A tool; only functions are offered."""

    type: str = Field(description="`function`; other kinds are refused", examples=["function"])
    function: Function | None = Field(None, description="the function")
    cache_control: Any = Field(None, description=IGNORED)


class NamedFunction(Wire):
    """The name of one function."""

    name: str = Field(description="name of a function in `tools`", examples=["get_time"])


class ToolReference(Wire):
    """A reference to one tool."""

    type: str = Field("function", description="`function`", examples=["function"])
    function: NamedFunction = Field(description="which function")


class AllowedTools(Wire):
    """A part of `tools`, and whether one of them must be called."""

    mode: Literal["auto", "required"] = Field(description="whether a call is forced", examples=["auto"])
    tools: Many[ToolReference] = Field(min_length=1, description="the tools that may be called")


class NamedChoice(Wire):
    """A forced tool, or a list of allowed ones."""

    type: str = Field(description="`function` or `allowed_tools`", examples=["function"])
    function: NamedFunction | None = Field(None, description="the function that must be called")
    allowed_tools: AllowedTools | None = Field(None, description="the tools that may be called")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#string")] | Annotated[NamedChoice, Tag("#object")],
    by_kind(string_or_object, "none, auto, required or an object that names a function"),
]


class JsonSchema(Wire):
    """A named JSON schema."""

    name: str | None = Field(None, description="name of the format", examples=["city"])
    description: str | None = Field(None, description="what it is for")
    schema_: Schema = Field(
        alias="schema", description="the JSON schema; the answer follows it", examples=[{"type": "object"}]
    )
    strict: bool | None = Field(None, description="the schema is followed with and without it")


class ResponseFormat(Wire):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="kind of format", examples=["json_object"])
    json_schema: JsonSchema | None = Field(None, description="required for `json_schema`")
    schema_: Schema | None = Field(None, alias="schema", description="a JSON schema, in llama.cpp's form")


Choices = Annotated[Many[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1000)]


class StructuredOutputs(Wire):
    """What the answer must look like, in vLLM's form; one of these."""

    json_: SchemaOrText | None = Field(None, alias="json", description="JSON schema, as an object or as text")
    json_object: bool | None = Field(None, description="any JSON object")
    regex: str | None = Field(None, description="regular expression", examples=["[0-9]{4}"])
    choice: Choices | None = Field(None, description="the answer is one of these", examples=[["yes", "no"]])
    grammar: str | None = Field(None, description="grammar in GBNF or Lark")


class StreamOptions(Wire):
    """What a stream says besides its text."""

    include_usage: bool | None = Field(None, description="one last chunk carries the usage", examples=[True])
    continuous_usage_stats: bool | None = Field(
        None, description="with `include_usage`: every chunk says the usage so far"
    )
    include_obfuscation: bool | None = Field(None, description=IGNORED)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningOptions(Wire):
    """How much the model should think."""

    effort: Effort | None = Field(None, description="as `reasoning_effort`", examples=["low"])
    enabled: bool | None = Field(
        None, description="false: as the effort `none`; true: as `medium`, unless an effort is named", examples=[True]
    )
    exclude: bool | None = Field(None, description="true: as `include_reasoning: false`", examples=[False])
    max_tokens: Annotated[Any, UnofferedField()] = None
    summary: Any = Field(None, description=IGNORED + "; reasoning comes whole")

    @property
    def asked_effort(self) -> Effort | None:
        """The effort, in whichever form the client said it."""
        return self.effort or effort_of(self.enabled)


def effort_of(enabled: bool | None) -> Effort | None:
    """The effort that a switch stands for; None where it isn't set."""
    if enabled is None:
        return None
    if enabled:
        return "medium"
    return "none"


class ThinkingOptions(Wire):
    """Whether the model may think first, as Anthropic's and some other servers' requests say it."""

    type: Literal["enabled", "adaptive", "disabled"] = Field(
        description="`enabled` and `adaptive`: for templates that can switch thinking, on", examples=["adaptive"]
    )
    budget_tokens: Any = Field(None, description="accepted and ignored: only `max_tokens` ends an answer")
    display: Any = Field(None, description="accepted and ignored: thoughts are always shown")

    @property
    def enabled(self) -> bool | None:
        """None where it is left to the model."""
        return {"enabled": True, "disabled": False}.get(self.type)


# ---------------------------------------------------------------- requests
# Fields that Anthropic's Messages have under the same names.
TEMPERATURE: Any = Field(
    None, ge=0, le=2, description="0 is greedy; absent: the model's own default, else 1", examples=[0.7]
)
TOP_P: Any = Field(None, ge=0, le=1, description="share of probability kept; 0 is greedy; absent: the model's, else 1")
TOP_K: Any = Field(None, ge=-1, description="number of candidates kept; 0 or -1: all", examples=[40])


class SamplingFields(Wire):
    """How the tokens of an answer are drawn, whatever the protocol."""

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, data: Any) -> Any:
        """In JSON a number without a fraction is an integer, however it is spelled; in lists of token ids, of which
        there may be many thousands, it must be spelled as one."""
        if not isinstance(data, dict):
            return data
        return {name: _whole(value) if name in INTEGERS else value for name, value in data.items()}

    model: str | None = Field(
        None, description="id of the served model, one of its aliases, or `default`", examples=["default"]
    )
    temperature: float | None = TEMPERATURE
    top_p: float | None = TOP_P
    top_k: int | None = TOP_K
    min_p: float | None = Field(
        None, ge=0, le=1, description="candidates below this share of the best one's probability are dropped"
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="for each token that the answer has used")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="for each time that a token was used")
    repetition_penalty: float | None = Field(
        None, gt=0, le=10, description="divides the logits of tokens in prompt and answer; 1: none", examples=[1.1]
    )
    repeat_penalty: float | None = Field(
        None, gt=0, le=10, description="llama.cpp's name of `repetition_penalty`, which goes before it"
    )
    logit_bias: Bias | None = Field(
        None, description="token id to a number that is added to its logit", examples=[{"260": -5}]
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        le=2**63 - 1,
        description="repeats the draw whatever else runs; absent or -1: a new one each time",
        examples=[1],
    )
    stop: Stop | None = Field(None, description="strings that end the answer and aren't part of it", examples=[["\n"]])
    stop_token_ids: Many[TokenId] | None = Field(None, description="further token ids that end the answer")
    ignore_eos: bool | None = Field(None, description="go on at the model's own end tokens", examples=[False])
    structured_outputs: StructuredOutputs | None = Field(None, description="form of the answer, as vLLM has it")
    stream: bool | None = Field(None, description="send the answer as server-sent events", examples=[False])


class GenerationRequest(SamplingFields):
    """What chat and text completions have in common."""

    n_predict: Annotated[int, Field(ge=-1), AfterValidator(_not_zero)] | None = Field(
        None, description="most tokens of the answer, in llama.cpp's words; -1: what fits the context"
    )
    allowed_token_ids: Annotated[Many[TokenId], Field(min_length=1)] | None = Field(
        None, description="no other token is drawn; not beside a form of the answer or a forced call"
    )
    min_tokens: int | None = Field(None, ge=0, description="no end token is drawn before so many tokens")
    n: int | None = Field(None, ge=1, le=128, description="number of answers, each with its own draws", examples=[1])
    stream_options: StreamOptions | None = Field(None, description="only with `stream: true`")
    response_format: ResponseFormat | None = Field(None, description="text, any JSON object, or a JSON schema")
    guided_json: SchemaOrText | None = Field(None, description="older name of `structured_outputs.json`")
    guided_regex: str | None = Field(None, description="older name of `structured_outputs.regex`")
    guided_choice: Choices | None = Field(None, description="older name of `structured_outputs.choice`")
    guided_grammar: str | None = Field(None, description="older name of `structured_outputs.grammar`")
    json_schema: SchemaOrText | None = Field(None, description="JSON schema of the answer, as llama.cpp has it")
    grammar: str | None = Field(None, description="grammar of the answer in GBNF or Lark, as llama.cpp has it")
    regex: str | None = Field(None, description="SGLang's name of `structured_outputs.regex`")
    ebnf: str | None = Field(None, description="SGLang's name of `structured_outputs.grammar`")
    skip_special_tokens: bool | None = Field(
        None, description="false: special tokens that the answer draws are shown", examples=[True]
    )
    return_token_ids: bool | None = Field(
        None, description="the answer says the ids of prompt and answer", examples=[True]
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="log probabilities name tokens `token_id:5` instead of spelling them"
    )
    logprob_token_ids: Annotated[Many[TokenId], Field(max_length=128)] | None = Field(
        None, description="with `logprobs`: each token's alternatives are these ids and the drawn one"
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="log probabilities of the prompt, with so many alternatives a token",
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), AfterValidator(_not_zero)] | None = Field(
        None, description="so many tokens of the prompt are kept; -1: as many as leave room for the answer"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="where tokens go when a prompt is truncated; absent: left, its beginning"
    )
    timings_per_token: bool | None = Field(
        None, description="how long prompt and answer have taken, in every chunk and in the plain answer"
    )
    use_beam_search: bool | None = Field(None, description="refused when true: answers are drawn")
    bad_words: Annotated[Any, UnofferedField(([],))] = None
    include_stop_str_in_output: Annotated[Any, UnofferedField((False,))] = None
    thinking_token_budget: Annotated[Any, UnofferedField()] = None
    mirostat: Annotated[Any, UnofferedField((0,))] = None
    typical_p: Annotated[Any, UnofferedField((1,))] = None
    top_n_sigma: Annotated[Any, UnofferedField((-1, 0))] = None
    xtc_probability: Annotated[Any, UnofferedField((0,))] = None
    dry_multiplier: Annotated[Any, UnofferedField((0,))] = None
    dynatemp_range: Annotated[Any, UnofferedField((0,))] = None
    repetition_detection: Annotated[Any, UnofferedField()] = None
    stop_regex: Annotated[Any, UnofferedField(("", []))] = None
    no_stop_trim: Annotated[Any, UnofferedField((False,))] = None
    post_sampling_probs: Annotated[Any, UnofferedField((False,))] = None
    t_max_predict_ms: Annotated[Any, UnofferedField((-1, 0))] = None
    lora: Annotated[Any, UnofferedField(([],))] = None
    lora_path: Annotated[Any, UnofferedField()] = None
    user: Any = Field(None, description=IGNORED)

    @property
    def shows_special(self) -> bool:
        """Whether the answer's text shows special tokens."""
        return self.skip_special_tokens is False


def generation(fields: SamplingFields) -> GenerationRequest:
    """A protocol's own sampling fields as the core has them; everything else is left open."""
    return GenerationRequest.model_construct(
        **{name: getattr(fields, name) for name in SamplingFields.model_fields if getattr(fields, name) is not None}
    )


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Many[Message] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="the conversation so far, oldest first"
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, description="most tokens of the answer; absent: what fits the context", examples=[256]
    )
    max_tokens: int | None = Field(None, ge=1, description="older name of `max_completion_tokens`", examples=[256])
    logprobs: bool | None = Field(None, description="report each token's log probability", examples=[True])
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="alternatives a token; only with `logprobs`", examples=[2]
    )
    tools: Many[Tool] | None = Field(None, max_length=128, description="functions that the model may call")
    tool_choice: ToolChoice | None = Field(
        None, description="whether and what is called; absent: auto", examples=["auto"]
    )
    parallel_tool_calls: bool | None = Field(None, description="false: a forced call is a single one", examples=[True])
    reasoning_effort: Effort | None = Field(None, description="handed to templates that know it", examples=["low"])
    reasoning: ReasoningOptions | None = Field(
        None, description="other forms of `reasoning_effort` and `include_reasoning`"
    )
    thinking: ThinkingOptions | None = Field(
        None, description="as `reasoning.enabled`; `adaptive` leaves it to the template"
    )
    enable_thinking: bool | None = Field(None, description="as `reasoning.enabled`", examples=[False])
    include_reasoning: bool | None = Field(None, description="false: the answer comes without its reasoning")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the chat template", examples=[{"enable_thinking": False}]
    )
    continue_final_message: bool | None = Field(
        None, description="go on with the last message instead of beginning a new one", examples=[False]
    )
    add_generation_prompt: bool | None = Field(
        None, description="begin a new answer; absent: unless `continue_final_message`", examples=[True]
    )
    echo: bool | None = Field(
        None, description="the answer begins with the last message, if that is the assistant's", examples=[False]
    )
    add_special_tokens: Annotated[Any, UnofferedField((False,), "templates write the begin token themselves")] = None
    chat_template: Annotated[Any, UnofferedField(reason="the template is the model's")] = None
    documents: Annotated[Any, UnofferedField(([],), "`chat_template_kwargs` reach the template")] = None
    parse_tool_calls: Annotated[Any, UnofferedField((True,))] = None
    reasoning_format: Annotated[Any, UnofferedField(("auto", "deepseek"), "reasoning always comes apart")] = None
    separate_reasoning: Annotated[Any, UnofferedField((True,), "reasoning always comes apart")] = None
    verbose: bool | None = Field(
        None, description="the answer has its prompt's text as `__verbose.prompt`, as llama.cpp's does"
    )
    modalities: Many[str] | None = Field(None, description="only `text`", examples=[["text"]])
    audio: Annotated[Any, AUDIO] = None
    web_search_options: Annotated[Any, UnofferedField((), "the server doesn't search", "Web search isn't offered")] = (
        None
    )
    moderation: Annotated[Any, UnofferedField((), "the server doesn't moderate", "Moderation isn't offered")] = None
    functions: Annotated[Any, UnofferedField(([],), "use `tools`", "`functions` isn't offered; use `tools`")] = None
    function_call: Annotated[
        Any, UnofferedField(("none", "auto"), "use `tool_choice`", "`function_call` isn't offered; use `tool_choice`")
    ] = None
    store: Any = Field(
        None, description="true: the answer is kept and goes on without its client; else nothing is stored"
    )
    metadata: Any = Field(None, description="with `store`: up to 16 texts that the answer is kept with")
    service_tier: Any = Field(None, description=IGNORED)
    safety_identifier: Any = Field(None, description=IGNORED)
    prompt_cache_key: Any = Field(None, description=IGNORED)
    prompt_cache_retention: Any = Field(None, description=IGNORED)
    prompt_cache_options: Any = Field(None, description=IGNORED)
    verbosity: Any = Field(None, description=IGNORED)
    prediction: Any = Field(None, description=IGNORED)

    @property
    def effort(self) -> Effort | None:
        """How much the model should think, in whichever form the client said it."""
        if self.reasoning_effort is not None:
            return self.reasoning_effort
        if self.reasoning is not None and self.reasoning.effort is not None:
            return self.reasoning.effort
        return next(map(effort_of, self.switches.values()), None)

    @property
    def switches(self) -> dict[str, bool]:
        """Whether the model should think, by the fields that say so."""
        asked = {"enable_thinking": self.enable_thinking}
        if self.thinking is not None:
            asked["thinking.type"] = self.thinking.enabled
        if self.reasoning is not None:
            asked["reasoning.enabled"] = self.reasoning.enabled
        return {name: enabled for name, enabled in asked.items() if enabled is not None}

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer comes with its reasoning."""
        excluded = self.reasoning is not None and self.reasoning.exclude is True
        return self.include_reasoning is not False and not excluded


class MetadataRequest(Wire):
    """Body of POST /v1/chat/completions/{id}."""

    metadata: dict[str, Any] | None = Field(None, description="up to 16 texts; they replace those there were")


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompt = Field(description="text or token ids, one or several", examples=["Once upon a time"])
    max_tokens: int | None = Field(
        None, ge=0, description="most tokens of the answer; absent: 16; 0 only with `echo`", examples=[16]
    )
    echo: bool | None = Field(None, description="the prompt precedes the answer", examples=[False])
    logprobs: int | None = Field(
        None, ge=0, le=MAX_COMPLETION_LOGPROBS, description="alternatives reported with each token", examples=[2]
    )
    add_special_tokens: bool | None = Field(
        None, description="false: a text comes without the model's begin token", examples=[True]
    )
    best_of: int | None = Field(None, ge=0, le=20, description="only up to 1")
    prompt_embeds: Any = Field(None, description="refused: a prompt is text or token ids")
    suffix: str | None = Field(None, description="only empty: the server doesn't fill in", examples=[""])
    max_completion_tokens: Annotated[Any, elsewhere("`max_tokens`")] = None
    top_logprobs: Annotated[Any, elsewhere("`logprobs`", 0)] = None
    tools: Annotated[Any, elsewhere("/v1/chat/completions", [])] = None
    messages: Annotated[Any, elsewhere("/v1/chat/completions")] = None

    @model_validator(mode="before")
    @classmethod
    def _something_to_begin_with(cls, data: Any) -> Any:
        if isinstance(data, dict) and "prompt_embeds" in data and data.get("prompt") is None:
            message = "Either prompt or prompt_embeds must be provided and non-empty. Here the prompt must be"
            raise InvalidValue(message, param="prompt")
        return data


class Rendering(Wire):
    """How messages become a prompt, where nothing is generated from it."""

    tools: Many[Tool] | None = Field(None, description="tools, for the template")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the chat template")
    continue_final_message: bool | None = Field(None, description="as in a chat")
    add_generation_prompt: bool | None = Field(None, description="as in a chat")


class TokenizeRequest(Rendering):
    """Body of POST /tokenize, in either of two customary forms: `content`, or `prompt` or `messages`."""

    content: str | None = Field(None, description="text to tokenize (llama.cpp's form)", examples=["Hello!"])
    add_special: bool | None = Field(None, description="with the model's begin token; absent: false")
    with_pieces: bool | None = Field(None, description="say the text of each token", examples=[True])
    model: str | None = Field(None, description="the served model", examples=["default"])
    prompt: str | None = Field(None, description="text to tokenize (vLLM's form)", examples=["Hello!"])
    messages: Many[Message] | None = Field(
        None, min_length=1, max_length=MAX_MESSAGES, description="conversation to render and tokenize"
    )
    add_special_tokens: bool | None = Field(None, description="with the model's begin token; absent: with `prompt`")
    return_token_strs: bool | None = Field(None, description="say the text of each token")


class TemplateRequest(Rendering):
    """Body of POST /apply-template."""

    model: str | None = Field(None, description="the served model", examples=["default"])
    messages: Many[Message] = Field(min_length=1, max_length=MAX_MESSAGES, description="conversation to render")


class DetokenizeRequest(Wire):
    """Body of POST /detokenize."""

    model: str | None = Field(None, description="the served model", examples=["default"])
    tokens: Many[TokenId] = Field(description="token ids", examples=[[1, 2, 3]])


# ---------------------------------------------------------------- errors
def path_of(loc: tuple[str | int, ...]) -> str:
    """`("messages", 0, "content", "#parts", 1)` → `messages[0].content[1]`."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("#"):
            path += f".{part}" if path else part
    return path


def refusal(error: ValidationError) -> InvalidValue:
    """The first fault that pydantic found, as our own error."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = path_of(first["loc"])
    message = "Input should be an object"
    if first["type"] != "model_type":
        message = first["msg"]
    message = message.replace(" after validation", "")
    if first["type"].startswith(("greater_than", "less_than")):
        message += f" ({first['type']})"  # by which vLLM's clients know a bound
    return InvalidValue(f"{path}: {message}" if path else message, param=path or None)
