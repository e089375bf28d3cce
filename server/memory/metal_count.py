"""The count of Metal buffers, read from MLX's own allocator.

MLX keeps the number of resources it holds (live and pooled buffers) beside the device's limit, in a heap object
without a public getter. Owns the search for that word and the proof that it is the right one: the word before the
known limit, in an object that holds MLX's public figures too, which moves by exactly k when k buffers are made and
given back. Whatever doesn't fit is refused with a reason. Runs in the engine's main thread, once, before the model
loads. Never writes, and never reads a byte outside the object's own heap block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from server.memory import allocator
from server.memory.allocator import CountUnavailable

WORD = 8
WINDOW = 1024  # never look further, whatever the block's size
ROUNDS = (37, 11)
PROBE_FLOATS = 1024  # beyond the sizes that MLX serves from a heap of its own


@dataclass(frozen=True, slots=True)
class CountProbe:
    """What the proof needs of MLX; tests bring another."""

    facts: Callable[[], Mapping[str, int]]  # public figures that the same object keeps
    allocate: Callable[[int], Any]  # so many new buffers
    release: Callable[[Any], None]
    settle: Callable[[], None]  # nothing in flight, nothing pooled


class MetalCount:
    """Live and pooled buffers, by one aligned load; live ones alone once the pool was emptied."""

    name = "metal"
    reason = ""
    pooled = True

    def __init__(self, address: int, offset: int, limit: int) -> None:
        self.where = f"allocator()+0x{offset:x}"
        self.limit: int | None = limit
        self._word = ctypes.c_uint64.from_address(address + offset)

    def raw(self) -> int:
        return self._word.value

    def settled(self) -> int:
        mx.clear_cache()
        return self.raw()


def open_count(own_limit: int | None) -> MetalCount:
    """The count of this process; `own_limit` may only tighten the device's. Raises Unavailable."""
    if not mx.metal.is_available():
        raise CountUnavailable("no Metal on this machine")
    limit = int(mx.device_info(mx.Device(mx.gpu)).get("resource_limit", 0))
    if not limit:
        raise CountUnavailable("the device names no resource limit")
    address = allocator.address()
    offset = locate(address, block_size(address), limit, MLX)
    return MetalCount(address, offset, min(limit, own_limit or limit))


def block_size(address: int) -> int:
    """Usable bytes of the heap block that starts at the address; 0 when none does."""
    measure = ctypes.CDLL(None).malloc_size
    measure.restype = ctypes.c_size_t
    measure.argtypes = [ctypes.c_void_p]
    return int(measure(address))


def locate(address: int, block: int, limit: int, probe: CountProbe) -> int:
    """Offset of the count in the object, proved. Raises Unavailable."""
    if not address or address % WORD or block < 4 * WORD:
        raise CountUnavailable("the allocator isn't a heap block of known size")
    size = min(block, WINDOW)
    probe.settle()
    before = _words(address, size)
    if missing := sorted(name for name, value in probe.facts().items() if value not in before):
        raise CountUnavailable(f"the allocator doesn't hold the {missing[0]}")
    places = [i for i in range(len(before) - 1) if before[i + 1] == limit and before[i] <= limit]
    if not places:
        raise CountUnavailable("no word of the allocator equals the resource limit")
    for count in ROUNDS:
        moved = _moves(address, size, count, probe)
        places = [i for i in places if moved[i] == (count, count) and moved[i + 1] == (0, 0)]
    if len(places) != 1:
        raise CountUnavailable("no word moved with the buffers" if not places else "more than one word moved")
    return places[0] * WORD


def _moves(address: int, size: int, count: int, probe: CountProbe) -> list[tuple[int, int]]:
    """For each word, how far it rose with `count` new buffers and how far it fell without them."""
    probe.settle()
    before = _words(address, size)
    buffers = probe.allocate(count)
    during = _words(address, size)
    probe.release(buffers)
    probe.settle()
    after = _words(address, size)
    return [(high - low, high - end) for low, high, end in zip(before, during, after, strict=True)]


def _words(address: int, size: int) -> list[int]:
    return list((ctypes.c_uint64 * (size // WORD)).from_address(address))


def _facts() -> dict[str, int]:
    return {
        "memory limit": mx.get_memory_limit(),
        "active memory": mx.get_active_memory(),
        "peak memory": mx.get_peak_memory(),
    }


def _allocate(count: int) -> list[mx.array]:
    return [mx.array([0.0] * PROBE_FLOATS) for _ in range(count)]  # one buffer each, no work on the device


def _settle() -> None:
    mx.synchronize()
    mx.clear_cache()


MLX = CountProbe(_facts, _allocate, list.clear, _settle)
