"""The text of a block → calls, for every format that mlx-lm has a parser of.

Owns the choice of the reader. Formats whose arguments are text have readers here; JSON is read as JSON; where neither
finds a call mlx-lm's own parser may. Runs on the event loop; pure. Never raises, whatever a model wrote.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from server.text.calls import json_calls, marked_calls, spelled_calls
from server.text.calls.arguments import ModelCall, Parameters, Value, names_of
from server.text.calls.json_object import JsonObject
from server.text.calls.literals import container
from server.text.calls.markup import MARKUPS, MISTRAL_NAME
from server.text.calls.spelled_calls import NOTATIONS
from server.text.tokenizer import ToolFormat

# Formats whose parsers take any text for a call. What they find counts only where it names a tool.
_GUESSING = frozenset({"glm47", "laguna"})
_NAMES_FIRST = _GUESSING | {"longcat", "gemma4", "function_gemma"}
_BEFORE_NAME = re.compile(r"\A\s*(?:call:)?\s*")  # Gemma's
# What a call begins with where the tag around calls is forgotten, as Qwen3-Coder often does.
UNTAGGED = {"qwen3_coder": "<function="}
# Formats in which a call's name and arguments are members of one object.
_IN_OBJECTS = frozenset({"json_tools", "mistral"})
_MISTRAL_CALL = re.compile(
    rf"\s*(?P<name>{MISTRAL_NAME})\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?P<arguments>\{{.*)?", re.DOTALL
)
_CALL_END = re.compile(r"\A\s*<\|tool_call_end\|>")  # Kimi's
_MOST_UNCLOSED = 16  # blocks without a closing tag that are read apart
_LAYOUT = re.compile(
    r"[\s,\[\]{}()]|```(?:json)?|</?(?:tool_call|function|parameter|invoke)>|<\|tool_call_(?:begin|end)\|>"
)


Parts = list[ModelCall | str]


def read(form: ToolFormat, text: str, tools: list[dict[str, Any]] | None, *, whole: bool) -> Parts:
    """The calls of a block, and the texts that belong to none, in order; [] without a call. `whole`: nothing was cut
    off. Where a value went on through a closing tag and never ended, the tag was one after all."""
    found, open_ = _by_format(form.name, text, tools, whole=whole)
    if open_ and whole and form.end and form.end in text:
        return _read_several(form, text, tools)
    readings: Iterable[Parts] = (found, json_calls.read(text))
    if whole:
        readings = itertools.chain(readings, _guesses(form, text, tools))
    for parts in readings:
        if _has_call(parts):
            return [part for part in parts if isinstance(part, ModelCall) or _says(form, part)]
    return []


def _guesses(form: ToolFormat, text: str, tools: list[dict[str, Any]] | None) -> Iterator[Parts]:
    """The likeliest first."""
    yield _by_mistrals_tags(form, text, tools)
    yield _by_name(form, text, tools)
    yield json_calls.read(json_calls.mended(text))
    yield _by_literal(text)
    yield _by_mlx_lm(form, text, tools)


def read_untagged(form: ToolFormat, text: str, tools: list[dict[str, Any]] | None, *, whole: bool) -> Parts:
    """As `read`, for calls without a tag around them: a text may also speak of calls, so each must name a tool."""
    parts = read(form, text, tools, whole=whole)
    if all(_names_tool(part, tools) for part in parts if isinstance(part, ModelCall)):
        return parts
    return []


def read_rest(form: ToolFormat, text: str, tools: list[dict[str, Any]] | None, *, whole: bool) -> Parts:
    """What stands behind the arguments of a block's last JSON call."""
    if whole and form.start in text and (more := _by_mistrals_tags(form, json_calls.behind_arguments(text), tools)):
        return more
    if form.name in _IN_OBJECTS:
        rest = json_calls.behind_arguments(text)
    else:
        rest = _CALL_END.sub("", text)
    return [part for part in json_calls.read(rest) if isinstance(part, ModelCall) or _says(form, part)]


def ends_in_value(form: ToolFormat, text: str, tools: list[dict[str, Any]] | None) -> bool:
    """Whether the text of a block ends inside an argument, as far as it was written."""
    return json_calls.ends_in_string(text) or _by_format(form.name, text, tools, whole=True)[1]


def _read_several(form: ToolFormat, text: str, tools: list[dict[str, Any]] | None) -> Parts:
    """Reads blocks with their tags between them; the first one has lost its opening tag."""
    parts: Parts = []
    opening = ""
    behind = text
    while behind:
        block, closing, behind = behind.partition(form.end)
        parts += _read_block(form, block, tools) or [opening + block + closing]
        between, opening, behind = behind.partition(form.start)
        if between.strip():
            parts += [between]
    if _has_call(parts):
        return parts
    return []


