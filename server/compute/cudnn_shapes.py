"""Fewer shapes where the device makes a plan for each.

Owns no state. On CUDA MLX hands attention and convolutions to cuDNN, which plans every shape that it hasn't seen: an
attention some 55 ms, a convolution some 210 ms, where running it takes a tenth of a millisecond (an H200, MLX 0.32).
Rows come and go, so a recurrent model met a new shape with each number of rows. Here passes of several prompts are
filled up to few numbers of rows, and a depthwise convolution is what it is by definition, a weighted sum of shifted
copies of its input, in one kernel for all shapes. Runs in the engine's main thread.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from server.ipc.probe import LARGEST_CHUNK

CHUNK_GROWTH, PLANNED_CHUNK_GROWTH = 2, 8
LONG_CHUNKS = 8  # times the chunk that is the longest elsewhere
LONGEST_KERNEL = 8  # taps; with more, reading the input so many times would cost more than a plan


def is_planned() -> bool:
    """Whether the device plans shapes."""
    return mx.cuda.is_available()


# ---------------------------------------------------------------- passes over prompts
# Each chunk of a prompt attends to another number of tokens before it, so each is a shape of its own: where shapes are
# planned, few long chunks are read instead of many.
def longest_chunk() -> int:
    """Tokens of a prompt that a pass may read."""
    if not is_planned():
        return LARGEST_CHUNK
    return LONG_CHUNKS * LARGEST_CHUNK


def chunk_growth() -> int:
    """How many times the longest chunk so far the next one may have, if the time that it took allows."""
    if not is_planned():
        return CHUNK_GROWTH
    return PLANNED_CHUNK_GROWTH


def rows_read(count: int) -> int:
    """How many rows a pass over `count` prompts has: where shapes are planned, the next power of two."""
    if not is_planned():
        return count
    return 1 << (count - 1).bit_length()


def most_read(rows: int) -> int:
    """The most prompts that a pass of up to `rows` ≥ 1 rows reads."""
    if not is_planned():
        return rows
    return 1 << (rows.bit_length() - 1)


# ---------------------------------------------------------------- convolutions
def avoid() -> None:
    """Where shapes are planned, let no `nn.Conv1d` be that needn't. Call it before the model loads."""
    if is_planned():
        _replace()


def _replace() -> None:
    original = nn.Conv1d.__call__

    def call(self: Any, x: mx.array) -> mx.array:
        if not _is_short_and_depthwise(self):
            y: mx.array = original(self, x)
            return y
        y = depthwise(x, self.weight)
        if "bias" in self:
            y = y + self.bias
        return y

    nn.Conv1d.__call__ = call


def _is_short_and_depthwise(layer: Any) -> bool:
    channels, taps, each = layer.weight.shape
    plain = layer.stride == layer.dilation == 1 and layer.padding == 0
    return bool(plain and each == 1 and layer.groups == channels and taps <= LONGEST_KERNEL)


def depthwise(x: mx.array, weight: mx.array) -> mx.array:
    """[B, L - K + 1, C] from `x` [B, L, C] and `weight` [C, K, 1], summed in float32 as cuDNN does."""
    taps = weight.shape[1]
    length = x.shape[1] - taps + 1
    return _weighted_sum(*(x[:, i : i + length] for i in range(taps)), *(weight[:, i, 0] for i in range(taps)))


@partial(mx.compile, shapeless=True)
def _weighted_sum(*both: mx.array) -> mx.array:
    """The first half's arrays, each times one of the second half's, added up in float32; in the first one's type."""
    half = len(both) // 2
    products = (a.astype(mx.float32) * b.astype(mx.float32) for a, b in zip(both[:half], both[half:], strict=True))
    return reduce(mx.add, products).astype(both[0].dtype)
