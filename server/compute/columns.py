"""What a batch keeps of each of its rows, as columns in the order of the rows.

Owns a batch's caches, next inputs and penalties; the log probabilities and the grammars are columns of modules of
their own. Used in the engine process's main thread. A column never decides who joins or leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from server.cache_guard import Caches, Guard, pack
from server.compute.merged_caches import MergedCaches, kept, merged
from server.compute.penalties import LogitAdjustments
from server.compute.rows import Row


class Column(Protocol):
    """One thing that a batch keeps of each row. A batch passes each change of its rows on to all its columns."""

    def join(self, rows: Sequence[Row]) -> None:
        """Take what these rows bring, behind the rows that are here."""

    def keep(self, indices: list[int]) -> None:
        """Keep only the rows at `indices`, in that order."""

    def extract(self, i: int, row: Row) -> None:
        """Put into `row`, which is at i, what it needs to join a batch again."""


class KV:
    """The rows' caches: single ones for a lone row, else mlx-lm's merged ones, evaluated layer by layer."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._count = 0
        self.layers: Caches = []

    def join(self, rows: Sequence[Row]) -> None:
        """The rows must come in the order of `in_cache_order`."""
        if not self._count and len(rows) == 1:
            self.layers = rows[0].single()
        else:
            self._extend(rows)
        self._count += len(rows)

    def _extend(self, rows: Sequence[Row]) -> None:
        blocks = _blocks(rows)
        if self._count == 1:
            self.layers = merged([self.layers])
        if not self._count:
            self.layers, *blocks = blocks
            self._guard.settle(self.layers)
        for block in blocks:
            for mine, other in zip(self.layers, block, strict=True):
                mine.extend(other)
                self._guard.settle([mine])

    def keep(self, indices: list[int]) -> None:
        if not indices:
            self.layers = []
        elif len(indices) == 1:
            self.layers = self.single(indices[0])
        else:
            self.layers = kept(self.layers, indices, compacting=self._guard.enabled)
        self._count = len(indices)

    def extract(self, i: int, row: Row) -> None:
        row.caches = self.single(i)

    def single(self, i: int) -> Caches:
        """Return row i's own caches, compacted: what outlives its batch must not pin the batch's buffers."""
        caches = self.layers
        if self._count > 1:
            caches = [layer.extract(i) for layer in self.layers]
        pack(caches)
        return caches


def in_cache_order(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in the order that their caches will have: whole passes first, then the others."""
    ordered = [row for _, own in _whole_passes(rows) for row in own]
    placed = {row.seq for row in ordered}
    return ordered + [row for row in rows if row.seq not in placed]


def _blocks(rows: Sequence[Row]) -> list[Caches]:
    """Return merged caches in the order of `in_cache_order`: those of whole passes as they are, the others merged."""
    passes = _whole_passes(rows)
    placed = {row.seq for _, own in passes for row in own}
    rest = [row for row in rows if row.seq not in placed]
    blocks = [shared.caches for shared, _ in passes]
    if rest:
        blocks.append(merged([row.single() for row in rest]))
    return blocks


def _whole_passes(rows: Sequence[Row]) -> list[tuple[MergedCaches, list[Row]]]:
    """Return the passes all of whose rows are here, and these in the order of the pass's caches."""
    here = {row.seq: row for row in rows}
    passes = {id(row.shared): row.shared for row in rows if row.shared is not None}
    return [(one, [here[seq] for seq in one.seqs]) for one in passes.values() if here.keys() >= set(one.seqs)]


class Inputs:
    """The next input of each row, and where in its output the draw after it stands."""

    def __init__(self) -> None:
        self.ids: mx.array | None = None  # [B] uint32
        self.known: list[int] = []  # rows whose input is their last token: of the prompt, or fetched before its pass
        self.positions = np.zeros(0, dtype=np.int64)  # [B] output position of the next draw

    def join(self, rows: Sequence[Row]) -> None:
        count = len(self.positions)
        arrays = [_next_input(row) for row in rows]
        if self.ids is not None:
            arrays = [self.ids, *arrays]
        self.ids = mx.concatenate([array.astype(mx.uint32) for array in arrays])
        self.known += [count + i for i, row in enumerate(rows) if row.pending is None]
        drawn = [row.produced + (row.pending is not None) for row in rows]
        self.positions = np.concatenate([self.positions, np.array(drawn, dtype=np.int64)])

    def keep(self, indices: list[int]) -> None:
        assert self.ids is not None
        if not indices:
            self.ids = None
        elif len(indices) == 1:
            self.ids = self.ids[indices[0] : indices[0] + 1]
        else:
            self.ids = self.ids[mx.array(indices)]
        place = {old: new for new, old in enumerate(indices)}
        self.known = [place[i] for i in self.known if i in place]
        self.positions = self.positions[indices]

    def extract(self, i: int, row: Row) -> None:
        if i not in self.known:
            assert self.ids is not None
            row.pending = self.ids[i : i + 1]
            mx.eval(row.pending)

    def advance(self, drawn: mx.array) -> None:
        """Take the ids [B] drawn in this step as the next inputs."""
        self.ids = drawn
        self.positions += 1

    def unknown(self) -> list[int]:
        """Return the rows whose newest token has not been read."""
        known = set(self.known)
        return [i for i in range(len(self.positions)) if i not in known]


def _next_input(row: Row) -> mx.array:
    """The pending draw of a row that left a batch, or the last token of one that has read its prompt."""
    if row.pending is not None:
        return row.pending
    return mx.array([row.tokens[-1]])


class Penalties:
    """Bias, penalties and held-back ids of the rows that ask for them."""

    def __init__(self) -> None:
        self._penalty_counts = LogitAdjustments([])

    def join(self, rows: Sequence[Row]) -> None:
        self._penalty_counts = self._penalty_counts.join(
            LogitAdjustments([(row.sequence, row.tokens, row.penalty_counts) for row in rows])
        )

    def keep(self, indices: list[int]) -> None:
        self._penalty_counts = self._penalty_counts.filter(indices)

    def extract(self, i: int, row: Row) -> None:
        row.penalty_counts = self._penalty_counts.extract(i)

    def apply(self, logits: mx.array, positions: np.ndarray[Any, Any]) -> mx.array:
        """Return adjusted logits [B, V]; `positions` [B] of the draws in the rows' outputs."""
        return self._penalty_counts.apply(logits, positions)

    def count(self, drawn: mx.array) -> list[mx.array]:
        """Take the drawn ids [B] into the counts; returns the arrays to be evaluated with the draw.

        A chain of updates that no logit has read yet would leak buffers.
        """
        self._penalty_counts.count(drawn)
        return self._penalty_counts.state
