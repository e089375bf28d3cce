"""Memory of MLX's for caches that are read from disk, so that each byte is written once, to where it stays.

Owns the arrays until a row takes them. The engine's main thread allocates them, some at a time, while the reader's
threads read files; those write through numpy's views, and the main thread touches no array before they are done.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from threading import Event
from typing import Any

import mlx.core as mx
import numpy as np

from server.kv_store.files.record import ITEM_BYTES, Tensor
from server.kv_store.image import Bytes, Memory
from server.kv_store.layout import Layout


class Destination:
    """The arrays of those caches that are put together of pieces."""

    def __init__(self, layout: Layout, length: int, from_state: int) -> None:
        """`length`: tokens; `from_state`: a bit for each cache that a state brings, for which there is nothing here."""
        growing = [place for place, part in enumerate(layout.parts) if part.grows and not from_state >> place & 1]
        self._arrays: dict[int, list[mx.array]] = {place: [] for place in growing}
        self._wanted = deque(
            (place, leaf.with_room(length)) for place in growing for leaf in layout.parts[place].leaves
        )
        self._views: dict[int, tuple[Bytes, ...]] | None = None
        self._settled = Event()
        if not shares_memory() or any("bool" in tensor.dtype for _, tensor in self._wanted):
            self.give_up()

    # ------------------------------------------------------------ main thread
    @property
    def is_settled(self) -> bool:
        """Whether all arrays are there, or there will be none."""
        return self._settled.is_set()

    def allocate(self, most: int) -> int:
        """Allocate arrays until that takes `most` bytes or more; returns what it took."""
        size = 0
        while self._wanted and size < most and not self.is_settled:
            place, tensor = self._wanted.popleft()
            self._arrays[place].append(_zeros(tensor))
            size += tensor.nbytes
        if not self._wanted and not self.is_settled:
            self._views = {place: tuple(map(_view, arrays)) for place, arrays in self._arrays.items()}
            self._settled.set()
        return size

    def give_up(self) -> None:
        """There will be no such memory; harmless once there is."""
        self._settled.set()

    def take(self, place: int) -> list[mx.array]:
        """The arrays of the cache at `place`, whose memory nothing writes to any more."""
        self._views = None
        return self._arrays.pop(place)

    # ------------------------------------------------------------ the reader's threads
    def views(self) -> Memory | None:
        """Wait until all arrays are there; None if there are none."""
        self._settled.wait()
        return self._views


def _zeros(tensor: Tensor) -> mx.array:
    """Its items as unsigned numbers of their width, evaluated."""
    array = mx.zeros(tensor.shape, getattr(mx, f"uint{8 * ITEM_BYTES[tensor.dtype]}"))
    mx.eval(array)
    return array


def _view(array: mx.array) -> Bytes:
    view: np.ndarray[Any, Any] = np.array(array, copy=False)
    return view.reshape(-1).view(np.uint8)


@cache
def shares_memory() -> bool:
    """Whether what is written through numpy's view of an array is in the array, as on devices that share the host's
    memory."""
    array = mx.zeros(1 << 12, mx.uint16)
    mx.eval(array)
    try:
        _view(array)[0] = 1
    except (ValueError, RuntimeError, BufferError):
        return False
    return bool((array[0] == 1).item())
