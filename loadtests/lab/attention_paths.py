"""Fused attention against attention in steps inside the same model. Measured in a child; see
`loadtests.attention_paths`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from loadtests.lab import cache_kinds, shapes
from server.cache_guard import settle

POSITIONS = 64  # newest positions of a prompt whose logits are compared


def in_steps(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
    **rest: Any,
) -> mx.array:
    """Attention as matrix product, mask, softmax, matrix product. [B, H, L, D], [B, K, S, D] twice → [B, H, L, D].

    Raises NotImplementedError for attention sinks.
    """
    if sinks is not None:
        raise NotImplementedError("attention sinks in steps")
    rows, heads, length = queries.shape[:3]
    groups = keys.shape[1]
    grouped = queries.reshape(rows, groups, heads // groups, length, -1)
    scores = (grouped * scale) @ keys[:, :, None].swapaxes(-1, -2)
    weights = mx.softmax(_masked(scores, mask, heads), axis=-1, precise=True)
    return (weights @ values[:, :, None]).reshape(rows, heads, length, -1)


def _masked(scores: mx.array, mask: Any, heads: int) -> mx.array:
    """`scores` [B, K, H ÷ K, L, S] with what may not be seen at the lowest value."""
    if mask is None:
        return scores
    if isinstance(mask, str):
        length, seen = scores.shape[-2:]
        mask = mx.arange(seen - length, seen)[:, None] >= mx.arange(seen)[None]
    if mask.ndim == 4:
        mask = mask[:, :, None] if mask.shape[1] == 1 else mask.reshape(*scores.shape[:3], *mask.shape[2:])
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.finfo(scores.dtype).min)
    added: mx.array = scores + mask
    return added


@contextmanager
def path(name: str) -> Iterator[None]:
    """Within it models attend in that way: `fused` or `steps`."""
    attribute = "scaled_dot_product_attention"
    fused = getattr(mx.fast, attribute)
    if name == "steps":
        setattr(mx.fast, attribute, in_steps)
    try:
        yield
    finally:
        setattr(mx.fast, attribute, fused)


def measure(values: dict[str, Any]) -> list[dict[str, Any]]:
    """With `path` in `values` what that way costs, a row a run; else how far both ways are apart."""
    if "path" in values:
        with path(values["path"]):
            return cache_kinds.measure(values | {"kind": "step"})
    return [compare(values["shape"], values["prompt"])]


def compare(shape: str, length: int) -> dict[str, Any]:
    """How often both ways have another top token at the newest positions of a prompt, and whether each is a near tie:
    the margin of the steps' two best logits is no larger than what lies between both ways."""
    model = shapes.build(shape)
    prompt = shapes.prompt_of(length, shapes.vocabulary(model))
    found = {}
    for name in ("steps", "fused"):
        with path(name):
            found[name] = newest_logits(model, prompt)
    steps, fused = found["steps"], found["fused"]
    apart = mx.max(mx.abs(steps - fused), axis=-1)
    best = mx.sort(steps, axis=-1)[:, -2:]
    margin = best[:, 1] - best[:, 0]
    differs = mx.argmax(steps, axis=-1) != mx.argmax(fused, axis=-1)
    return {
        "positions": len(steps),
        "top_differs": int(mx.sum(differs)),
        "against_the_rule": int(mx.sum(differs & (margin > apart))),
        "largest_difference": float(mx.max(apart)),
        "smallest_margin": float(mx.min(margin)),
    }


def newest_logits(model: Any, prompt: list[int]) -> mx.array:
    """float32 [POSITIONS, V] of the prompt's end."""
    caches = make_prompt_cache(model)
    if prompt[:-POSITIONS]:
        model(mx.array([prompt[:-POSITIONS]]), cache=caches)
        settle(caches)
    logits: mx.array = model(mx.array([prompt[-POSITIONS:]]), cache=caches)[0].astype(mx.float32)
    mx.eval(logits)
    return logits
