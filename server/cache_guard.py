"""The cache guard: whatever array a cache can reach is made concrete with the step that touched it.

A decode loop evaluates the sampled token and nothing else, so metadata that no logit reads (a padding count, an
offset) grows a graph of one pending node a step, and each node keeps buffers alive until the device has none left.

Owns the walk over caches, the three ways to make what it finds concrete (submitted with the step, layer by layer,
compacted), and the census that names what a step left pending. Runs in the engine's main thread. It never asks a
cache for its `state` and never distinguishes one class from another, so it holds for classes it has never seen.
"""

from __future__ import annotations

import logging
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from server.ipc.snapshot import Finding, Snapshot

log = logging.getLogger(__name__)

Caches = list[Any]  # one a layer: mlx-lm's, of a row or of a batch of rows
Keep = Callable[[list[int], Callable[[], Caches]], None]  # tokens, and how to get the caches that hold them

# Counting leaves recurses over the graph and overflows the stack beyond some 60,000 links: a chain as long as this
# is not counted again, so its count is then a lower bound.
DEEP = 4096
LOOSE = 1.1  # caches that outlive a step may pin so many times their own bytes

_LEAF, _ARRAY, _ITEMS, _PAIRS, _PLAIN, _MIXED = range(6)
_OPAQUE = (type, nn.Module, types.ModuleType)  # weights and code, never a cache's own
_CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)


# ---------------------------------------------------------------- the walk
class _Kinds(dict[type, int]):
    """How to look into an instance of a class. No more is remembered: attributes may appear later."""

    def __missing__(self, cls: type) -> int:
        self[cls] = kind = self._find(cls)
        return kind

    @staticmethod
    def _find(cls: type) -> int:
        if issubclass(cls, mx.array):
            return _ARRAY
        if issubclass(cls, _OPAQUE):  # before dict: an nn.Module is one
            return _LEAF
        if cls in (list, tuple, set, frozenset, deque):
            return _ITEMS
        if cls is dict:
            return _PAIRS
        if cls.__module__ == "builtins":
            return _LEAF
        if _slots(cls) or issubclass(cls, _CONTAINERS):
            return _MIXED
        if cls.__dictoffset__:
            return _PLAIN
        return _LEAF


_KINDS = _Kinds()


def _slots(cls: type) -> list[types.MemberDescriptorType]:
    """The class's `__slots__`, inherited and private ones too."""
    found = (value for owner in cls.__mro__ for value in vars(owner).values())
    return [value for value in found if isinstance(value, types.MemberDescriptorType)]


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for slot in _slots(type(value)):
        try:
            yield slot.__name__, slot.__get__(value)
        except AttributeError:  # declared and never set
            continue


def _items(value: Any) -> Iterable[Any]:
    """What a container holds, one of a class of its own included; nothing for other objects."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, _CONTAINERS):
        return value
    return ()


def cache_arrays(caches: Iterable[object]) -> list[mx.array]:
    """Every array reachable from the caches. Runs in every step, so it is written to be quick: the containers yet to
    be looked into are a list that grows while it is read, and arrays are recognized first."""
    found: list[mx.array] = []
    seen: set[int] = set()
    groups: list[Iterable[Any]] = [list(caches)]
    kinds = _KINDS
    array = mx.array
    for group in groups:
        for value in group:
            cls = type(value)
            kind = _ARRAY if cls is array else kinds[cls]
            if kind == _ARRAY:
                found.append(value)
            elif kind != _LEAF and id(value) not in seen:
                seen.add(id(value))
                if kind == _PLAIN:
                    groups.append(value.__dict__.values())
                elif kind == _MIXED:
                    groups.append([part for _, part in _attributes(value)])
                    groups.append(_items(value))
                else:
                    groups.append(value if kind == _ITEMS else value.values())
    return found


def parts(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches, those inside a list of caches one by one."""
    for layer in caches:
        yield from getattr(layer, "caches", None) or [layer]


# ---------------------------------------------------------------- making it concrete
def settle(caches: Iterable[object]) -> None:
    """Evaluate the caches layer by layer: in one graph the old and the new KV of all layers would live together."""
    for layer in caches:
        if arrays := cache_arrays([layer]):
            mx.eval(arrays)


