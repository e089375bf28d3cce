"""What was read of a row's caches: put together of files, ready to be given to MLX.

Owns the assembly. Runs in the reader's threads, with numpy alone.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from server.kv_store.files.record import ITEM_BYTES, DamagedFile, Head, PartHead, Tensor
from server.kv_store.layout import Layout, PartLayout, Tree

Bytes = np.ndarray[Any, Any]  # uint8
Memory = Mapping[int, tuple[Bytes, ...]]  # by a cache's place, the bytes of each of its arrays


@dataclass(frozen=True, slots=True)
class PartImage:
    """One cache: what is around its arrays, their forms, and the bytes [N] of each; `is_in_place` if those are MLX's
    own memory."""

    tree: Tree
    tensors: tuple[Tensor, ...]
    data: tuple[Bytes, ...]
    is_in_place: bool = False

    @property
    def upload_bytes(self) -> int:
        """Bytes that giving it to MLX copies."""
        if self.is_in_place:
            return 0
        return sum(data.nbytes for data in self.data)


@dataclass(frozen=True, slots=True)
class Image:
    """All caches of a row that holds `length` tokens."""

    length: int
    parts: tuple[PartImage, ...]

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for part in self.parts for data in part.data)


class Assembly:
    """Caches that are being put together. Files may come in any order and from several threads, each once."""

    def __init__(self, layout: Layout, length: int, from_state: int, memory: Memory | None = None) -> None:
        """`from_state`: a bit for each cache that the state has; the others come from pieces. `memory`: what those are
        written to, by their places; the host's if it is None."""
        self._layout = layout
        self._length = length
        self._from_state = from_state
        self._parts: list[PartImage | None] = [None] * len(layout.parts)
        own = memory or {}
        for place, part in enumerate(layout.parts):
            if not from_state >> place & 1:
                self._parts[place] = _empty(part, length, own.get(place))

    def add(self, head: Head, data: list[memoryview]) -> None:
        """Take a file. Raises DamagedFile if it isn't of this layout."""
        rest = iter(data)
        for part in head.parts:
            own = [next(rest) for _ in part.tensors]
            if head.kind == "state":
                self._take(part, own)
            elif not self._from_state >> part.part & 1:
                self._insert(head, part, own)

    def _take(self, part: PartHead, data: list[memoryview]) -> None:
        if not 0 <= part.part < len(self._parts):
            raise DamagedFile("layout", f"there is no cache {part.part}")
        if self._from_state >> part.part & 1:
            copies = tuple(_copy(view) for view in data)
            self._parts[part.part] = PartImage(part.tree, part.tensors, copies)

    def _insert(self, head: Head, part: PartHead, data: list[memoryview]) -> None:
        layout = self._layout.parts[part.part]
        image = self._parts[part.part]
        assert image is not None
        if len(part.tensors) != len(layout.leaves):
            raise DamagedFile("layout", f"cache {part.part} has {len(part.tensors)} arrays")
        for leaf, tensor, view, whole in zip(layout.leaves, part.tensors, data, image.data, strict=True):
            if tensor != leaf.tensor(head.end - head.start):
                raise DamagedFile("layout", f"an array of cache {part.part} has another form")
            target = shaped(whole, leaf.with_room(self._length))
            before = (slice(None),) * leaf.axis
            wanted = min(head.end, self._length) - head.start
            target[(*before, slice(head.start, head.start + wanted))] = shaped(view, tensor)[(*before, slice(wanted))]

    def finished(self) -> Image:
        """The whole. Raises DamagedFile if a cache is missing."""
        whole = [part for part in self._parts if part is not None]
        if len(whole) < len(self._parts):
            raise DamagedFile("layout", "a cache is missing")
        return Image(self._length, tuple(whole))


def _empty(part: PartLayout, length: int, memory: tuple[Bytes, ...] | None) -> PartImage:
    if part.tree is None:
        raise DamagedFile("layout", "a cache of constant size is in no state")
    tensors = tuple(leaf.with_room(length) for leaf in part.leaves)
    if memory is not None:
        return PartImage(part.tree, tensors, memory, is_in_place=True)
    return PartImage(part.tree, tensors, tuple(_room(tensor.nbytes) for tensor in tensors))


def _room(size: int) -> Bytes:
    """`size` bytes of the system's, which are zero. numpy asks for huge pages for its own, and a system that has to
    clear those first takes several times as long to give them as all the rest of a reading."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8, size)


def _copy(view: memoryview) -> Bytes:
    copied = _room(len(view))
    copied[:] = np.frombuffer(view, np.uint8)
    return copied


def shaped(data: Bytes | memoryview, tensor: Tensor) -> Bytes:
    """The bytes as items of their width, in the array's shape; no copy."""
    items: Bytes = np.frombuffer(data, np.dtype(f"u{ITEM_BYTES[tensor.dtype]}"))
    return items.reshape(tensor.shape)
