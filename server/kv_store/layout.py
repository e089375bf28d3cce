"""How one model's caches are laid out: which of them grow by a position a token, and the form of their arrays.

Owns plain values alone: what was learned of the model by `trial`, and the digest that keeps files of one layout from
being taken for those of another. Used by every thread of the store.

A *tree* is what a cache holds around its arrays, as plain values: ["array", n], ["value", scalar], ["length"] for a
number that is the count of positions, ["list" | "tuple" | "deque", items], ["dict" | "object", [[name, tree], …]], or
["fresh"] for what a fresh cache has already and no token changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from server.kv_store.files.keys import digest
from server.kv_store.files.record import PartHead, Tensor

Tree = list[Any]
Path = tuple[str | int, ...]  # names of attributes and keys, places in sequences


@dataclass(frozen=True, slots=True)
class LeafLayout:
    """One array of a cache that grows: where it sits, and its form but for the size of `axis`.

    Attributes:
        step: positions by which it is made longer when it is full; 1 if it never has room to spare.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    axis: int
    step: int = 1

    def tensor(self, positions: int, rows: int = 1) -> Tensor:
        """Its form with so many positions, and with so many rows where rows lie on the first axis."""
        shape = list(self.shape)
        if rows > 1:
            shape[0] = rows
        shape[self.axis] = positions
        return Tensor(self.dtype, tuple(shape))

    def with_room(self, positions: int) -> Tensor:
        """The same with room for one more where it grows by steps, so that the next token doesn't begin with a copy of
        all."""
        if self.step == 1:
            return self.tensor(positions)
        return self.tensor((positions // self.step + 1) * self.step)


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One cache.

    Attributes:
        tree: of a cache that grows; None if it is of constant size.
        turns: whether it may cease to grow, as a window does that turns over.
        merged_end: the attribute of the merged cache that says where its rows end; None if its rows must be extracted.
    """

    kind: str
    tree: Tree | None = None
    leaves: tuple[LeafLayout, ...] = ()
    constant: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape of its arrays after a few tokens
    turns: bool = False
    merged_end: str | None = None

    @property
    def grows(self) -> bool:
        return self.tree is not None

    @property
    def position_bytes(self) -> int:
        """Bytes that a position takes."""
        return sum(leaf.tensor(1).nbytes for leaf in self.leaves)


@dataclass(frozen=True, slots=True)
class Layout:
    """All caches of a model, those inside a list of caches one by one."""

    parts: tuple[PartLayout, ...]

    @property
    def everything(self) -> int:
        """A bit for each cache."""
        return (1 << len(self.parts)) - 1

    @property
    def position_bytes(self) -> int:
        """Bytes that a position takes in the caches that grow."""
        return sum(part.position_bytes for part in self.parts)

    def piece(self, positions: int, rows: int = 1) -> tuple[PartHead, ...]:
        """The forms of a piece that has so many positions of all caches, of so many rows on the first axis."""
        return tuple(
            PartHead(place, None, tuple(leaf.tensor(positions, rows) for leaf in part.leaves))
            for place, part in enumerate(self.parts)
        )

    def digest(self) -> bytes:
        """Kinds, dtypes and shapes; how a merged cache is read doesn't count."""
        return digest(msgspec.msgpack.encode([_described(part) for part in self.parts]))


def _described(part: PartLayout) -> list[Any]:
    if part.grows:
        return [part.kind, part.tree, [_form(leaf) for leaf in part.leaves]]
    return [part.kind, part.constant]


def _form(leaf: LeafLayout) -> list[Any]:
    shape = list(leaf.shape)
    shape[leaf.axis] = -1
    return [leaf.path, leaf.dtype, shape]
