"""Schemas that no JSON text of finite length can follow.

Owns the search for them: a `$ref` that leads only to itself, or a property, item or alternative without which no answer
is valid and which contains itself. llguidance accepts such a schema wherever another token may come first, and the row
fails in mid-answer, or goes on for ever. Runs in the server's worker thread; pure.

The verdict errs towards accepting: a keyword that isn't read here is taken to hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

MOST_PASSES = 50  # over all parts; what isn't decided by then is accepted, for a chain made to be slow needs them all
_MAPS = ("properties", "patternProperties")
_SINGLE = ("items", "additionalProperties")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
Parts = dict[int, tuple[str, dict[str, Any]]]  # by id: place, schema


def fault(schema: Any, param: str) -> tuple[str, str]:
    """(place, reason) of the innermost part that no finite text can follow; two empty strings if there is none."""
    if not isinstance(schema, dict):
        return "", ""
    parts = _reachable(schema, param)
    endless = _endless(schema, parts)
    for place, part in parts.values():
        if id(part) in endless:
            return _innermost(place, part, endless)
    return "", ""


def _reachable(root: dict[str, Any], param: str) -> Parts:
    """The schemas that may apply to some part of an answer, from the outside in."""
    found: Parts = {}
    left = [(param, root)]
    while left:
        place, part = left.pop()
        if id(part) in found:
            continue
        found[id(part)] = (place, part)
        left += [(place + name, inner) for name, inner in _inside(part)]
        left += [(_place(param, part["$ref"]), target) for target in _target(root, part)]
    return found


def _inside(part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key in _MAPS:
        if isinstance(members := part.get(key), dict):
            yield from ((f".{key}.{name}", item) for name, item in members.items() if isinstance(item, dict))
    for key in _SINGLE:
        if isinstance(item := part.get(key), dict):
            yield f".{key}", item
    for key in _LISTS:
        for index, item in enumerate(_schemas(part, key)):
            if isinstance(item, dict):
                yield f".{key}[{index}]", item


def _schemas(part: dict[str, Any], key: str) -> list[Any]:
    value = part.get(key)
    return value if isinstance(value, list) else []


def _target(root: Any, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema that `$ref` names, if it is one of this document."""
    ref = part.get("$ref")
    if not isinstance(ref, str) or not ref.startswith("#"):
        return
    for step in _steps(ref):
        if isinstance(root, list) and step.isdecimal() and int(step) < len(root):
            root = root[int(step)]
        elif isinstance(root, dict) and step in root:
            root = root[step]
        else:
            return
    if isinstance(root, dict):
        yield root


def _steps(ref: str) -> list[str]:
    """The keys of a JSON pointer."""
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in ref.removeprefix("#").split("/")[1:]]


def _place(param: str, ref: str) -> str:
    return param + "".join(f"[{step}]" if step.isdecimal() else f".{step}" for step in _steps(ref))


# ---------------------------------------------------------------- finite or not
def _endless(root: dict[str, Any], parts: Parts) -> set[int]:
    """The ids of those that aren't finite: what isn't proved to come to an end by those inside it."""
    endless = set(parts)
    targets = {key: list(_target(root, part)) for key, (_, part) in parts.items()}
    inwards = [(key, part) for key, (_, part) in reversed(parts.items())]
    for _ in range(MOST_PASSES):
        known = len(endless)
        for key, part in inwards:
            if key in endless and not any(id(target) in endless for target in targets[key]) and _ends(part, endless):
                endless.discard(key)
        if len(endless) == known:
            return endless
    return set()


def _ends(part: dict[str, Any], endless: set[int]) -> bool:
    """Whether a finite text may follow a schema, its `$ref` aside."""
    if any(id(item) in endless for item in [*_schemas(part, "allOf"), *_needed(part)]):
        return False
    choices = [items for key in ("anyOf", "oneOf") if (items := _schemas(part, key))]
    return all(any(id(item) not in endless for item in items) for items in choices)


def _needed(part: dict[str, Any]) -> Iterator[Any]:
    """The schemas of properties and items that each answer has to have."""
    if part.get("type") in ("object", ["object"]) and isinstance(properties := part.get("properties"), dict):
        yield from (properties.get(name) for name in _schemas(part, "required") if isinstance(name, str))
    least = part.get("minItems")
    if part.get("type") in ("array", ["array"]) and isinstance(least, int | float) and least > 0:
        fixed = _schemas(part, "prefixItems")
        yield from fixed[: int(least)]
        if least > len(fixed):
            yield part.get("items")


# ---------------------------------------------------------------- its place
def _innermost(place: str, part: dict[str, Any], endless: set[int]) -> tuple[str, str]:
    inner = next(((name, item) for name, item in _inside(part) if id(item) in endless), None)
    while inner is not None:
        place += inner[0]
        part = inner[1]
        inner = next(((name, item) for name, item in _inside(part) if id(item) in endless), None)
    if "$ref" in part:
        return place, f"`$ref` {part['$ref']!r} leads back to itself, so that no text could follow it"
    return place, "it has to contain itself, so that no text could follow it"
