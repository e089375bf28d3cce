"""Decode latency against the bytes of the cache. Measured in a child; see `loadtests.kv_passes`."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import mlx.core as mx

from loadtests.lab import caches, line, shapes
from loadtests.lab.decoding import step_seconds, undisturbed
from server.batching import Batch
from server.cache_guard import Guard
from server.compute import attention, cudnn_shapes
from server.compute.rows import Row
from server.ipc.sequence import Sampling, TokenSequence
from server.ipc.snapshot import Snapshot

MIB = 1 << 20
COPIES = 3  # in each round
FOREVER = 1 << 30
LOOPS = ("marathon", "marathon beside")


def measure(values: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a context, the first context once more at the end, and one for the line through all of them.

    What else a machine does only adds to a step and to a copy: of several rounds each context keeps its lowest
    median, and so does the copy.
    `values`: shape, kind (of cache, or one of LOOPS), contexts, rounds, warm, steps, copy_mib.
    """
    if values["kind"] in LOOPS:
        prepare_as_engine()
    model = shapes.build(values["shape"])
    contexts, size = values["contexts"], values["copy_mib"] * MIB
    rounds, copies = [], []
    for _ in range(values["rounds"]):
        copies.append(copy_seconds(size))
        rounds.append([point(model, values, context) for context in contexts])
    copied = 2e-9 * size / undisturbed(copies)
    rows = [min(points, key=lambda row: float(row["ms"])) for points in zip(*rounds, strict=True)]
    rows.append(point(model, values, contexts[0]))
    found = line.fit([row["kv_bytes"] for row in rows[:-1]], [row["ms"] for row in rows[:-1]])
    effective = 1e-6 / found.slope  # bytes a millisecond → GB a second
    rows[-1]["point"] = "again"
    summary = {
        "point": "line",
        "intercept_ms": found.intercept,
        "gb_s": effective,
        "copy_gb_s": copied,
        "passes": copied / effective,
        "r2": found.r2,
        "again": rows[-1]["ms"] / rows[0]["ms"],
    }
    return [*rows, summary]


def prepare_as_engine() -> None:
    """Replace functions of MLX as an engine does before it loads a model. Once a process."""
    cudnn_shapes.avoid()
    attention.install()


def copy_seconds(size: int) -> list[float]:
    """What copies of `size` bytes take, each of which reads and writes them."""
    source = mx.zeros((size // 4,), dtype=mx.float32)
    mx.eval(source)
    times = []
    for _ in range(COPIES):
        started = perf_counter()
        mx.eval(source + 1)
        times.append(perf_counter() - started)
    return times


def point(model: Any, values: dict[str, Any], context: int) -> dict[str, Any]:
    """The median step over a cache of `context` positions."""
    mx.clear_cache()
    make_step = loop_step if values["kind"] in LOOPS else cache_step
    step, held = make_step(model, values["kind"], context)
    seconds = step_seconds(step, values["warm"], values["steps"])
    return {"point": "context", "context": context, "kv_bytes": held, "ms": 1e3 * seconds}


def cache_step(model: Any, kind: str, context: int) -> tuple[Callable[[], None], int]:
    """A step of the bare model over caches of a kind, and the bytes that they hold."""
    layers = caches.fill(model, caches.make(model, kind, context), context)
    token = mx.array([[11]])

    def step() -> None:
        mx.eval(mx.argmax(model(token, cache=layers)[:, -1], axis=-1))

    return step, caches.position_bytes(layers, context)


def loop_step(model: Any, kind: str, context: int) -> tuple[Callable[[], None], int]:
    """A step of Marathon's batch: one row alone, or beside one of twice its length, to which it is then padded."""
    lengths = [context]
    if kind == "marathon beside":
        lengths.append(2 * context)
    batch = batch_of(model, lengths)

    def step() -> None:
        batch.step()
        mx.synchronize()

    return step, caches.position_bytes(batch.caches, max(lengths))


def batch_of(model: Any, lengths: list[int], *, guarded: bool = True) -> Batch:
    """Marathon's batch with a row of each length, whose caches are filled."""
    batch = Batch(model, Guard(guarded, FOREVER, Snapshot()))
    batch.join([row_of(model, number, length) for number, length in enumerate(lengths)])
    return batch


def row_of(model: Any, number: int, length: int) -> Row:
    """A greedy row without an end that holds `length` positions."""
    layers = caches.fill(model, caches.make(model, "step", length), length)
    prompt = shapes.prompt_of(length + 1, 2000)
    asked = TokenSequence(prompt, Sampling(seed=number, temperature=0), FOREVER)
    return Row(number, asked, list(prompt), layers)