def compact(caches: Iterable[object], *, anew: bool = False) -> int:
    """Give every array a buffer of its own, in place, and return the bytes that these buffers really hold.

    A view pins the whole buffer it looks into, so whatever outlives its step goes through here. `anew` copies also
    what isn't a view: a buffer from the pool may be larger than what was asked for.
    """
    layers = list(caches)
    for layer in layers:
        _rebuild(layer, _copied if anew else mx.contiguous, {})
        settle([layer])
    return pinned_bytes(cache_arrays(layers))


def pack(caches: Iterable[object]) -> int:
    """Compact the caches so that they pin next to nothing beyond their own bytes; return the bytes that they then pin.

    A buffer from the pool may be larger than what was asked for, which matters where arrays are small: those are copied
    once more while the pool is empty.
    """
    layers = list(caches)
    pinned = compact(layers)
    if pinned > LOOSE * own_bytes(layers):
        pool = mx.set_cache_limit(0)
        mx.clear_cache()
        pinned = compact(layers, anew=True)
        mx.set_cache_limit(pool)
    return pinned


def is_loose(caches: Iterable[object]) -> bool:
    """Whether evaluated caches pin more than `LOOSE` times their own bytes, as views of something larger do."""
    layers = list(caches)
    return pinned_bytes(cache_arrays(layers)) > LOOSE * own_bytes(layers)


def own_bytes(caches: Iterable[object]) -> int:
    return sum(array.nbytes for array in cache_arrays(caches))


def _copied(array: mx.array) -> mx.array:
    if array.ndim:
        return mx.concatenate([array[:0], array])
    return array


def pinned_bytes(arrays: list[mx.array]) -> int:
    """Bytes of the buffers behind evaluated arrays, each once; the arrays' own bytes where mlx doesn't know."""
    measure = getattr(mx, "get_array_buffer_size", None)
    if measure:
        return int(measure(arrays))
    return sum(array.nbytes for array in arrays)


def _rebuild(value: Any, change: Callable[[mx.array], mx.array], known: dict[int, tuple[Any, Any]]) -> Any:
    """`value` with every array changed: tuples and sets anew, all else in place.

    `known` has (old, new) by the old one's id: shared arrays stay shared, cycles end, and no id is used twice.
    """
    kind = _KINDS[type(value)]
    if kind == _LEAF:
        return value
    if id(value) not in known:
        known[id(value)] = (value, value)
        known[id(value)] = (value, change(value) if kind == _ARRAY else _rebuild_parts(value, change, known))
    return known[id(value)][1]


