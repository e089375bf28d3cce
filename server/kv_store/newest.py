"""The newest positions of all rows of a batch, copied by the step that adds the last of them.

Owns nothing. Runs in the engine's main thread, which alone touches arrays. The copy is part of the step's own graph: it
costs no submission and no wait of its own, and once the step is read it can be taken.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from server.cache_guard import Caches, parts
from server.kv_store.copies import flat
from server.kv_store.layout import Layout
from server.kv_store.trees import at
from server.kv_store.trial import cut


def has_newest(layout: Layout, rows: int) -> bool:
    """Whether a row can go on from positions alone, and they can be found in the caches of so many rows."""
    whole = all(part.grows and not part.turns for part in layout.parts)
    return whole and (rows == 1 or all(part.merged_end is not None for part in layout.parts))


def newest(layout: Layout, caches: Caches, positions: int, held: int, rows: int) -> mx.array:
    """The last positions of every row, all caches' one after the other, as bytes [N]; not yet evaluated.

    `held`: tokens that the caches hold of a lone row. Rows that hold fewer than `positions` bring what is before them.
    """
    copied: list[mx.array] = []
    for part, own in zip(layout.parts, parts(caches), strict=True):
        end = held
        if rows > 1:
            end = getattr(own, str(part.merged_end))
        copied += [flat(cut(at(own, leaf.path), leaf.axis, end - positions, end)) for leaf in part.leaves]
    return mx.concatenate(copied)


def on_host(copied: mx.array) -> bytes:
    """The bytes of a copy; waits for the step that it was submitted with."""
    return np.asarray(copied).tobytes()
