"""The long-generation curve in Marathon's own batch, without HTTP. Measured in a child; see `loadtests.count`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import mlx.core as mx

from loadtests.lab import shapes
from loadtests.lab.counting import THOUSAND, by_thousand
from loadtests.lab.decoding import undisturbed
from loadtests.lab.kv_passes import MIB, batch_of, cache_step, prepare_as_engine
from server.cache_guard import cache_arrays, pinned_bytes
from server.certify.__main__ import open_source
from server.certify.certificate import Order
from server.memory.residency import CountSource

PROMPT = 64
WARM = 8
ROUNDS = 9
STEPS_A_ROUND = 12


def measure(values: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a thousand tokens of each of `rows` sequences. `values`: shape, rows, tokens, real, and `reference` for
    the bare step instead.

    With `real` below 1,000 the curve is sampled: for each thousand so many steps, on caches filled up to there.
    """
    source = open_source(Order(""))  # before the weights, so that a native counter counts them
    model = shapes.build(values["shape"])
    if "reference" in values:
        return [reference(model, *values["reference"])]
    prepare_as_engine()
    if values["real"] < THOUSAND:
        return sampled(model, source, values)
    return whole(model, source, values)


def whole(model: Any, source: CountSource, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Every step from the first to the last, in one batch."""
    batch = batch_of(model, [PROMPT] * values["rows"])
    found = []
    for number in range(values["tokens"] // THOUSAND):
        times = _times(batch.step, THOUSAND)
        found.append(by_thousand(number + 1, times, values["rows"]) | held(source, batch.caches))
    return found


def sampled(model: Any, source: CountSource, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Some steps at the end of each thousand, on fresh caches. Thousands between are left out beyond the fifth."""
    found = []
    last = values["tokens"] // THOUSAND
    for number in [n for n in range(1, last + 1) if n <= 2 or n % 5 == 0 or n == last]:
        batch = batch_of(model, [number * THOUSAND - values["real"]] * values["rows"])
        _times(batch.step, WARM)
        times = _times(batch.step, values["real"])
        found.append(by_thousand(number, times, values["rows"]) | held(source, batch.caches))
        del batch
        gc.collect()
    return found


def _times(step: Callable[[], object], count: int) -> list[float]:
    """When each of `count` steps was over, the beginning first."""
    times = [perf_counter()]
    for _ in range(count):
        step()
        times.append(perf_counter())
    return times


def held(source: CountSource, layers: list[Any]) -> dict[str, Any]:
    """What is held now: settled live buffers where there is a count, their distance to the limit, bytes."""
    mx.synchronize()
    mx.clear_cache()
    live = source.settled()
    found = {"active_mib": mx.get_active_memory() / MIB, "kv_mib": pinned_bytes(cache_arrays(layers)) / MIB}
    if live is None or source.limit is None:
        return found
    return found | {"live_buffers": live, "headroom": source.limit - live}


def reference(model: Any, second: int, last: int) -> dict[str, Any]:
    """The bare step of mlx-lm over fresh caches of both lengths, in turn: how much slower a longer cache alone is.

    Each length keeps its quickest round, so that a round beside other work doesn't count.
    """
    steps = [cache_step(model, "step", length)[0] for length in (second, last)]
    rounds = [[_gaps(step) for step in steps] for _ in range(ROUNDS)]
    shorter, longer = map(undisturbed, zip(*rounds, strict=True))
    return {"bare_second_ms": 1e3 * shorter, "bare_last_ms": 1e3 * longer}


def _gaps(step: Callable[[], object]) -> list[float]:
    """What each step of one round took, without the first two."""
    return [b - a for a, b in pairwise(_times(step, STEPS_A_ROUND)[2:])]
