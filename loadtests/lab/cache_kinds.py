"""What a kind of KV cache costs: peak memory, prefill, first token, decode. Measured in a child; see
`loadtests.cache_kinds`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from loadtests.lab import caches, shapes
from loadtests.lab.decoding import generate

MIB = 1 << 20


def measure(values: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a recorded run. `values`: shape, kind, prompt, tokens, runs, window."""
    model = shapes.build(values["shape"])
    prompt = shapes.prompt_of(values["prompt"], shapes.vocabulary(model))
    weights = shapes.weights_bytes(model) / MIB
    rows = []
    for run in range(values["runs"] + 1):
        layers = caches.make(model, values["kind"], values["window"])
        mx.clear_cache()
        mx.reset_peak_memory()
        generation = generate(model, layers, prompt, values["tokens"])
        peak = mx.get_peak_memory() / MIB
        if run:  # the first one warms up
            memory = {"run": run, "peak_mib": peak, "weights_mib": weights, "ids": _digest(generation.ids)}
            rows.append(memory | generation.figures(len(prompt)))
    return rows


def _digest(ids: list[int]) -> str:
    """The ids as text, so that rows of different kinds can be compared."""
    return " ".join(map(str, ids))
