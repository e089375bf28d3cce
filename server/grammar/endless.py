"""Schemas that no JSON text of finite length can follow.

Owns the search for them: a `$ref` that leads only to itself, or a property, item or alternative without which no answer
is valid and which contains itself. llguidance accepts such a schema wherever another token may come first, and the row
fails in mid-answer, or goes on for ever. Runs in the server's worker thread; pure.

The verdict errs towards accepting: a keyword that isn't read here is taken to hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import unquote

MOST_PASSES = 50  # over all parts; what isn't decided by then is accepted, for a chain made to be slow needs them all
MOST_TOGETHER = 20  # schemas that hold for one value
MOST_ITEMS = 1_000_000  # none of `prefixItems` lies behind them
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
MOST_NAMES = 500  # of a schema's `required`; those behind them are taken to hold
MOST_PATTERNS = 10  # of a schema; those behind them are taken to hold
_PLAIN = re.compile(r"\^?[\w-]*\$?", re.ASCII)
_MAPS = ("properties", "patternProperties")
_SINGLE = ("items", "additionalProperties")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
Parts = dict[int, tuple[str, dict[str, Any]]]  # by id: place, schema


def fault(schema: Any, param: str) -> tuple[str, str]:
    """Return (place, reason) of the innermost part that no finite text can follow; two empty texts if there is none."""
    if not isinstance(schema, dict):
        return "", ""
    parts = reachable(schema, param)
    endless = _endless(schema, parts)
    for place, part in parts.values():
        if id(part) in endless:
            return _innermost(place, part, endless)
    return "", ""


def reachable(root: dict[str, Any], param: str) -> Parts:
    """Return the schemas that may apply to some part of an answer, from the outside in."""
    found: Parts = {}
    left = [(param, root)]
    while left:
        place, part = left.pop()
        if id(part) in found:
            continue
        found[id(part)] = (place, part)
        left += [(place + name, inner) for name, inner in _inside(part)]
        left += [(_place(param, part["$ref"]), target) for target in targets(root, part)]
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


def targets(root: Any, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schema that `$ref` names, if it is one of this document."""
    ref = part.get("$ref")
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
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
    """Return the keys of a JSON pointer."""
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in ref.removeprefix("#").split("/")[1:]]


def _place(param: str, ref: str) -> str:
    return param + "".join(f"[{step}]" if step.isdecimal() else f".{step}" for step in _steps(ref))


# ---------------------------------------------------------------- finite or not
def _endless(root: dict[str, Any], parts: Parts) -> set[int]:
    """Return the ids of the schemas that aren't finite: those not proved finite by the schemas inside them."""
    endless = set(parts)
    named = {key: list(targets(root, part)) for key, (_, part) in parts.items()}
    inwards = [(key, _together(part, named)) for key, (_, part) in reversed(parts.items())]
    for _ in range(MOST_PASSES):
        known = len(endless)
        for key, together in inwards:
            if key in endless and _ends(together, endless, named):
                endless.discard(key)
        if len(endless) == known:
            return endless
    return set()


def _together(part: dict[str, Any], targets: Mapping[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a schema and those that hold wherever it does: the members of `allOf`, and the target of `$ref`."""
    found: dict[int, dict[str, Any]] = {}
    left = [part]
    while left and len(found) < MOST_TOGETHER:
        one = left.pop()
        if id(one) not in found:
            found[id(one)] = one
            left += [item for item in _schemas(one, "allOf") if isinstance(item, dict)]
            left += targets.get(id(one), [])
    return list(found.values())


def _ends(together: list[dict[str, Any]], endless: set[int], targets: Mapping[int, list[dict[str, Any]]]) -> bool:
    """Return whether a finite text may follow schemas that all hold."""
    for one in together:
        if any(id(item) in endless for item in [*_schemas(one, "allOf"), *targets.get(id(one), [])]):
            return False
    if not _some_kind_ends(together, endless):
        return False
    for one in together:
        for key in ("anyOf", "oneOf"):
            choices = _schemas(one, key)
            if choices and not any(_chosen(item, together, endless, targets) for item in choices):
                return False
    return True


def _chosen(
    item: Any, together: list[dict[str, Any]], endless: set[int], targets: Mapping[int, list[dict[str, Any]]]
) -> bool:
    """Return whether a finite text may follow an alternative and the schemas that hold beside it."""
    if not isinstance(item, dict):
        return item is not False
    if id(item) in endless:
        return False
    return _some_kind_ends([*together, *_together(item, targets)], endless)


def _some_kind_ends(together: list[dict[str, Any]], endless: set[int]) -> bool:
    """Return whether an answer of some type needs no endless schema."""
    kinds = _kinds(together)
    return not kinds or not all(any(id(item) in endless for item in _needed(together, kind)) for kind in kinds)


def _needed(together: list[dict[str, Any]], kind: str) -> Iterator[Any]:
    """Yield the schemas of the properties and items that every answer of a type must have."""
    if kind == "object":
        names = {name for one in together for name in _schemas(one, "required")[:MOST_NAMES] if isinstance(name, str)}
        for one in together:
            yield from (schema for name in names for schema in _of_property(one, name))
            if not names and _least(one, "minProperties") > 0 and not _maps(one):
                yield one.get("additionalProperties")
    if kind == "array":
        least = max(_least(one, "minItems") for one in together)
        for one in together:
            fixed = _schemas(one, "prefixItems")
            yield from fixed[:least]
            if least > len(fixed):
                yield one.get("items")


def _kinds(together: list[dict[str, Any]]) -> set[str]:
    """Return the types that an answer may have; all of them where no schema names one."""
    kinds = set(_TYPES)
    for one in together:
        said = one.get("type")
        if isinstance(said, str):
            kinds &= {said}
        elif isinstance(said, list):
            kinds &= {kind for kind in said if isinstance(kind, str)}
    return kinds


def _of_property(one: dict[str, Any], name: str) -> Iterator[Any]:
    """Yield the schemas of a property: by its name and plain patterns, else the one of other properties."""
    properties = one.get("properties")
    if isinstance(properties, dict) and name in properties:
        yield properties[name]
        return
    patterns = one.get("patternProperties")
    if not isinstance(patterns, dict) or not patterns:
        yield one.get("additionalProperties")
        return
    for pattern, schema in islice(patterns.items(), MOST_PATTERNS):
        if _matches(pattern, name):
            yield schema


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern of letters and anchors matches; False for others, which may take Python for ever."""
    if not _PLAIN.fullmatch(pattern):
        return False
    text = pattern.removeprefix("^").removesuffix("$")
    if pattern.startswith("^") and pattern.endswith("$"):
        return name == text
    if pattern.startswith("^"):
        return name.startswith(text)
    if pattern.endswith("$"):
        return name.endswith(text)
    return text in name


def _maps(one: dict[str, Any]) -> bool:
    return any(one.get(key) for key in _MAPS)


def _least(one: dict[str, Any], key: str) -> int:
    least = one.get(key)
    if isinstance(least, int | float) and least > 0:
        return math.ceil(min(least, MOST_ITEMS))
    return 0


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
