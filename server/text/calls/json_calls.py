"""Calls that are JSON objects.

Owns the reading of complete objects, in whatever order their members come. Calls in the usual order come earlier,
while they form (`tool_calls`). Runs on the event loop; pure. Never changes what JSON says: it has types of its
own.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from typing import Any

from server.text.calls.arguments import ModelCall, dumped
from server.text.calls.json_object import JsonObject

_OBJECT = re.compile(r'\{\s*"')
# Members of a call behind its arguments, as Mistral's have an id there.
MEMBERS = r'(?:\s*,\s*"\w+"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[\w.+-]+))*'
_ARGUMENTS = ("arguments", "parameters", "args", "params", "input")
_ABOUT_CALLS = frozenset({"name", "function", "id", "type", "index"})  # members that are no arguments
_REST = re.compile(MEMBERS + r"\s*\}")
_MOST_LOOKED_AT = 4096  # characters
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def _finite(digits: str) -> float | str:
    """A number that is no double stays text: JSON has no Infinity."""
    number = float(digits)
    return number if math.isfinite(number) else digits


_decoder = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=str)


def read(text: str) -> list[ModelCall | str]:
    """Calls, and the texts that belong to none, in order. Nothing is looked for behind an object that doesn't end: what
    is in it may look like a call, and is none."""
    parts: list[ModelCall | str] = []
    at = done = 0
    while match := _OBJECT.search(text, at):
        try:
            value, at = _decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            break
        with contextlib.suppress(ValueError):
            call = written(value)
            parts += [_stray(text[done : match.start()]), call]
            done = at
    return [*parts, _stray(text[done:])]


def whole(text: str) -> ModelCall | None:
    """The call that all of a text is; None unless its arguments are an object, and a member of their own."""
    try:
        value = _decoder.decode(text)
        call = written(value)
    except (ValueError, RecursionError):
        return None
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    named = "parameters" in inner or "arguments" in inner
    return call if named and str(call.arguments).startswith("{") else None


def behind_arguments(text: str) -> str:
    """What follows the object whose arguments end where the text begins."""
    match = _REST.match(text)
    if match:
        return text[match.end() :]
    return text


def mended(text: str) -> str:
    """The text with its whole objects as JSON has them. One that has no end was cut short, and stays as it is."""
    parts: list[str] = []
    while "{" in text:
        place = text.index("{")
        made = JsonObject()
        ready, taken = made.read(text[place:])
        if not made.complete:
            break
        parts += [text[:place], ready]
        text = text[place + taken :]
    return "".join([*parts, text])


def ends_in_string(text: str) -> bool:
    """Whether a text that begins as JSON ends inside one of its strings. A quotation mark that lacks its backslash
    leaves that open to all but the slow look, which a long text doesn't get."""
    if text.lstrip()[:1] not in ("{", "[") or '"' not in _STRING.sub("", text):
        return False
    return len(text) > _MOST_LOOKED_AT or _ends_in_mended_string(text)


def _ends_in_mended_string(text: str) -> bool:
    made = JsonObject()
    while "{" in text:
        made = JsonObject()
        text = text[text.index("{") :]
        text = text[made.read(text)[1] :]
    return made.in_string


def written(call: Any) -> ModelCall:
    """Raises ValueError for what is no call."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call | call["function"]
    elif isinstance(call, dict) and isinstance(call.get("function"), str):
        call = {"name": call["function"]} | call
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        raise ValueError("a call needs a name")
    arguments = _arguments(call)
    if isinstance(arguments, str):
        text = JsonObject.mended(arguments or "{}")
        json.loads(text)  # text in a string must be JSON itself
        return ModelCall(name, text, call.get("id"))
    return ModelCall(name, dumped(arguments or {}), call.get("id"))


def _arguments(call: dict[str, Any]) -> Any:
    """What a call says of its arguments. Models that were trained on another format call them otherwise, or write them
    beside the name."""
    for name in _ARGUMENTS:
        if name in call:
            return call[name]
    return {key: value for key, value in call.items() if key not in _ABOUT_CALLS}


def _stray(text: str) -> str:
    """Text beside calls, without the punctuation around them."""
    return text.strip(",[]}")
