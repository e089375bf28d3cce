"""Which well-formed requests can't be fulfilled.

Owns the refusals of `docs/api.md`: a known field that asks for something that isn't offered is refused by name, never
ignored. Runs in the server's worker thread; pure functions. A field's type and range are the schema's business.
"""

from __future__ import annotations

from collections.abc import Iterable

from server.api.input.response_format import check_size
from server.api.input.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    Part,
    SamplingFields,
    Tool,
    Wire,
    unoffered,
)
from server.errors import InvalidValue, UnsupportedParameter
from server.settings import Settings

MAX_DIGITS = 20  # of a token id
ASSISTANTS = ("tool_calls", "function_call", "refusal", "reasoning_content", "reasoning")


def check_chat(request: ChatRequest, settings: Settings) -> None:
    """Raises for the first option of a chat request that can't be fulfilled."""
    _check_common(request, settings)
    if any(kind != "text" for kind in request.modalities or []):
        raise UnsupportedParameter("Only the modality `text` is offered", param="modalities")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidValue("top_logprobs needs `logprobs: true`", param="top_logprobs")
    if request.continue_final_message and request.add_generation_prompt:
        message = "add_generation_prompt begins a new answer; continue_final_message goes on with the last one"
        raise InvalidValue(message, param="add_generation_prompt")
    _check_reasoning(request)
    check_messages(request.messages)
    check_tools(request.tools or [], settings)


def check_completion(request: CompletionRequest, settings: Settings) -> None:
    """Raises for the first option of a completion request that can't be fulfilled."""
    _check_common(request, settings)
    if (request.best_of or 0) > 1:
        raise UnsupportedParameter("best_of beyond 1 isn't offered; use `n`", param="best_of")
    if request.prompt_embeds:
        raise UnsupportedParameter("Embeddings as a prompt aren't offered", param="prompt_embeds")
    if request.suffix:
        raise UnsupportedParameter("Filling in before a suffix isn't offered", param="suffix")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidValue("max_tokens must be at least 1 unless `echo` is true", param="max_tokens")
    if isinstance(request.prompt, list) and isinstance(request.prompt[0], str | list):
        _at_most(settings.max_choices, len(request.prompt), "prompt", "prompts")


def _check_common(request: GenerationRequest, settings: Settings) -> None:
    _at_most(settings.max_choices, request.n or 1, "n", "answers")
    if request.use_beam_search:
        raise UnsupportedParameter("Beam search isn't offered", param="use_beam_search")
    check_unoffered(request)
    if request.stream_options is not None and not request.stream:
        raise InvalidValue("stream_options needs `stream: true`", param="stream_options")
    if request.logprob_token_ids and getattr(request, "logprobs", None) in (None, False):
        raise InvalidValue("logprob_token_ids needs `logprobs`", param="logprob_token_ids")
    if request.stream and request.prompt_logprobs is not None:
        raise UnsupportedParameter("prompt_logprobs aren't offered in streams", param="prompt_logprobs")
    check_bias(request)


def check_bias(request: SamplingFields) -> None:
    """Raises for keys of logit_bias that are no token ids."""
    if wrong := [key[:50] for key in request.logit_bias or {} if not _is_id(key)]:
        raise InvalidValue(f"logit_bias: {', '.join(map(repr, wrong[:20]))}: no token id", param="logit_bias")


def check_unoffered(asked: Wire, path: str = "") -> None:
    """Raises for a field of `asked`, an object at `path`, that asks for what this server doesn't do."""
    for name, mark in unoffered(type(asked)).items():
        value = getattr(asked, name)
        if value is not None and value not in mark.neutral:
            raise UnsupportedParameter(mark.refusal or f"`{path}{name}` isn't offered", param=path + name)


def _check_reasoning(request: ChatRequest) -> None:
    """Raises for a budget, and for reasoning that is switched one way and measured the other."""
    if request.reasoning is not None:
        check_unoffered(request.reasoning, "reasoning.")
    for name, enabled in request.switches.items():
        if enabled == (request.effort == "none"):
            message = f"{name}: {str(enabled).lower()} contradicts the effort {request.effort!r}"
            raise InvalidValue(message, param=name)


def _is_id(key: str) -> bool:
    """Digits, and few enough for any number of 64 bits; Python refuses to read thousands of them."""
    return key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS


def _at_most(limit: int, asked: int, param: str, what: str) -> None:
    if asked > limit:
        raise UnsupportedParameter(f"{param}: this server gives at most {limit} {what} a request", param=param)


# ---------------------------------------------------------------- messages
def check_messages(messages: Iterable[Message]) -> None:
    """Raises for a part that isn't text, for a turn that lacks what its role needs, and for one that has what its role
    can't have."""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        check_unoffered(message, f"{where}.")
        if message.role == "tool" and message.tool_call_id is None:
            raise InvalidValue("A tool's message needs tool_call_id", param=f"{where}.tool_call_id")
        if message.content is None and message.role in {"system", "developer", "user"}:
            raise InvalidValue(f"A message of role {message.role} needs content", param=f"{where}.content")
        if message.function_call is not None and message.tool_calls:
            raise InvalidValue("function_call is an older form of tool_calls; send one", param=f"{where}.function_call")
        _check_role(message, where)
        for number, part in enumerate(message.content if isinstance(message.content, list) else []):
            _check_part(part, message.role, f"{where}.content[{number}]")


def _check_role(message: Message, where: str) -> None:
    """Raises for a member that only the assistant's messages may have: a template would leave it out."""
    if message.role != "assistant" and (name := next((n for n in ASSISTANTS if getattr(message, n)), None)):
        raise InvalidValue(f"Only a message of role assistant may have {name}", param=f"{where}.{name}")


def _check_part(part: Part, role: str, place: str) -> None:
    if part.type not in {"text", "refusal"}:
        raise UnsupportedParameter(f"{place}: parts of type {part.type[:50]!r} aren't offered", param=place)
    if part.type == "refusal" and role != "assistant":
        raise InvalidValue(f"{place}: only a message of role assistant may have a refusal", param=place)
    if getattr(part, part.type) is None:
        raise InvalidValue(f"{place}: a {part.type} part needs {part.type}", param=f"{place}.{part.type}")


# ---------------------------------------------------------------- tools
def check_tools(tools: list[Tool], settings: Settings) -> None:
    """Raises for tools that aren't functions, share a name, or have too large a schema."""
    seen = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise UnsupportedParameter(f"{where}: tools of type {tool.type[:50]!r} aren't offered", param=where)
        if tool.function is None:
            raise InvalidValue(f"{where}: a function tool needs `function`", param=f"{where}.function")
        if tool.function.name in seen:
            raise InvalidValue(f"{where}: there are two functions {tool.function.name!r}", param=where)
        seen.add(tool.function.name)
        check_size(tool.function.parameters, settings, f"{where}.function.parameters")
