"""Numbers in a schema, in the way in which llguidance understands them.

Owns the rewriting of bounds: llguidance keeps them as doubles and knows none beyond 64 bits, so that an answer could
lie outside of bounds that were rounded. Here they are rounded inwards. A whole number that is excluded would be allowed
where the other bound lies nearer than the next one: then the first number inside is the bound. Lengths may be written
2.0, as JSON Schema has it. Runs in the server's worker thread; pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from server.grammar import keywords

NEAREST = 1e-12  # of an excluded bound, as far as the bounds leave room for that
FARTHEST = 9_223_372_036_854_774_784  # the last double before 2 ** 63
MOST_DEPTH = 150  # llguidance refuses what is nested more deeply
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMAS = frozenset({
    *("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("anyOf", "oneOf", "allOf", "prefixItems"),
})  # fmt: skip
_LENGTHS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})

# An excluded bound, the keyword that includes it, the direction that leads inwards, and the bounds on the other side.
_SIDES = (
    ("exclusiveMinimum", "minimum", 1, ("exclusiveMaximum", "maximum")),
    ("exclusiveMaximum", "maximum", -1, ("exclusiveMinimum", "minimum")),
)


def understood(schema: Any, depth: int = 0) -> Any:
    """The schema with bounds that llguidance keeps, in keywords that it knows."""
    if depth > MOST_DEPTH:
        return schema
    if isinstance(schema, list):
        return [understood(item, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    known = keywords.rewritten(schema)
    if isinstance(known, bool):
        return known
    return {key: _value(key, value, depth + 1) for key, value in _apart(known).items()}


def _value(key: str, value: Any, depth: int) -> Any:
    if key in _SCHEMAS:
        return understood(value, depth)
    if key in _MAPS and isinstance(value, dict):
        return {name: understood(part, depth) for name, part in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if key in _LENGTHS:
        return _whole(value)
    rounded = _BOUNDS.get(key)
    return value if rounded is None else rounded(value)


def _whole(length: int | float) -> int | float:
    if isinstance(length, float) and length.is_integer():
        return int(length)
    return length


def _least(bound: int | float) -> int | float:
    if bound < -FARTHEST:
        return -FARTHEST
    return _double(bound, math.inf)


def _most(bound: int | float) -> int | float:
    if bound > FARTHEST:
        return FARTHEST
    return _double(bound, -math.inf)


def _double(bound: int | float, inwards: float) -> int | float:
    """The double that is equal, or else the next one inwards."""
    if isinstance(bound, float) or abs(bound) > FARTHEST:
        return bound
    near = float(bound)
    if (near < bound) == (inwards > 0) and near != bound:
        near = math.nextafter(near, inwards)
    return int(near)


def _apart(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without an excluded whole number that llguidance would allow."""
    made = dict(schema)
    for excluded, included, inwards, across in _SIDES:
        bound = _number(schema, excluded)
        ends = [end for key in across if (end := _number(schema, key)) is not None]
        if bound is None or included in schema or not ends:
            continue
        if bound == int(bound) and 0 < inwards * (ends[0] - bound) < 1:
            del made[excluded]
            made[included] = _next(bound, ends[0])
    return made


def _number(schema: dict[str, Any], key: str) -> int | float | None:
    value = schema.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _next(bound: int | float, end: int | float) -> float:
    """A number next to the bound, on the side of the other one."""
    step = math.copysign(min(NEAREST, abs(end - bound) / 1000), end - bound)
    if bound + step != bound:
        return bound + step
    return math.nextafter(bound, end)


_BOUNDS: dict[str, Callable[[int | float], int | float]] = {
    "minimum": _least,
    "exclusiveMinimum": _least,
    "maximum": _most,
    "exclusiveMaximum": _most,
}
