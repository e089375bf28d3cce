"""How one model's caches are laid out: which of them grow by a position a token, and the form of their arrays.

Owns plain values alone: what was learned of the model by `trial`, and the digest that keeps files of one layout from
being taken for those of another. Used by every thread of the store.

A *tree* is what a cache holds around its arrays, as plain values: ["array", n], ["value", scalar], ["length"] for a
number that is the count of positions, ["list" | "tuple" | "deque", items], ["dict" | "object", [[name, tree], …]], or
["fresh"] for what a fresh cache has already and no token changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from server.kv_store.files.keys import digest
from server.kv_store.files.record import PartHead, Tensor

Tree = list[Any]
Path = tuple[str | int, ...]  # names of attributes and keys, places in sequences

STATE_SHARE = 8  # a state may be so many times larger than the positions saved with it
POSITION_BYTES = 4096  # assumed of a model without any cache that grows


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
class StateLayout:
    """A cache of constant size around whose arrays nothing ever changes, as a recurrent layer's.

    Attributes:
        paths: to each of its arrays, in order.
        is_by_row: whether a merged cache has each row's arrays at its place on their first axis, by the same paths.
    """

    tree: Tree
    paths: tuple[Path, ...]
    is_by_row: bool = False


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One cache.

    Attributes:
        tree: of a cache that grows; None if it is of constant size.
        turns: whether it may cease to grow, as a window does that turns over.
        merged_end: the attribute of the merged cache that says where its rows end; None if its rows must be extracted.
        state: of a cache of constant size whose arrays alone say all; None of others.
    """

    kind: str
    tree: Tree | None = None
    leaves: tuple[LeafLayout, ...] = ()
    constant: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape of its arrays after a few tokens
    turns: bool = False
    merged_end: str | None = None
    state: StateLayout | None = None

    @property
    def grows(self) -> bool:
        return self.tree is not None

    @property
    def position_bytes(self) -> int:
        """Bytes that a position takes."""
        return sum(leaf.tensor(1).nbytes for leaf in self.leaves)

    def state_tensors(self, rows: int = 1) -> tuple[Tensor, ...]:
        """The forms of a state's arrays, with so many rows on their first axis; none of other caches."""
        if self.state is None:
            return ()
        return tuple(Tensor(dtype, (rows, *shape[1:])) for dtype, shape in self.constant)


@dataclass(frozen=True)
class Layout:
    """All caches of a model, those inside a list of caches one by one. What each step asks for is summed up once."""

    parts: tuple[PartLayout, ...]

    @property
    def everything(self) -> int:
        """A bit for each cache."""
        return (1 << len(self.parts)) - 1

    @property
    def growing(self) -> int:
        """A bit for each cache that grows."""
        return sum(1 << place for place, part in enumerate(self.parts) if part.grows)

    @cached_property
    def position_bytes(self) -> int:
        """Bytes that a position takes in the caches that grow."""
        return sum(part.position_bytes for part in self.parts)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of a row's states, of caches whose arrays alone say all."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.state_tensors())

    def piece(self, positions: int, rows: int = 1) -> tuple[PartHead, ...]:
        """The forms of a piece that has so many positions of all caches that grow, of so many rows on the first
        axis."""
        return tuple(
            PartHead(place, None, tuple(leaf.tensor(positions, rows) for leaf in part.leaves))
            for place, part in enumerate(self.parts)
            if part.grows
        )

    def states(self, rows: int = 1) -> tuple[PartHead, ...]:
        """The forms of what so many rows have of the caches whose arrays alone say all."""
        return tuple(
            PartHead(place, part.state.tree, part.state_tensors(rows))
            for place, part in enumerate(self.parts)
            if part.state is not None
        )

    def digest(self) -> bytes:
        """Kinds, dtypes and shapes; how a merged cache is read doesn't count."""
        return digest(msgspec.msgpack.encode([_described(part) for part in self.parts]))


def tokens_for_a_state(state_bytes: int, position_bytes: int) -> int:
    """Tokens that come between two states of such a size, so that these take no more than their share of what is
    written."""
    return state_bytes // (STATE_SHARE * max(position_bytes, POSITION_BYTES))


def _described(part: PartLayout) -> list[Any]:
    if part.grows:
        return [part.kind, part.tree, [_form(leaf) for leaf in part.leaves]]
    return [part.kind, part.constant]


def _form(leaf: LeafLayout) -> list[Any]:
    shape = list(leaf.shape)
    shape[leaf.axis] = -1
    return [leaf.path, leaf.dtype, shape]
