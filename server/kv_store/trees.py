"""A cache taken apart into plain values and arrays, and put together again.

Owns the walk in both directions. Runs in the engine's main thread. It never asks a cache for its `state` and knows no
classes: whatever an object holds in its attributes is taken.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from server.cache_guard import cache_arrays
from server.kv_store.layout import Path, Tree

_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", deque: "deque"}
_MADE: dict[str, Any] = {"list": list, "tuple": tuple, "deque": deque}


class UnknownCache(Exception):
    """A cache holds arrays in a way that can't be taken apart."""


class Leaves:
    """The arrays met on a walk, with the way to each."""

    def __init__(self) -> None:
        self.arrays: list[mx.array] = []
        self.paths: list[Path] = []


def dismantle(cache: Any) -> tuple[Tree, Leaves]:
    """Take a cache apart. Raises UnknownCache if that would leave an array out."""
    leaves = Leaves()
    tree = _taken_apart(cache, (), leaves)
    if len(leaves.arrays) < len(cache_arrays([cache])):
        raise UnknownCache(f"{type(cache).__name__} holds arrays out of sight")
    return tree, leaves


def _taken_apart(value: Any, path: Path, leaves: Leaves) -> Tree:
    if isinstance(value, mx.array):
        leaves.arrays.append(value)
        leaves.paths.append(path)
        return ["array", len(leaves.arrays) - 1]
    if value is None or type(value) in (bool, int, float, str):
        return ["value", value]
    if kind := _SEQUENCES.get(type(value)):
        return [kind, [_taken_apart(item, (*path, place), leaves) for place, item in enumerate(value)]]
    if type(value) is dict:
        return ["dict", _named(value, path, leaves)]
    if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value):
        return ["object", _named(vars(value), path, leaves)]
    return ["fresh"]


def _named(values: dict[Any, Any], path: Path, leaves: Leaves) -> list[Any]:
    return [[name, _taken_apart(value, (*path, name), leaves)] for name, value in values.items()]


def at(value: Any, path: Path) -> Any:
    """What a path leads to."""
    for step in path:
        if isinstance(value, (list, tuple, deque, dict)):
            value = value[step]  # type: ignore[index]
        else:
            value = getattr(value, str(step))
    return value


def rebuilt(tree: Tree, fresh: Any, arrays: list[mx.array], length: int) -> Any:
    """Put together what `tree` says: a new value, or `fresh` with its attributes set. Raises UnknownCache."""
    kind = tree[0]
    if kind == "array":
        return arrays[tree[1]]
    if kind == "value":
        return tree[1]
    if kind == "length":
        return length
    if kind == "fresh":
        return fresh
    if kind == "dict":
        return {name: rebuilt(part, None, arrays, length) for name, part in tree[1]}
    if kind == "object":
        return _with_attributes(tree[1], fresh, arrays, length)
    return _MADE[kind](rebuilt(part, None, arrays, length) for part in tree[1])


def _with_attributes(named: list[Any], fresh: Any, arrays: list[mx.array], length: int) -> Any:
    if not hasattr(fresh, "__dict__"):
        raise UnknownCache("a fresh cache has no such object")
    for name, part in named:
        value = rebuilt(part, getattr(fresh, name, None), arrays, length)
        object.__setattr__(fresh, name, value)
    return fresh


def with_lengths(short: Tree, long: Tree, lengths: tuple[int, int]) -> Tree | None:
    """One tree for two of the same cache at two lengths; None if they differ by more than numbers that are the
    length."""
    if short == long:
        return short
    if short[0] != long[0]:
        return None
    if short[0] == "value":
        if (short[1], long[1]) == lengths:
            return ["length"]
        return None
    if len(short[1]) != len(long[1]):
        return None
    if short[0] in ("dict", "object"):
        return _with_named_lengths(short, long, lengths)
    parts = [with_lengths(a, b, lengths) for a, b in zip(short[1], long[1], strict=True)]
    if None in parts:
        return None
    return [short[0], parts]


def _with_named_lengths(short: Tree, long: Tree, lengths: tuple[int, int]) -> Tree | None:
    named = []
    for (name, a), (other, b) in zip(short[1], long[1], strict=True):
        part = with_lengths(a, b, lengths)
        if name != other or part is None:
            return None
        named.append([name, part])
    return [short[0], named]


def says(tree: Tree, seen: Tree, length: int) -> bool:
    """Whether `seen`, taken from a cache, is what `tree` says of one with `length` positions."""
    if tree[0] == "length":
        return seen == ["value", length]
    if tree[0] != seen[0] or len(tree) != len(seen):
        return False
    if tree[0] in ("value", "array", "fresh"):
        return tree == seen
    if len(tree[1]) != len(seen[1]):
        return False
    if tree[0] in ("dict", "object"):
        pairs = zip(tree[1], seen[1], strict=True)
        return all(name == other and says(part, own, length) for (name, part), (other, own) in pairs)
    return all(says(part, own, length) for part, own in zip(tree[1], seen[1], strict=True))
