"""Live buffers that patterns and model families lose a step. Measured in a child; see `loadtests.residency`."""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from loadtests import zoo
from loadtests.flat import SLOW, fields, made_to_batch, rate
from server.certify.__main__ import open_source
from server.certify.certificate import Order
from server.certify.replay import Gauge, Plan, Run, play, play_mlx_lm
from server.engine import model
from server.engine.model import LoadedModel
from server.memory.residency import CountSource

METAL_LIMIT = 499_000
BEYOND = 2  # a run to a limit is given up at so many times the predicted step

Step = Callable[[mx.array, mx.array], mx.array]


# ---------------------------------------------------------------- bare patterns
def _one_less(x: mx.array, one: mx.array) -> mx.array:
    return x - 1


def _one_less_evaluated(x: mx.array, one: mx.array) -> mx.array:
    x = x - 1
    mx.eval(x)
    return x


def _less_an_operand(x: mx.array, one: mx.array) -> mx.array:
    return x - one


PATTERNS: dict[str, Step] = {
    "x = x - 1, never evaluated": _one_less,
    "x = x - one, never evaluated": _less_an_operand,
    "x = x - 1, evaluated each step": _one_less_evaluated,
}


def measure(values: dict[str, Any]) -> list[dict[str, Any]]:
    """One row. `values`: pattern and steps; or family, arm, steps and limit."""
    logging.disable(logging.WARNING)  # without the guard the census has much to say
    source = open_source(Order(""))
    if source.limit is None:
        raise RuntimeError(f"no live-buffer count: {source.reason}")
    if "pattern" in values:
        return [bare(PATTERNS[values["pattern"]], source, values["steps"])]
    return [of_family(values["family"], values["arm"], source, values["steps"], values["limit"])]


def bare(step: Step, source: CountSource, steps: int) -> dict[str, Any]:
    """Buffers and bytes a step that the pattern leaves behind."""
    x, one = mx.array([0]), mx.array([1])
    mx.eval(x, one)
    before = _held(source)
    for _ in range(steps):
        x = step(x, one)
    after = _held(source)
    return {"buffers_a_step": (after[0] - before[0]) / steps, "bytes_a_step": (after[1] - before[1]) / steps}


def _held(source: CountSource) -> tuple[int, int]:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return source.settled() or 0, mx.get_active_memory()


# ---------------------------------------------------------------- families
def of_family(family: str, arm: str, source: CountSource, steps: int, limit: int) -> dict[str, Any]:
    """Buffers a step of one long row, and where that ends: predicted for Metal's limit; for a low one predicted from
    the first `steps` and then measured.

    `arm`: `mlx_lm alone` (no other row comes), `mlx_lm`, `off` and `guard` (two others come and go).
    """
    gauge = Gauge(source)
    with tempfile.TemporaryDirectory() as scratch:
        run = _play(family, arm, gauge, steps, limit, Path(scratch))
    expected = expected_rate(family, arm)
    fit = run.fit(steps)
    if run.failed or fit is None:
        return {"expected": expected, "note": f"can't be run: {run.failed or 'too few readings'}"}
    figures = {
        "expected": expected,
        "buffers_a_step": fit.slope,
        "half_width": fit.half_width,
        "baseline": run.baseline(steps),
        "holders": fields(run),
    }
    return figures | _ends(run, steps, limit)


def expected_rate(family: str, arm: str) -> float | None:
    """Buffers a step that are known of this arm; None where nothing is promised."""
    if arm == "guard":
        return 0.0
    if arm == "off":
        return None
    return float(zoo.FAMILIES[family].leaks) if arm == "mlx_lm alone" else rate(family)


def _ends(run: Run, steps: int, limit: int) -> dict[str, Any]:
    fit = run.fit(steps)
    assert fit is not None
    if fit.slope <= 0.05:
        return {}
    baseline = run.baseline(steps)
    found = {"ceiling_metal": (METAL_LIMIT - baseline) / fit.slope, "ceiling_predicted": (limit - baseline) / fit.slope}
    reached = run.reached(limit)
    return found if reached is None else found | {"ceiling_measured": reached}


def _play(family: str, arm: str, gauge: Gauge, steps: int, limit: int, scratch: Path) -> Run:
    if arm == "mlx_lm alone":
        return play_mlx_lm(Plan(steps, rows=1), _without_trial(family), gauge, _until(steps, limit))
    if arm == "mlx_lm":
        return play_mlx_lm(Plan(steps), _without_trial(family), gauge)
    path = zoo.write(family, scratch / family)
    loaded = model.load(path, trust_remote_code=False, probe=None, on_stage=lambda stage: None)
    if not loaded.batches and not SLOW.get(family):
        loaded = made_to_batch(loaded)  # its rows would run alone, in caches that never leak
    return play(Plan(steps), loaded, gauge, guard=arm == "guard")


def _without_trial(family: str) -> LoadedModel:
    """For mlx-lm's loop, which needs only the model."""
    return LoadedModel(zoo.build(family), {}, 0, 0, cast(Any, None))


def _until(steps: int, limit: int) -> Callable[[Run], bool]:
    """Whether a run has had its steps and, if its count rises, has come to the limit."""

    def ended(run: Run) -> bool:
        if run.step < steps:
            return False
        predicted = _ends(run, steps, limit).get("ceiling_predicted") if run.fit(steps) else None
        if predicted is None:
            return True
        return run.readings[-1].buffers >= limit or run.step > BEYOND * predicted

    return ended
