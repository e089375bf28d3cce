"""Caches of prompts that a model has read."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from server.cache_guard import cache_arrays


def reading(model, tokens, cuts=()):
    """Caches after a prompt, read at once or in chunks that end at `cuts`."""
    caches, first = make_prompt_cache(model), 0
    for last in [*cuts, len(tokens)]:
        model(mx.array([tokens[first:last]]), cache=caches)
        mx.eval(cache_arrays(caches))
        first = last
    return caches
