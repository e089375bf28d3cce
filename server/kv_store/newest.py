"""The newest positions and the states of all rows of a batch, copied by the step that adds the last of them.

Owns nothing. Runs in the engine's main thread, which alone touches arrays. The copy is part of the step's own graph: it
costs no submission and no wait of its own, and once the step is read it can be taken.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import mlx.core as mx

from server.cache_guard import Caches, parts
from server.kv_store.layout import Layout, PartLayout
from server.kv_store.trees import UnknownCache, at
from server.kv_store.trial import cut


def has_newest(layout: Layout, rows: int) -> bool:
    """Whether a row can go on from positions and states, and they can be found in the caches of so many rows."""
    return all(_is_found(part, rows) for part in layout.parts)


def _is_found(part: PartLayout, rows: int) -> bool:
    if part.state is not None:
        return rows == 1 or part.state.is_by_row
    return part.grows and not part.turns and (rows == 1 or part.merged_end is not None)


def newest(layout: Layout, caches: Caches, positions: int, held: int, rows: int) -> mx.array:
    """The last positions of every row, all caches' one after the other, and behind them all states, as bytes [N]; not
    yet evaluated.

    `held`: tokens that the caches hold of a lone row. Rows that hold fewer than `positions` bring what is before them.
    Raises UnknownCache for a state that has another form than it had.
    """
    copied: list[mx.array] = []
    states: list[mx.array] = []
    for part, own in zip(layout.parts, parts(caches), strict=True):
        states += _state(part, own, rows)
        end = held
        if rows > 1 and part.leaves:
            end = getattr(own, str(part.merged_end))
        copied += [cut(at(own, leaf.path), leaf.axis, end - positions, end) for leaf in part.leaves]
    return _joined(copied + states)


def _state(part: PartLayout, own: Any, rows: int) -> list[mx.array]:
    """The arrays of a state; none of another cache."""
    if part.state is None:
        return []
    arrays = [at(own, path) for path in part.state.paths]
    if [array.shape for array in arrays] != [tensor.shape for tensor in part.state_tensors(rows)]:
        raise UnknownCache(f"{part.kind} has changed its form")
    return arrays


def _joined(arrays: list[mx.array]) -> mx.array:
    """The bytes of arrays, one after the other. Neighbours of one form are joined as they are: a copy of each, and then
    one of all, would be twice the work."""
    runs = [mx.concatenate(list(run)) for _, run in groupby(arrays, lambda array: (array.dtype, array.shape[1:]))]
    return mx.concatenate([mx.view(run.reshape(-1), mx.uint8) for run in runs])


def on_host(copied: mx.array, memory: bytearray) -> memoryview:
    """The bytes of a copy, in `memory`; waits for the step that it was submitted with."""
    view = memoryview(memory)[: copied.size]
    view[:] = memoryview(copied)  # type: ignore[arg-type]
    return view
