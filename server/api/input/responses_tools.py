"""Tools of the Responses API: what the model is offered for them, and how a call gets its kind back.

Owns the way there and back: a custom tool is offered as a function of one text, a namespace's tools under longer names;
a call in the answer becomes an item of the kind that the client declared. Runs in the server's worker thread (there)
and on the event loop (back); pure.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.api.input.response_format import check_size
from server.api.input.responses_input import qualified
from server.api.input.responses_schema import CustomFormat, FlatChoice, ResponsesRequest, ResponseTool, ToolName
from server.api.input.tools import CallChoice, OfferedTool, ToolOptions, options
from server.errors import InvalidValue, UnsupportedParameter
from server.settings import Settings

FUNCTION = "function"
CUSTOM = "custom"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}

log = logging.getLogger("marathon.api")


@dataclass(frozen=True, slots=True)
class ToolIdentity:
    """A tool as the client declared it."""

    kind: str
    name: str
    namespace: str | None = None


Identities = Mapping[str, ToolIdentity]  # by the name that the model has for a tool


def read(request: ResponsesRequest, settings: Settings) -> tuple[ToolOptions, Identities]:
    """Raises for tools that lack a name or share one, and for a choice that they don't allow."""
    offered: list[OfferedTool] = []
    identities: dict[str, ToolIdentity] = {}
    hosted: set[str] = set()
    for tool, namespace, where in _flat(request.tools or [], None, "tools"):
        if tool.type not in (FUNCTION, CUSTOM):
            hosted.add(tool.type[:50])
            continue
        made = _offered(tool, namespace, where)
        if made.name in identities:
            raise InvalidValue(f"{where}: there are two tools {made.name!r}", param=where)
        check_size(tool.parameters, settings, made.param)
        identities[made.name] = ToolIdentity(tool.type, tool.name or "", namespace)
        offered.append(made)
    if hosted:
        log.info("hosted tools are left out, for they run on no server but OpenAI's: %s", ", ".join(sorted(hosted)))
    return options(offered, _choice(request, identities)), identities


def _flat(
    tools: Sequence[ResponseTool], namespace: str | None, where: str
) -> Iterator[tuple[ResponseTool, str | None, str]]:
    """Each tool with its namespace and its place."""
    for index, tool in enumerate(tools):
        place = f"{where}[{index}]"
        if tool.type == "namespace" and namespace is None:
            yield from _flat(tool.tools or [], _name(tool, place), f"{place}.tools")
        else:
            yield tool, namespace, place


def _name(tool: ResponseTool, where: str) -> str:
    if tool.name is None or not _NAME.fullmatch(tool.name):
        raise InvalidValue(f"{where}: a tool's name has 1 to 128 letters, digits, _ and -", param=f"{where}.name")
    return tool.name


def _offered(tool: ResponseTool, namespace: str | None, where: str) -> OfferedTool:
    function: dict[str, Any] = {"name": qualified(_name(tool, where), namespace)}
    description = tool.description or ""
    if tool.type == CUSTOM:
        description = "\n\n".join(filter(None, (description, _grammar(tool.format))))
    if description:
        function["description"] = description
    if tool.type == CUSTOM:
        function["parameters"] = _INPUT
    elif tool.parameters is not None:
        function["parameters"] = tool.parameters
    return OfferedTool(function, f"{where}.parameters", strict=tool.strict is True)


def _grammar(form: CustomFormat | None) -> str:
    """Describe the form of a custom tool's input to the model."""
    if form is None or not form.definition:
        return ""
    return f"`input` follows this grammar ({form.syntax or 'lark'}):\n{form.definition}"


# ---------------------------------------------------------------- the choice
def _choice(request: ResponsesRequest, identities: Identities) -> CallChoice:
    several = request.parallel_tool_calls is not False
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return CallChoice(choice or "auto", several=several)
    if choice.type == "allowed_tools":
        return CallChoice(choice.mode or "auto", _allowed(choice, identities), several, "tool_choice.tools")
    if choice.type not in (FUNCTION, CUSTOM):
        message = f"tool_choice: type {choice.type[:50]!r} isn't offered"
        raise UnsupportedParameter(message, param="tool_choice.type")
    return CallChoice("required", {_chosen(choice, identities, "tool_choice")}, False, "tool_choice.name")


def _allowed(choice: FlatChoice, identities: Identities) -> set[str]:
    named = enumerate(choice.tools or [])
    ours = [(tool, f"tool_choice.tools[{n}]") for n, tool in named if tool.type in (FUNCTION, CUSTOM)]
    if not ours:
        raise InvalidValue("tool_choice.tools: one function or custom tool is needed", param="tool_choice.tools")
    return {_chosen(tool, identities, where) for tool, where in ours}


def _chosen(choice: FlatChoice | ToolName, identities: Identities, where: str) -> str:
    """The model's name of the tool that a choice names by either of its names."""
    if choice.name is None:
        raise InvalidValue(f"{where}: a choice of type {choice.type[:50]!r} needs name", param=f"{where}.name")
    whole = qualified(choice.name, choice.namespace)
    if whole in identities:
        return whole
    found = (called for called, tool in identities.items() if tool.name == choice.name and not choice.namespace)
    if (only := next(found, None)) is None:
        raise InvalidValue(f"{where}: there is no tool {choice.name[:100]!r}", param=f"{where}.name")
    return only


# ---------------------------------------------------------------- back
def custom_input(arguments: str) -> str:
    """What a call of a custom tool says; a model that keeps to no form says all of it so."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    values = list(found.values()) if isinstance(found, dict) else []
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return found if isinstance(found, str) else arguments
