"""Generations timed in a bare loop over a model: prefill, first token, decode. Runs in a measuring child."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_repetition_penalty

from server.cache_guard import settle
from server.compute.rows import on_host

PENALTY = 1.1
PENALISED = 64  # newest tokens that the penalty looks at


@dataclass(frozen=True, slots=True)
class Generation:
    """One greedy generation: seconds of its parts, and its ids."""

    prefill: float  # all of the prompt but its last token
    first: float  # from the start to the first token on the host
    decode: float  # the tokens after the first
    ids: list[int]

    def figures(self, prompt: int) -> dict[str, float]:
        return {
            "prefill_tok_s": (prompt - 1) / self.prefill,
            "first_ms": 1e3 * self.first,
            "decode_tok_s": (len(self.ids) - 1) / self.decode,
        }


def generate(model: Any, caches: list[Any], prompt: list[int], tokens: int) -> Generation:
    """Greedy with a repetition penalty, the end of the sequence ignored. The prompt goes through in one pass, as in the
    source; each step is submitted before the one before it is read, as mlx-lm's own loop does."""
    penalise = make_repetition_penalty(PENALTY, PENALISED)
    started = perf_counter()
    model(mx.array([prompt[:-1]]), cache=caches)
    settle(caches)
    prefill = perf_counter() - started
    seen = mx.array(prompt[-PENALISED:])

    def step(token: mx.array) -> mx.array:
        nonlocal seen
        logits = model(token[None], cache=caches)[:, -1]
        drawn = mx.argmax(penalise(seen, logits), axis=-1)
        seen = mx.concatenate([seen[1:], drawn.astype(seen.dtype)])
        mx.async_eval(drawn, seen)
        return drawn

    newest = step(mx.array(prompt[-1:]))
    ids = [on_host(newest)[0]]
    first = perf_counter() - started
    newest = step(newest)
    for _ in range(tokens - 2):
        following = step(newest)
        ids.append(on_host(newest)[0])
        newest = following
    ids.append(on_host(newest)[0])
    return Generation(prefill, first, perf_counter() - started - first, ids)


def undisturbed(rounds: Iterable[Sequence[float]]) -> float:
    """The lowest median of several rounds: what else a machine does meanwhile only adds to a step."""
    return min(map(median, rounds))


def step_seconds(step: Callable[[], None], warm: int, steps: int) -> float:
    """The median time of `step`, which waits for its result, after `warm` of them."""
    times = []
    for number in range(warm + steps):
        started = perf_counter()
        step()
        if number >= warm:
            times.append(perf_counter() - started)
    return median(times)
