"""Kinds of KV cache: mlx-lm's own, made for a model, filled to a length, and what they hold in bytes.

Owns `KINDS`. Runs in a measuring child. A cache is filled with random keys and values where only its size matters: a
prefill of 32,768 tokens costs minutes on a CPU, and a decode step takes as long over one content as over another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    BatchKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from server.cache_guard import cache_arrays, parts, settle

CHUNK = 2048  # positions that are filled at once
BITS = 8
GROUP = 64  # largest group of a quantised cache
SEED_TOKENS = 8  # really read before a cache is filled: gives recurrent states and the shapes of keys


class ContiguousKVCache(ConcatenateKVCache):  # type: ignore[misc]
    """The concatenating cache with a contiguous copy of its keys and values after each step."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = map(mx.contiguous, super().update_and_fetch(keys, values))
        return self.keys, self.values


def _quantised(window: int, head_dim: int) -> QuantizedKVCache:
    group = next(size for size in (GROUP, 32) if head_dim % size == 0)
    return QuantizedKVCache(group_size=group, bits=BITS)


KINDS: dict[str, Callable[[int, int], Any]] = {  # of a window and the size of a head
    "concatenate": lambda window, head_dim: ConcatenateKVCache(),
    "contiguous": lambda window, head_dim: ContiguousKVCache(),
    "step": lambda window, head_dim: KVCache(),
    "rotating": lambda window, head_dim: RotatingKVCache(max_size=window),
    "quantised": _quantised,
    "batched": lambda window, head_dim: BatchKVCache([0]),
}


def head_dim_of(model: Any) -> int:
    """The size of a key's head, from a pass of one token. Raises ValueError for a model without a plain KV cache."""
    caches = make_prompt_cache(model)
    model(mx.array([[1]]), cache=caches)
    sizes = [layer.keys.shape[-1] for layer in caches if type(layer) is KVCache]
    if not sizes:
        raise ValueError("none of the model's layers has a plain KV cache")
    return int(sizes[0])


def make(model: Any, kind: str, window: int) -> list[Any]:
    """Fresh caches: the kind in place of each plain KV cache, the model's own elsewhere.

    `window`: positions that a rotating cache keeps.
    """
    head_dim = head_dim_of(model)
    return [KINDS[kind](window, head_dim) if type(layer) is KVCache else layer for layer in make_prompt_cache(model)]


def fill(model: Any, caches: list[Any], length: int) -> list[Any]:
    """The caches with `length` positions, of which the first few were read and the others are random. Evaluated.

    A state that doesn't grow stays as the first tokens left it. Raises ValueError for fewer than those.
    """
    if length < SEED_TOKENS:
        raise ValueError(f"a cache is filled with {SEED_TOKENS} tokens at least, not {length}")
    shapes = make_prompt_cache(model)
    tokens = mx.array([list(range(10, 10 + SEED_TOKENS))])
    model(tokens, cache=caches)
    model(tokens, cache=shapes)
    settle(caches)
    for layer, plain in zip(caches, shapes, strict=True):
        if type(plain) is KVCache:
            _fill_layer(layer, plain, length - SEED_TOKENS)
    return caches


def _fill_layer(layer: Any, plain: KVCache, left: int) -> None:
    """`plain` has the shapes of the keys and values that the layer is to hold. Each chunk of it has the same content,
    since drawing one takes longer than all the rest."""
    size = min(CHUNK, left)
    drawn = [mx.random.normal((*part.shape[:2], size, part.shape[3])) for part in plain.keys_and_values()]
    drawn = [part.astype(plain.keys.dtype) for part in drawn]
    while left:
        size = min(CHUNK, left)
        layer.update_and_fetch(*(part[:, :, :size] for part in drawn))
        settle([layer])
        left -= size


def position_bytes(caches: Iterable[Any], length: int) -> int:
    """Bytes of keys and values over `length` positions, room for later ones left out."""
    found = 0
    for part in parts(caches):
        for array in cache_arrays([part]):
            if array.ndim == 4 and hasattr(part, "offset"):
                found += array.nbytes * min(length, array.shape[2]) // array.shape[2]
    return found