def _rebuild_parts(value: Any, change: Callable[[mx.array], mx.array], known: dict[int, tuple[Any, Any]]) -> Any:
    for name, part in list(_attributes(value)):
        if (new := _rebuild(part, change, known)) is not part:
            with suppress(
                AttributeError, TypeError
            ):  # read-only: stays as it is, is evaluated and charged all the same
                object.__setattr__(value, name, new)
    if isinstance(value, (tuple, set, frozenset)):
        parts = [_rebuild(part, change, known) for part in value]
        if all(new is part for new, part in zip(parts, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        pairs = value.items()
    else:
        pairs = enumerate(_items(value))
    for key, part in list(pairs):
        if (new := _rebuild(part, change, known)) is not part:
            value[key] = new
    return value


# ---------------------------------------------------------------- the census
class _Dot:
    """A text sink that counts and keeps nothing: the text of a long chain has megabytes."""

    def __init__(self) -> None:
        self.sources = self.edges = 0

    def write(self, text: str) -> int:
        self.sources += text.count("rank=source")
        self.edges += text.count("->")
        return len(text)

    def flush(self) -> None: ...


def _graph(arrays: Sequence[mx.array]) -> _Dot:
    dot = _Dot()
    mx.export_to_dot(dot, *arrays)
    return dot


def is_pending(arrays: Sequence[mx.array]) -> bool:
    """Whether something behind the arrays was never submitted. Never waits for what was."""
    if not arrays:
        return False
    if not hasattr(mx, "get_array_buffer_size"):  # mlx before 0.32.4
        return _graph(arrays).edges > 0
    try:
        mx.get_array_buffer_size(arrays)
    except ValueError:
        return True
    return False


def pending_leaves(arrays: Iterable[mx.array]) -> int:
    """Buffers that the graphs behind the arrays keep alive; a graph without any counts as one."""
    pending = [array for array in arrays if is_pending([array])]
    if pending:
        return max(_graph(pending).sources, len(pending))
    return 0


def census(caches: Iterable[object], known: Mapping[tuple[int, str, str], int] | None = None) -> list[Finding]:
    """What a step left pending, by layer, class and field. Cheap while there is nothing to say.

    `known` has earlier counts: a chain that is `DEEP` already keeps its count.
    """
    layers = list(caches)
    known = known or {}
    if not is_pending(cache_arrays(layers)):
        return []
    return [
        Finding(layer, owner, field, count)
        for layer, value in enumerate(layers)
        for (owner, field), arrays in _fields(value).items()
        if (count := _count(arrays, known.get((layer, owner, field), 0)))
    ]


def _count(arrays: list[mx.array], before: int) -> int:
    if before >= DEEP:
        if is_pending(arrays):
            return before
        return 0
    return pending_leaves(arrays)


def _fields(layer: object) -> dict[tuple[str, str], list[mx.array]]:
    """Arrays by (class, field). The class is that of the innermost object with a `state`, as caches have, and the
    field the dotted path from there; the items of a container go by its name."""
    fields: dict[tuple[str, str], list[mx.array]] = {}
    seen: set[int] = set()
    queue: deque[tuple[Any, str, str]] = deque([(layer, type(layer).__name__, "")])
    while queue:
        value, owner, path = queue.popleft()
        kind = _KINDS[type(value)]
        if kind == _LEAF or id(value) in seen:
            continue
        seen.add(id(value))
        if kind == _ARRAY:
            fields.setdefault((owner, path), []).append(value)
            continue
        if kind in (_PLAIN, _MIXED) and hasattr(type(value), "state"):
            owner = type(value).__name__
            path = ""
        queue.extend((part, owner, f"{path}.{name}" if path else name) for name, part in _attributes(value))
        queue.extend((item, owner, path) for item in _items(value))
    return fields


class Guard:
    """What the loop calls. With the guard off nothing is evaluated, and the census still reports.

    Owned by the loop; writes `pending`, `findings`, `leaks` and its flushes into the snapshot.
    """

    def __init__(self, enabled: bool, census_steps: int, snapshot: Snapshot) -> None:
        self.enabled = enabled
        self._every = min(census_steps, DEEP)  # a chain must be seen before it is too long to be counted
        self._snapshot = snapshot
        self._steps = 0
        self._found: dict[tuple[int, str, str], Finding] = {}

    def reach(self, caches: Iterable[object]) -> list[mx.array]:
        """Every array behind the caches, to be submitted together with the step's draw: no submission and no wait of
        its own, and less work than making the logits depend on them."""
        if self.enabled:
            return cache_arrays(caches)
        return []

    def settle(self, caches: Iterable[object]) -> None:
        """After a prefill chunk, a join, a leave or growth."""
        if self.enabled:
            settle(caches)

    def census(self, *groups: Iterable[object]) -> list[Finding]:
        """Call once an iteration, directly after its steps were submitted, with the caches of every group."""
        if self.is_due():
            return self.take_census(*groups)
        return []

    def is_due(self) -> bool:
        """Count an iteration; whether a census is due behind it."""
        self._steps += 1
        return self._steps % self._every == 0

    def take_census(self, *groups: Iterable[object]) -> list[Finding]:
        """Count what is pending now, log what is new, and evaluate it if the guard is on."""
        caches = [list(group) for group in groups]
        known = {key: finding.count for key, finding in self._found.items()}
        findings = [finding for group in caches for finding in census(group, known)]
        self._snapshot.pending = sum(finding.count for finding in findings)
        if findings:
            self._log_new(findings)
            for group in caches:
                self.settle(group)
        return findings

    def _log_new(self, findings: list[Finding]) -> None:
        news: dict[str, list[int]] = {}
        for finding in findings:
            key = (finding.layer, finding.cache, finding.field)
            if key not in self._found:
                news.setdefault(f"{finding.cache}.{finding.field}", []).append(finding.layer)
            self._found[key] = finding
        for name, layers in news.items():
            log.warning("cache guard: %s is left pending by a step, in layers %s", name, ", ".join(map(str, layers)))
        for name in {f"{finding.cache}.{finding.field}" for finding in findings}:
            self._snapshot.leaks[name] = self._snapshot.leaks.get(name, 0) + 1
        self._snapshot.findings = [self._found[key] for key in sorted(self._found)]
        if self.enabled:
            self._snapshot.record("flush", self._snapshot.pending, 0)
