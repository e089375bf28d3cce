"""One forward pass for the prompts of several rows.

Owns nothing; runs in the engine process's main thread. Rows come with single caches and leave with single caches, so
nothing of a pass outlives it. Rows of different lengths are filled up on the right, as mlx-lm's own batches are; not
every model takes that well, which `model` finds out.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from server.cache_guard import cache_arrays, compact


def read_together(model: Any, rows: list[list[Any]], tokens: list[list[int]]) -> list[list[Any]]:
    """The rows' single caches after a pass that read `tokens` [B][L_i ≥ 1] into them; the ones given are used up."""
    lengths = [len(ids) for ids in tokens]
    width = max(lengths)
    padding = [width - length for length in lengths]
    merged = [layers[0].merge(list(layers)) for layers in zip(*rows, strict=True)]
    if any(padding):
        for layer in merged:
            layer.prepare(lengths=lengths, right_padding=padding)
    model(mx.array([ids + [0] * spare for ids, spare in zip(tokens, padding, strict=True)]), cache=merged)
    if any(padding):
        for layer in merged:
            layer.finalize()
    mx.eval(cache_arrays(merged))
    singles = [[layer.extract(i) for layer in merged] for i in range(len(rows))]
    for layers in zip(*singles, strict=True):  # one wait a layer: a wait a row would cost more than the copies
        compact([list(layers)])
    return singles
