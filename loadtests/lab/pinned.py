"""Bytes that cache arrays own against bytes that their buffers hold. Measured in a child; see `loadtests.pinned`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from loadtests.lab import shapes
from server.cache_guard import Guard, cache_arrays, parts, pinned_bytes
from server.compute.rows import Row
from server.engine.executor import Executor
from server.engine.plan import Begin, Join, KeepPrompt, KeepRow, Leave, Read, Split, Step
from server.engine.prefix_cache import PrefixCache
from server.ipc.sequence import Sampling, TokenSequence
from server.ipc.snapshot import Snapshot

LENGTHS = (300, 120, 80, 63)  # of the rows' prompts
STEPS = 40
FOREVER = 1 << 30


def measure(values: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a moment of the rows' life. `values`: shape."""
    return Life(shapes.build(values["shape"])).moments()


class Life:
    """Rows that are read, decoded, joined and taken apart by the engine's own executor."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept = PrefixCache(FOREVER, Snapshot())
        rows = {number: _row(number, length) for number, length in enumerate(LENGTHS)}
        self._executor = Executor(model, Guard(True, FOREVER, Snapshot()), self._kept, rows)

    def moments(self) -> list[dict[str, Any]]:
        found = [self._prefill()]
        self._do(Join(1, (0,)), *[Step(1)] * STEPS)
        found.append(self._in_batches("decode"))
        self._do(Join(1, (1, 2, 3)), *[Step(1)] * STEPS)
        found.append(self._in_batches("join"))
        self._do(KeepRow(1, 3), Leave(1, (3,)), Split(1, (1, 2)))
        found.append(weigh("taken out", [self._executor.rows[seq].caches for seq in (1, 2)]))
        self._do(*[Step(1)] * STEPS)
        found.append(self._in_batches("leave"))
        found.append(self._entries())
        self._executor.close()
        return [*found, weigh("mlx-lm, taken out", as_mlx_lm_takes_out(self._model))]

    def _do(self, *operations: Any) -> None:
        for operation in operations:
            self._executor.run(operation)
        mx.synchronize()

    def _prefill(self) -> dict[str, Any]:
        for seq, length in enumerate(LENGTHS):
            self._do(Begin(seq), Read(((seq, length // 2),)), Read(((seq, length - 1 - length // 2),)))
            self._do(KeepPrompt(seq, length - 1))
        return weigh("prefill", [row.caches for row in self._executor.rows.values()])

    def _in_batches(self, name: str) -> dict[str, Any]:
        """Of a batch only the arrays with positions outlive a step; states are made anew by each."""
        caches = self._executor.caches()
        states = weigh(name, caches)
        return weigh(name, [part for part in parts(caches) if hasattr(part, "offset")]) | {
            "with_states": states["ratio"]
        }

    def _entries(self) -> dict[str, Any]:
        pairs = self._kept.pinned()
        ratio = max(held / own for held, own in pairs)
        owned, pinned = sum(own for _, own in pairs), sum(held for held, _ in pairs)
        return {"moment": "kept prefixes", "arrays": len(pairs), "owned": owned, "pinned": pinned, "ratio": ratio}


def _row(number: int, length: int) -> Row:
    prompt = [token + number for token in shapes.prompt_of(length, 2000)]
    return Row(number, TokenSequence(prompt, Sampling(seed=number, temperature=0), FOREVER), list(prompt))


def weigh(moment: str, layers: list[Any]) -> dict[str, Any]:
    """What all arrays of the caches own, and what their buffers hold, each buffer counted once."""
    arrays = cache_arrays(layers)
    mx.eval(arrays)
    owned = sum(array.nbytes for array in arrays)
    pinned = pinned_bytes(arrays) if arrays else 0
    ratio = pinned / owned if owned else 1.0
    return {"moment": moment, "arrays": len(arrays), "owned": owned, "pinned": pinned, "ratio": ratio}


def as_mlx_lm_takes_out(model: Any) -> list[Any]:
    """The caches that mlx-lm's BatchGenerator hands over with the first row that ends, evaluated as they are."""
    generator = BatchGenerator(model, stream=mx.default_stream(mx.default_device()))
    prompts = [shapes.prompt_of(length, 2000) for length in LENGTHS]
    generator.insert(prompts, [STEPS] + [4 * STEPS] * (len(prompts) - 1))
    while True:
        ended = [response for response in generator.next()[1] if response.finish_reason]
        if ended:
            caches = list(ended[0].prompt_cache)
            generator.close()
            return caches