def _read_block(form: ToolFormat, text: str, tools: list[dict[str, Any]] | None) -> Parts:
    """Reads a block in which a value never ended. Where a call stands on both sides of an opening tag, they are two
    blocks, and the first one has no closing tag."""
    before, opening, behind = text.partition(form.start)
    if opening and behind.count(form.start) < _MOST_UNCLOSED:
        first = read(form, before, tools, whole=True)
        second = _read_block(form, behind, tools)
        if _has_call(first) and _has_call(second):
            return [*first, *second]
    return read(form, text, tools, whole=True)


def _has_call(parts: Parts) -> bool:
    return any(isinstance(part, ModelCall) for part in parts)


def _by_format(name: str, text: str, tools: list[dict[str, Any]] | None, *, whole: bool) -> tuple[Parts, bool]:
    """The parts, and whether the text ends within a value."""
    if name in MARKUPS:
        marked = marked_calls.MarkedCalls(MARKUPS[name], text, tools, whole=whole)
        return marked.parts, marked.open
    if name in NOTATIONS:
        spelled = spelled_calls.SpelledCalls(NOTATIONS[name], text, tools)
        return spelled.parts, spelled.open
    return [], False


def _by_name(form: ToolFormat, text: str, tools: list[dict[str, Any]] | None) -> Parts:
    """A call without arguments, of a format in which that is nothing but a name."""
    call = ModelCall(_BEFORE_NAME.sub("", text).strip(), {})
    if form.name in _NAMES_FIRST and _names_tool(call, tools):
        return [call]
    return []


def _by_mistrals_tags(form: ToolFormat, text: str, tools: list[dict[str, Any]] | None) -> Parts:
    """Calls of Mistral's without arguments, or without the tag before them. Each must name a tool."""
    if form.name != "mistral":
        return []
    parts: Parts = []
    for written in text.split(form.start):
        match = _MISTRAL_CALL.fullmatch(written)
        arguments = ""
        if match:
            arguments = JsonObject.mended(match["arguments"] or "{}").rstrip()
        if match and _is_object(arguments) and _names_tool(call := ModelCall(match["name"], arguments), tools):
            parts.append(call)
        elif written.strip():
            parts.append(written)
    if _has_call(parts):
        return parts
    return []


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _by_literal(text: str) -> Parts:
    """Calls that are written as Python writes them, with its quotation marks."""
    found = container(text)
    try:
        return [json_calls.written(call) for call in (found if isinstance(found, list) else [found])]
    except ValueError:
        return []


def _by_mlx_lm(form: ToolFormat, text: str, tools: list[dict[str, Any]] | None) -> Parts:
    reads_here = form.name in MARKUPS or form.name in NOTATIONS
    if reads_here and form.name not in _GUESSING:
        return []
    try:
        made = form.parse(text, tools)
        calls = [_checked(call) for call in (made if isinstance(made, list) else [made])]
    except Exception:  # the parsers meet whatever a model writes
        return []
    return [*(call for call in calls if not reads_here or _is_known(call, tools))]


def _checked(call: dict[str, Any]) -> ModelCall:
    """A parser's call. What it has as an object is still read by the schema: only JSON has types of its own."""
    arguments = call.get("arguments")
    if isinstance(arguments, dict) and isinstance(call["name"], str):
        return ModelCall(call["name"], {str(key): Value.typed(one) for key, one in arguments.items()}, call.get("id"))
    return json_calls.written(call)


def _is_known(call: ModelCall, tools: list[dict[str, Any]] | None) -> bool:
    """Whether there is such a tool, and what was said of its arguments isn't just any text."""
    guessed = "raw" in call.arguments and not Parameters.named(call.name, tools).declare("raw")
    return _names_tool(call, tools) and not guessed


def _names_tool(call: ModelCall, tools: list[dict[str, Any]] | None) -> bool:
    return call.name in names_of(tools)


def _says(form: ToolFormat, text: str) -> bool:
    """Whether text beside calls is for a reader. Stray tags and brackets aren't, nor is the stump of a closing tag."""
    if form.end.startswith(text.strip(" \t\r\n,[]}")):
        return False
    for tag in (form.start, form.end):
        if tag:
            text = text.replace(tag, "")
    return bool(_LAYOUT.sub("", text))
