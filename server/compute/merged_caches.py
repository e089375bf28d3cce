"""One forward pass for the prompts of several rows, and the caches that it leaves.

Owns `MergedCaches`, the caches of rows on their way from such a pass into a batch. Runs in the engine process's main
thread. Rows of different lengths are filled up on the right, as mlx-lm's own batches are; not every model takes that
well, which `model` finds out.

Taking a pass apart and merging its rows again to decode them would cost more than the pass where the host's time is
what counts, so rows that are read to the end stay together until they join a batch.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from server.cache_guard import Caches, cache_arrays, compact
from server.compute.cudnn_shapes import rows_read


def merged(rows: list[Caches]) -> Caches:
    """The rows' single caches as one batch of caches, not evaluated."""
    return [layers[0].merge(list(layers)) for layers in zip(*rows, strict=True)]


def read_together(model: Any, rows: list[Caches], tokens: list[list[int]]) -> Caches:
    """The rows' caches, merged, after a pass that read `tokens` [B][L_i ≥ 1] into them; the ones given are used up."""
    count = len(rows)
    copies = rows_read(count) - count
    rows = rows + rows[-1:] * copies
    tokens = tokens + tokens[-1:] * copies
    lengths = [len(ids) for ids in tokens]
    width = max(lengths)
    padding = [width - length for length in lengths]
    caches = merged(rows)
    if any(padding):
        for layer in caches:
            layer.prepare(lengths=lengths, right_padding=padding)
    model(mx.array([ids + [0] * spare for ids, spare in zip(tokens, padding, strict=True)]), cache=caches)
    for layer in caches:
        layer.finalize()  # without padding, too: recurrent layers would go on masking what isn't there at every step
    if copies:
        caches = kept(caches, list(range(count)), compacting=False)  # nothing is padding in all rows
    mx.eval(cache_arrays(caches))
    return caches


def taken_apart(caches: Caches, indices: list[int]) -> list[Caches]:
    """Compacted single caches of the rows at `indices`."""
    singles = [[layer.extract(i) for layer in caches] for i in indices]
    for layers in zip(*singles, strict=True):  # one wait a layer: a wait a row would cost more than the copies
        compact([list(layers)])
    return singles


def kept(caches: Caches, indices: list[int], *, compacting: bool) -> Caches:
    """The caches without the rows that aren't at `indices`, layer by layer so that only one has two copies.

    Not compacting leaves what mlx-lm leaves: views that pin the padding which `filter` cuts off.
    """
    index = mx.array(indices)
    for layer in caches:
        layer.filter(index)
        if compacting:
            compact([layer])
    return caches


class MergedCaches:
    """Merged caches of rows that are read and haven't joined a batch. Lives no longer than the loop's iteration."""

    def __init__(self, caches: Caches, seqs: list[int]) -> None:
        """`seqs[i]` names the row whose caches are at i."""
        self.caches = caches
        self.seqs = seqs
        self._singles: dict[int, Caches] = {}

    def single(self, seq: int) -> Caches:
        """A copy of one row's caches. Where a second one is wanted all will be, to be kept as prefixes."""
        if seq not in self._singles:
            wanted = [seq]
            if self._singles:
                wanted = [one for one in self.seqs if one not in self._singles]
            copies = taken_apart(self.caches, [self.seqs.index(one) for one in wanted])
            self._singles |= zip(wanted, copies, strict=True)
        return self._singles[seq]
