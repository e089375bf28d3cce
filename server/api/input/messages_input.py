"""Requests of the Messages API → messages and tools in the words of the core.

Owns what becomes of each kind of content block: results of calls come before what the user says in the same turn,
system texts stay where they are, the definition of a deferred tool is written where a result refers to it. Runs in the
server's worker thread; pure. Never drops what was said without a line in the log: what can't be expressed is refused
with its place.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.api.input.messages_schema import (
    BlocksOrText,
    ContentBlock,
    InputMessage,
    MessagesPrompt,
    ToolDefinition,
    TypedToolChoice,
)
from server.api.input.response_format import check_size
from server.api.input.tools import CallChoice, OfferedTool, ToolOptions, options
from server.errors import InvalidValue, UnsupportedParameter
from server.settings import Settings
from server.text.templates.turn import Message

BILLING = "x-anthropic-billing-header:"  # a line for Anthropic's servers that leads the system text, and may change
FAILED = "Error: "  # before the result of a call that failed
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")

log = logging.getLogger("marathon.api")
Definitions = Mapping[str, Mapping[str, Any]]  # of the tools, by their names


# ---------------------------------------------------------------- tools
def tools(request: MessagesPrompt, settings: Settings) -> ToolOptions:
    """Raises for tools that share a name, and for a choice that they don't allow."""
    offered: dict[str, OfferedTool] = {}
    skipped: set[str] = set()
    for index, tool in enumerate(request.tools or []):
        if tool.type not in (None, "custom"):
            skipped.add(str(tool.type)[:50])
            continue
        made = _offered(tool, f"tools[{index}]")
        if made.name in offered:
            raise InvalidValue(f"tools[{index}]: there are two tools {made.name!r}", param=f"tools[{index}].name")
        check_size(tool.input_schema, settings, made.param)
        offered[made.name] = made
    if skipped:
        log.info("tools of Anthropic's servers are left out: %s", ", ".join(sorted(skipped)))
    return options(list(offered.values()), _choice(request.tool_choice))


def _offered(tool: ToolDefinition, where: str) -> OfferedTool:
    if not _NAME.fullmatch(tool.name):
        raise InvalidValue(f"{where}: a tool's name has 1 to 128 letters, digits, _ and -", param=f"{where}.name")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.input_schema is not None:
        function["parameters"] = tool.input_schema
    return OfferedTool(
        function, f"{where}.input_schema", deferred=tool.defer_loading is True, strict=tool.strict is True
    )


def _choice(choice: TypedToolChoice | None) -> CallChoice:
    if choice is None:
        return CallChoice()
    several = choice.disable_parallel_tool_use is not True
    if choice.type == "any":
        return CallChoice("required", several=several)
    if choice.type != "tool":
        return CallChoice(choice.type, several=several)
    if choice.name is None:
        raise InvalidValue("tool_choice: type tool needs name", param="tool_choice.name")
    return CallChoice("required", {choice.name}, False, "tool_choice.name")


# ---------------------------------------------------------------- messages
def messages(request: MessagesPrompt) -> list[Message]:
    """The conversation, oldest first. Raises for a block that lacks what its kind needs, or shows what isn't text."""
    definitions = {
        tool.name: _offered(tool, f"tools[{index}]").declaration
        for index, tool in enumerate(request.tools or [])
        if tool.type in (None, "custom")
    }
    made: list[Message] = []
    if opening := _system(request.system):
        made.append({"role": "system", "content": opening})
    for index, message in enumerate(request.messages):
        made += _turn(message, f"messages[{index}].content", definitions)
    if made[-1].get("tool_calls"):
        raise InvalidValue("The last message calls tools; their results are missing", param="messages")
    return made


def _system(system: BlocksOrText | None) -> str:
    """Without the line for billing: where it changes, nothing behind it would be found in the cache."""
    blocks: Sequence[ContentBlock] = ()
    texts = []
    if isinstance(system, str):
        texts = [system]
    elif system:
        blocks = system
        texts = [_text(block, f"system[{n}]") for n, block in enumerate(blocks)]
    if texts and texts[0].startswith(BILLING):
        texts[0] = texts[0].partition("\n")[2]
    return "\n".join(text for text in texts if text)


def _turn(message: InputMessage, where: str, definitions: Definitions) -> list[Message]:
    content = message.content
    if isinstance(content, str):
        return [{"role": message.role, "content": content}]
    blocks = [(block, f"{where}[{number}]") for number, block in enumerate(content)]
    if message.role == "assistant":
        return [_assistants(blocks)]
    if message.role == "system":
        return [{"role": "system", "content": _joined(blocks)}]
    results = [_result(block, place, definitions) for block, place in blocks if block.type == "tool_result"]
    said = [(block, place) for block, place in blocks if block.type != "tool_result"]
    if said or not results:
        results.append({"role": "user", "content": _joined(said)})
    return results


def _joined(blocks: Iterable[tuple[ContentBlock, str]]) -> str:
    return "\n".join([_text(block, place) for block, place in blocks])


def _text(block: ContentBlock, where: str) -> str:
    if block.type != "text":
        raise UnsupportedParameter(f"{where}: blocks of type {block.type[:50]!r} aren't offered here", param=where)
    return str(_needed(block.text, "text", block, where))


def _needed(value: Any, name: str, block: ContentBlock, where: str) -> Any:
    if value is None:
        raise InvalidValue(f"{where}: a block of type {block.type[:50]} needs {name}", param=f"{where}.{name}")
    return value


def _assistants(blocks: Iterable[tuple[ContentBlock, str]]) -> Message:
    """Thoughts, texts and calls as one message; the model wrote nothing between its texts."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for block, where in blocks:
        if block.type == "thinking":
            thoughts.append(_needed(block.thinking, "thinking", block, where))
        elif block.type == "tool_use":
            calls.append(_call(block, where))
        elif block.type != "redacted_thinking":
            texts.append(_text(block, where))
    made: Message = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        made["reasoning_content"] = "\n\n".join(filter(None, thoughts))
    if calls:
        made["tool_calls"] = calls
    return made


def _call(block: ContentBlock, where: str) -> Message:
    arguments = json.dumps(_needed(block.input, "input", block, where), ensure_ascii=False)
    function = {"name": _needed(block.name, "name", block, where), "arguments": arguments}
    return {"id": _needed(block.id, "id", block, where), "type": "function", "function": function}


def _result(block: ContentBlock, where: str, definitions: Definitions) -> Message:
    content = block.content or ""
    if not isinstance(content, str):
        parts = [_result_part(part, f"{where}.content[{n}]", definitions) for n, part in enumerate(content)]
        content = "\n".join(parts)
    if block.is_error:
        content = FAILED + content
    return {"role": "tool", "tool_call_id": _needed(block.tool_use_id, "tool_use_id", block, where), "content": content}


def _result_part(part: ContentBlock, where: str, definitions: Definitions) -> str:
    """A text, or the definition of a tool that is listed nowhere else."""
    if part.type != "tool_reference":
        return _text(part, where)
    name = _needed(part.tool_name, "tool_name", part, where)
    return json.dumps(definitions.get(name) or {"name": name}, ensure_ascii=False)
