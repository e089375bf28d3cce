"""KV of earlier prompts, kept so that a new one need only read what it adds.

Owns the kept entries: token ids, compacted single caches, the bytes and buffers that these really pin. Runs in the
engine process's main thread. Caches that can be trimmed serve any common prefix; the others (recurrent states, windows
that have rotated) serve only prompts that begin with the whole entry.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, can_trim_prompt_cache

from server.cache_guard import Caches, cache_arrays, own_bytes, pack, parts
from server.ipc.snapshot import Snapshot

WORTH_KEEPING = 32  # shorter prefixes are quicker read than found
MOST_ENTRIES = 64  # so that a server of many small requests levels off long before the bytes do


def can_trim(caches: Caches) -> bool:
    """Whether every layer can forget its newest positions, down to any length."""
    cut = any(getattr(part, "start_position", 0) for part in parts(caches))  # a chunked cache that lost its front
    return bool(can_trim_prompt_cache(caches)) and not cut


def shared_ids(a: list[int] | np.ndarray[Any, Any], b: list[int] | np.ndarray[Any, Any]) -> int:
    """How many leading ids are equal."""
    size = min(len(a), len(b))
    differ = np.asarray(a[:size]) != np.asarray(b[:size])
    if differ.any():
        return int(differ.argmax())
    return size


@dataclass(eq=False, slots=True)
class _Entry:
    tokens: np.ndarray[Any, Any]  # int64
    caches: Caches
    pinned: int  # bytes
    buffers: int
    trims: bool


class PrefixCache:
    """Least recently used entries go first. Owned by the loop."""

    def __init__(self, budget: int, snapshot: Snapshot) -> None:
        """`budget` in bytes; 0 switches it off."""
        self._budget = budget
        self._snapshot = snapshot
        self.entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.pinned_bytes = self._buffers = 0

    @property
    def enabled(self) -> bool:
        return self._budget > 0

    def __len__(self) -> int:
        return len(self.entries)

    # ------------------------------------------------------------ use
    def lookup(self, tokens: list[int]) -> tuple[Caches, int] | None:
        """Caches of one's own that hold the longest kept prefix of `tokens` (all but the last at the most), and its
        length; None when there is nothing worth it."""
        if not self.enabled:
            return None
        wanted = np.array(tokens[:-1], dtype=np.int64)
        key, usable = self._best(wanted)
        if key is None:
            self._count("miss")
            return None
        if usable == len(wanted):
            self._count("hit")
        else:
            self._count("partial")
        self.entries.move_to_end(key)
        entry = self.entries[key]
        caches = copy.deepcopy(entry.caches)  # arrays are shared until written to; the objects are the row's own
        if usable < len(entry.tokens):
            for layer in caches:
                layer.trim(len(entry.tokens) - usable)
        return caches, usable

    def reach(self, tokens: list[int]) -> int:
        """How many of `tokens` a `lookup` would find; it counts for no use."""
        if self.entries:
            return self._best(np.array(tokens[:-1], dtype=np.int64))[1]
        return 0

    def _best(self, wanted: np.ndarray[Any, Any]) -> tuple[bytes | None, int]:
        best: tuple[bytes | None, int] = (None, 0)
        for key, entry in self.entries.items():
            shared = shared_ids(entry.tokens, wanted)
            usable = 0
            if entry.trims or shared == len(entry.tokens):
                usable = shared
            if usable >= max(WORTH_KEEPING, best[1] + 1):
                best = key, usable
        return best

    def _count(self, result: str) -> None:
        lookups = self._snapshot.prefix_lookups
        lookups[result] = lookups.get(result, 0) + 1

    # ------------------------------------------------------------ keep
    def insert_copy(self, tokens: list[int], caches: Caches) -> None:
        """Keep a copy of caches that go on being used."""
        if self._is_worth(tokens) and not self._is_kept(tokens, can_trim(caches)):
            self.insert(tokens, copy.deepcopy(caches))

    def insert(self, tokens: list[int], caches: Caches) -> None:
        """Keep caches that hold exactly `tokens`; they belong to the entry from now on."""
        trims = can_trim(caches)
        if not self._is_worth(tokens) or self._is_kept(tokens, trims):
            return
        _cut_spare(caches)
        pinned = pack(caches)
        if pinned > self._budget:  # it would drive out all others and then itself
            return
        entry = _Entry(np.array(tokens, dtype=np.int64), caches, pinned, len(cache_arrays(caches)), trims)
        if trims:
            self._drop_prefixes(entry)
        self.entries[entry.tokens.tobytes()] = entry
        self.pinned_bytes += pinned
        self._buffers += entry.buffers
        while self.pinned_bytes > self._budget and self.entries:
            self._evict("bytes")
        while len(self.entries) > MOST_ENTRIES:
            self._evict("size")
        self._report()

    def _is_worth(self, tokens: list[int]) -> bool:
        return self.enabled and len(tokens) >= WORTH_KEEPING

    def _is_kept(self, tokens: list[int], trims: bool) -> bool:
        """Whether an entry for these tokens is there, or one that trims to them; it is then as good as used."""
        wanted = np.array(tokens, dtype=np.int64)
        for key, entry in self.entries.items():
            longer = len(entry.tokens) > len(wanted)
            if (entry.trims and trims if longer else len(entry.tokens) == len(wanted)) and (
                shared_ids(entry.tokens, wanted) == len(wanted)
            ):
                self.entries.move_to_end(key)
                return True
        return False

    def _drop_prefixes(self, new: _Entry) -> None:
        """Entries that the new one can stand in for."""
        for key, entry in list(self.entries.items()):
            if entry.trims and shared_ids(entry.tokens, new.tokens) == len(entry.tokens):
                self._drop(key)

    # ------------------------------------------------------------ let go
    def _drop(self, key: bytes) -> None:
        if entry := self.entries.pop(key, None):
            self.pinned_bytes -= entry.pinned
            self._buffers -= entry.buffers

    def _evict(self, reason: str) -> None:
        self._drop(next(iter(self.entries)))
        evictions = self._snapshot.prefix_evictions
        evictions[reason] = evictions.get(reason, 0) + 1

    def evict(self, reason: str, size: int, buffers: int) -> int:
        """Under pressure: let go of entries until they have given back `size` bytes and so many buffers, or none is
        left; returns how many went."""
        before = len(self.entries)
        bytes_left, buffers_left = self.pinned_bytes - size, self._buffers - buffers
        while self.entries and (self.pinned_bytes > bytes_left or self._buffers > buffers_left):
            self._evict(reason)
        self._report()
        return before - len(self.entries)

    def clear(self) -> None:
        """At the end of the process."""
        self.entries.clear()
        self.pinned_bytes = self._buffers = 0

    def pinned(self) -> list[tuple[int, int]]:
        """(bytes really pinned, bytes of the arrays) of each entry, for tests and /debug."""
        return [(e.pinned, own_bytes(e.caches)) for e in self.entries.values()]

    def _report(self) -> None:
        self._snapshot.prefix_entries = len(self.entries)
        self._snapshot.kv_cached_bytes = self.pinned_bytes
        self._snapshot.kv_cached_buffers = self._buffers
        self._snapshot.kv_cached_tokens = sum(len(entry.tokens) for entry in self.entries.values())


def _cut_spare(caches: Caches) -> None:
    """mlx-lm's growing cache keeps room for the next positions; an entry needs none."""
    for part in parts(caches):
        if type(part) is KVCache and part.keys is not None and part.keys.shape[2] > part.offset:
            part.keys = mx.contiguous(part.keys[..., : part.offset, :])
            part.values = mx.contiguous(part.values[..., : part.offset, :])
