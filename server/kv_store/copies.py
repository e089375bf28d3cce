"""Rows' caches copied out of MLX, and put back.

Owns nothing. Runs in the engine's main thread, which alone touches arrays. What is copied out is bytes with a form;
what is put back is whole arrays, one for each that a cache holds, so that a restored row has as many live buffers as
one that was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from server.cache_guard import Caches, parts
from server.kv_store.destination import Destination
from server.kv_store.files.record import PartHead, Tensor
from server.kv_store.image import Image, PartImage
from server.kv_store.layout import Layout, LeafLayout, PartLayout, Tree
from server.kv_store.trees import Leaves, at, dismantle, rebuilt, says
from server.kv_store.trial import cut, merged_positions


@dataclass(frozen=True, slots=True)
class CacheSource:
    """Where a row's caches are.

    Attributes:
        held: tokens that they hold.
        row: its place in merged caches; None for caches of its own.
    """

    caches: Caches
    held: int
    row: int | None = None


@dataclass(frozen=True, slots=True)
class FileContent:
    """What was copied of one file: its caches' forms and bytes."""

    parts: tuple[PartHead, ...]
    data: tuple[bytes, ...]


class RowCopy:
    """One row's caches as they are now; nothing of it may outlive the iteration."""

    def __init__(self, layout: Layout, source: CacheSource) -> None:
        self._layout = layout
        self._held = source.held
        self._row = source.row
        self._views = [_View(part, own, source) for part, own in zip(layout.parts, parts(source.caches), strict=True)]

    @property
    def growing(self) -> int:
        """A bit for each cache that holds all positions."""
        return sum(1 << place for place, view in enumerate(self._views) if view.grows)

    @property
    def position_bytes(self) -> int:
        """Bytes that a position takes in the caches that hold all of them."""
        growing = self.growing
        return sum(part.position_bytes for place, part in enumerate(self._layout.parts) if growing >> place & 1)

    @property
    def state_bytes(self) -> int:
        """Bytes of the caches that are of constant size."""
        return sum(array.nbytes for view in self._views if not view.grows for array in view.arrays)

    def pieces(self, spans: Sequence[tuple[int, int]]) -> list[FileContent]:
        """Copy positions of all caches that hold them, for each span."""
        return _copied([list(self._piece(first, last)) for first, last in spans])

    def state(self) -> FileContent:
        """Copy the caches of constant size."""
        places = [place for place, view in enumerate(self._views) if not view.grows]
        return _copied([[(place, self._views[place].tree, self._views[place].arrays) for place in places]])[0]

    def _piece(self, first: int, last: int) -> Iterator[tuple[int, Tree | None, list[mx.array]]]:
        for place, view in enumerate(self._views):
            if view.grows:
                yield place, None, view.positions(first, last)


class _View:
    """One cache of one row, whether it is its own or merged with others'."""

    def __init__(self, part: PartLayout, own: Any, source: CacheSource) -> None:
        self._part = part
        self._held = source.held
        self._row = source.row
        self._own = own
        self.tree: Tree | None = None
        self.arrays: list[mx.array] = []
        self.grows = True
        if source.row is not None and part.merged_end is None:
            self._own = own.extract(source.row)
            self._row = None
        if self._row is None:
            self.tree, leaves = dismantle(self._own)
            self.arrays = leaves.arrays
            self.grows = part.tree is not None and says(part.tree, self.tree, self._held) and self._has_all(leaves)

    def _has_all(self, leaves: Leaves) -> bool:
        """Whether each array has room for all positions."""
        sizes = [array.shape[leaf.axis] for array, leaf in zip(leaves.arrays, self._part.leaves, strict=True)]
        return min(sizes, default=self._held) >= self._held

    def positions(self, first: int, last: int) -> list[mx.array]:
        return [self._cut(leaf, first, last) for leaf in self._part.leaves]

    def _cut(self, leaf: LeafLayout, first: int, last: int) -> mx.array:
        if self._row is None:
            return cut(at(self._own, leaf.path), leaf.axis, first, last)
        begin = getattr(self._own, str(self._part.merged_end)) - self._held
        return merged_positions(self._own, leaf, self._row, begin + first, begin + last)


def _copied(files: list[list[tuple[int, Tree | None, list[mx.array]]]]) -> list[FileContent]:
    """Copy all arrays of some files, evaluated together."""
    copied = [[[flat(array) for array in arrays] for _, _, arrays in file] for file in files]
    mx.eval(copied)
    return [
        FileContent(
            tuple(
                PartHead(place, tree, tuple(Tensor(dtype_name(array), array.shape) for array in arrays))
                for place, tree, arrays in file
            ),
            tuple(np.asarray(array).tobytes() for arrays in own for array in arrays),
        )
        for file, own in zip(files, copied, strict=True)
    ]


def dtype_name(array: mx.array) -> str:
    """An array's dtype as files have it."""
    return str(array.dtype).removeprefix("mlx.core.")


def flat(array: mx.array) -> mx.array:
    """Its bytes [N] in a buffer of their own."""
    return mx.view(mx.contiguous(array).reshape(-1), mx.uint8)


# ---------------------------------------------------------------- back
def restored(part: PartImage, fresh: Any, length: int, own: Sequence[mx.array] = ()) -> Any:
    """Fill a fresh cache with what was read for it, evaluated; `own`: the arrays whose memory it was read to, as
    unsigned numbers. Raises UnknownCache if it doesn't take that."""
    if part.is_in_place:
        pairs = zip(part.tensors, own, strict=True)
        arrays = [mx.view(array, getattr(mx, tensor.dtype)).reshape(tensor.shape) for tensor, array in pairs]
    else:
        arrays = [_array(tensor, data) for tensor, data in zip(part.tensors, part.data, strict=True)]
    mx.eval(arrays)
    return rebuilt(part.tree, fresh, arrays, length)


def _array(tensor: Tensor, data: np.ndarray[Any, Any]) -> mx.array:
    """`data` [N] uint8 as an array of its own."""
    dtype = getattr(mx, tensor.dtype)
    if tensor.dtype == "bool":
        return mx.array(data.astype(np.bool_)).reshape(tensor.shape)
    width = np.dtype(f"u{dtype.size}")
    flat = mx.array(data.view(width))
    return mx.view(flat, dtype).reshape(tensor.shape)


def put_back(destination: Destination, image: Image, fresh: Caches, first: int = 0, last: int | None = None) -> None:
    """Fill the fresh caches from `first` to `last`, those inside a list of caches counted one by one, with what was
    read, partly into `destination`."""
    places = list(enumerate(zip(image.parts, parts(fresh), strict=True)))
    for place, (part, own) in places[first:last]:
        arrays: list[mx.array] = []
        if part.is_in_place:
            arrays = destination.take(place)
        restored(part, own, image.length, arrays)
