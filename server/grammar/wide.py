"""Parts of a schema that allow very many continuations at one place.

llguidance follows all that may come next, and gives up beyond some number: an object with a thousand optional
properties compiles, and fails behind its opening brace. Owns the search for such parts, wherever they lie, each as a
schema of its own in which that place comes soon. Runs in the server's worker thread; pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from server.grammar.endless import targets

MANY = 100  # the limit is reached with about 500 optional properties
MOST_PARTS = 10  # of objects, and of alternatives: the widest are looked at
_JOINED = ("allOf", "anyOf", "oneOf")
_SHARED = ("$defs", "definitions")


def widest(schema: Any, parts: Iterable[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Return (place, schema) of the widest `parts` of a schema, given with their places: objects, then alternatives."""
    own: list[tuple[int, str, dict[str, Any]]] = []
    joined = []
    shared = {key: schema[key] for key in _SHARED if isinstance(schema, dict) and key in schema}
    for place, part in parts:
        run = _longest_run(part)
        own.append((len(run), place, _outline(part, run)))
        if any(key in part for key in _JOINED):
            joined.append((_width(schema, part), place, shared | part))
    return [(place, narrowed) for found in (own, joined) for _, place, narrowed in _wide(found)]


def _wide(found: list[tuple[int, str, dict[str, Any]]]) -> list[tuple[int, str, dict[str, Any]]]:
    return sorted((one for one in found if one[0] >= MANY), key=lambda one: -one[0])[:MOST_PARTS]


def _longest_run(part: dict[str, Any]) -> list[str]:
    """Return the longest run of properties any of which may come next: those between two required ones."""
    properties = part.get("properties")
    if not isinstance(properties, dict):
        return []
    required = part.get("required")
    needed = set(map(str, required)) if isinstance(required, list) else set()
    runs: list[list[str]] = [[]]
    for name in properties:
        if name in needed:
            runs.append([])
        else:
            runs[-1].append(name)
    return max(runs, key=len)


def _outline(part: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return an object of properties without constraints, which allows next what the part allows."""
    more = part.get("additionalProperties", True)
    return {
        "type": "object",
        "properties": {name: {"type": "null"} for name in names},
        "additionalProperties": more is not False,
    }


def _width(root: Any, part: dict[str, Any], depth: int = 0) -> int:
    """Return how many continuations a part and its alternatives allow, counted up to MANY at each depth."""
    width = len(_longest_run(part))
    if depth < 3:
        for other in _beside(root, part):
            width += 1 + _width(root, other, depth + 1)
            if depth and width >= MANY:
                break
    return width


def _beside(root: Any, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas that hold for the same value."""
    listed = chain.from_iterable(part[key] for key in _JOINED if isinstance(part.get(key), list))
    yield from (one for one in listed if isinstance(one, dict))
    yield from targets(root, part)
