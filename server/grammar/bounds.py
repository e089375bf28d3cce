"""Numbers in a schema, in the way in which llguidance understands them.

Owns the rewriting of bounds: llguidance keeps them as doubles and knows none beyond 64 bits, so that an answer could
lie outside of bounds that were rounded. Here they are rounded inwards. Lengths may be written 2.0, as JSON Schema has
it. Runs in the server's worker thread; pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

FARTHEST = 9_223_372_036_854_774_784  # the last double before 2 ** 63
MOST_DEPTH = 150  # llguidance refuses what is nested more deeply
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMAS = frozenset({
    *("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("anyOf", "oneOf", "allOf", "prefixItems"),
})  # fmt: skip
_LENGTHS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})


def understood(schema: Any, depth: int = 0) -> Any:
    """The schema with bounds that llguidance keeps."""
    if depth > MOST_DEPTH:
        return schema
    if isinstance(schema, list):
        return [understood(item, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _value(key, value, depth + 1) for key, value in schema.items()}


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


_BOUNDS: dict[str, Callable[[int | float], int | float]] = {
    "minimum": _least,
    "exclusiveMinimum": _least,
    "maximum": _most,
    "exclusiveMaximum": _most,
}
