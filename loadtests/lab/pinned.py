"""Bytes that cache arrays own against bytes that their buffers hold. Measured in a child; see `loadtests.pinned`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from loadtests.lab import shapes
from server.batching import Batch
from server.cache_guard import Guard, cache_arrays, pinned_bytes, settle
from server.compute.rows import Row
from server.engine.prefix_cache import PrefixCache
from server.ipc.messages import Sampling, Sequence, Snapshot

LENGTHS = (300, 120, 40, 33)  # of the rows' prompts
STEPS = 40
LARGE = 1 << 16  # bytes from which an array is judged by itself
FOREVER = 1 << 30


def measure(values: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a moment of the rows' life. `values`: shape."""
    model = shapes.build(values["shape"])
    rows = [read(model, number, length) for number, length in enumerate(LENGTHS)]
    found = [moment("prefill", [row.caches for row in rows])]
    kept = PrefixCache(FOREVER, Snapshot())
    for row in rows:
        kept.insert_copy(row.tokens[:-1], row.caches)
    batch = Batch(model, Guard(True, FOREVER, Snapshot()))
    batch.join(rows[:1])
    step(batch)
    found.append(moment("decode", [batch.caches]))
    batch.join(rows[1:])
    step(batch)
    found.append(moment("join", [batch.caches]))
    batch.leave(rows[1:3], keep_caches=True)
    step(batch)
    found.append(moment("leave", [batch.caches]))
    found.append(moment("taken out", [row.caches for row in rows[1:3]]))
    for row in rows[1:3]:
        kept.insert_copy(row.tokens[: row.length - 1], row.caches)
    found.append(of_entries(kept))
    del batch, kept
    return [*found, moment("mlx-lm, taken out", as_mlx_lm_takes_out(model))]


def read(model: Any, number: int, length: int) -> Row:
    """A row whose prompt is read."""
    caches = make_prompt_cache(model)
    prompt = [token + number for token in shapes.prompt_of(length, 2000)]
    model(mx.array([prompt[:-1]]), cache=caches)
    settle(caches)
    asked = Sequence(prompt, Sampling(seed=number, temperature=0), FOREVER)
    return Row(number, asked, list(prompt), caches)


def step(batch: Batch) -> None:
    for _ in range(STEPS):
        batch.step()
    mx.synchronize()


def moment(name: str, layers: list[Any]) -> dict[str, Any]:
    """What all arrays own and pin, and the worst of the large ones."""
    arrays = cache_arrays(layers)
    mx.eval(arrays)
    large = [array for array in arrays if array.nbytes >= LARGE]
    worst = max((pinned_bytes([array]) / array.nbytes for array in large), default=float("nan"))
    owned = sum(array.nbytes for array in arrays)
    pinned = pinned_bytes(arrays)
    return {"moment": name, "arrays": len(arrays), "owned": owned, "pinned": pinned, "ratio": pinned / owned} | {
        "worst_large": worst
    }


def of_entries(kept: PrefixCache) -> dict[str, Any]:
    """The same of kept prefixes."""
    pairs = kept.pinned()
    owned = sum(own for _, own in pairs)
    pinned = sum(held for held, _ in pairs)
    ratio = max(held / own for held, own in pairs)
    return {"moment": "kept prefixes", "arrays": len(pairs), "owned": owned, "pinned": pinned, "ratio": ratio}


def as_mlx_lm_takes_out(model: Any) -> list[Any]:
    """The caches that mlx-lm's BatchGenerator hands over with the shortest of the rows, evaluated as they are."""
    generator = BatchGenerator(model, stream=mx.default_stream(mx.default_device()))
    prompts = [shapes.prompt_of(length, 2000) for length in LENGTHS]
    generator.insert(prompts, [STEPS] + [4 * STEPS] * (len(prompts) - 1))
    while True:
        ended = [response for response in generator.next()[1] if response.finish_reason]
        if ended:
            caches = list(ended[0].prompt_cache)
            generator.close()
            return caches
