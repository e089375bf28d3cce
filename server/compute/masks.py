"""The grammars of a batch's rows: which tokens may be drawn next.

Owns no grammar, only which rows have one. Used in the engine process's main thread, which is where a mask is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from server.compute.rows import Row

Masks = np.ndarray[Any, Any]  # packed int32 [C, W], one line a constrained row
Failures = list[tuple[Row, str]]  # rows that can't go on, and why


class MaskColumn:
    """Which rows of a batch are constrained."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self.constrained: list[int] = []

    def join(self, rows: Sequence[Row]) -> None:
        self._hold([*self._rows, *rows])

    def keep(self, indices: list[int]) -> None:
        self._hold([self._rows[i] for i in indices])

    def _hold(self, rows: list[Row]) -> None:
        self._rows = rows
        self.constrained = [i for i, row in enumerate(rows) if row.constraint is not None]

    def extract(self, i: int, row: Row) -> None:
        """Do nothing: a row carries its grammar with it."""

    def advance(self, tokens: list[int], known: list[int], failed: Failures) -> Masks:
        """Give each grammar the newest token and return what may follow: packed masks [C, W].

        A row whose grammar can't go on is added to `failed`; it ends with this step, and until then draws anything.
        """
        self.accept(tokens, known, failed)
        masks = [self._mask(self._rows[i], failed) for i in self.constrained]
        width = max((len(mask) for mask in masks if mask is not None), default=0)
        everything = np.full(width, -1, dtype=np.int32)
        return np.stack([everything if mask is None else mask for mask in masks])

    @staticmethod
    def _mask(row: Row, failed: Failures) -> np.ndarray[Any, Any] | None:
        if any(row is lost for lost, _ in failed):
            return None
        try:
            assert row.constraint is not None
            return row.constraint.mask()
        except Exception as error:  # the grammar's library may raise anything
            failed.append((row, f"the grammar can't go on: {error}"))
            return None

    def accept(self, tokens: list[int], known: list[int], failed: Failures) -> None:
        """Give each grammar the newest token, unless it is one of the `known` rows, whose grammar has it."""
        for i in self.constrained:
            row = self._rows[i]
            assert row.constraint is not None
            try:
                if i not in known:
                    row.constraint.accept(tokens[i])
            except Exception as error:
                failed.append((row, f"the grammar can't go on: {error}"))

    def apply(self, logits: mx.array, masks: Masks) -> mx.array:
        """Return `logits` [B, V] with what the masks don't allow at -inf."""
        if not masks.shape[1]:  # every grammar has failed
            return logits
        bits = (mx.array(masks)[:, :, None] >> mx.arange(32, dtype=mx.int32)) & 1
        allowed = bits.reshape(len(masks), -1)[:, : logits.shape[-1]].astype(mx.bool_)
        if len(self.constrained) == len(self._rows):
            return mx.where(allowed, logits, -mx.inf)
        index = mx.array(self.constrained)
        logits = mx.array(logits)  # the caller's own is still to be scored
        logits[index] = mx.where(allowed, logits[index], -mx.inf)
        return logits
