"""`marathon certify`: whether a model runs flat in Marathon, and what it does in mlx-lm.

Owns the three runs of one plan (Marathon's loop with the guard and without it, mlx-lm's BatchGenerator) and the verdict
over them. Runs in the main thread of a child process, which is given its order as JSON on standard input; progress
goes to standard error, the certificate to standard output. Never runs beside a server's engine.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

import server
from server.certify import agreement, demonstration
from server.certify.certificate import (
    FEWEST,
    FLAT,
    SHARE,
    TOKENS,
    Agreement,
    Arm,
    Certificate,
    Death,
    Order,
    to_json,
    to_text,
)
from server.certify.replay import Gauge, Plan, Run, caches_in_words, play, play_mlx_lm
from server.config import child_place
from server.config.cache_folder import COUNTERS, cache_folder
from server.engine import device, model
from server.engine.model import LoadedModel
from server.errors import StartupError, joined_lines
from server.memory import metal_count, native_count
from server.memory.allocator import CountUnavailable
from server.memory.pressure import Fit
from server.memory.residency import CountSource, NoCount
from server.telemetry.output import checked_output

RUN_SECONDS = 120.0
BEYOND = 2  # a run to the limit is given up at so many times the predicted token
EXIT_FAILED = 1
EXIT_UNABLE = 2

Report = Callable[[str], None]


class ReplayProgress:
    """What has been played of all that is to be, and how long the rest will take at that speed."""

    def __init__(self, report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._began = clock()
        self._parts: list[float] = []
        self._ended = 0  # parts
        self._now = 0.0

    def expect(self, *parts: float) -> None:
        """The sizes of the parts, in steps. The time runs from now."""
        self._began = self._clock()
        self._parts = list(parts)

    def end_part(self) -> None:
        """The next begins."""
        self._ended = self._ended + 1
        self._now = 0.0

    def at(self, steps: float, line: str) -> None:
        """A part has come so far."""
        self._now = steps
        self._report(f"{line}{self._left()}")

    def _left(self) -> str:
        done = sum(self._parts[: self._ended]) + self._now
        if not done:
            return ""
        seconds = (self._clock() - self._began) / done * (sum(self._parts) - done)
        if seconds < 1:
            return ""
        if seconds >= 90:
            return f"; about {seconds / 60:.0f} min left"
        return f"; about {seconds:.0f} s left"


# ---------------------------------------------------------------- playing
def certify(order: Order, report: Report) -> Certificate:
    """Raises StartupError when the model can't be loaded."""
    if order.path:
        return certify_model(order, report)
    with tempfile.TemporaryDirectory() as folder:
        path = demonstration.write(Path(folder))
        tokens = order.tokens or demonstration.TOKENS
        limit = order.buffer_limit or demonstration.LIMIT
        return certify_model(replace(order, path=str(path), tokens=tokens, buffer_limit=limit), report)


def certify_model(order: Order, report: Report) -> Certificate:
    source = open_source(order)
    loaded = model.load(Path(order.path), trust_remote_code=order.trust_remote_code, probe=None, on_stage=report)
    plan = Plan(order.tokens or affordable_tokens(loaded, order.rows), order.rows, min(loaded.probe.vocab_size, 5000))
    progress = ReplayProgress(report)
    progress.expect(*[plan.steps] * 3, agreement.STEPS if loaded.batches else 0)
    progress.at(0, f"three runs of {plan.steps:,} tokens")
    guarded = play(plan, loaded, _gauge(source, "marathon", plan, progress))
    progress.end_part()
    off = play(plan, loaded, _gauge(source, "marathon, guard off", plan, progress), guard=False)
    progress.end_part()
    other, death = _to_the_end(plan, loaded, source, order, progress)
    progress.end_part()
    arms = {
        "guarded": _arm("Marathon", guarded),
        "unguarded": _arm("Marathon, guard off", off),
        "mlx_lm": _arm("mlx-lm's BatchGenerator", other, plan.steps),
    }
    if loaded.batches:
        progress.at(0, "rows together and alone")
    agreed = None
    if loaded.batches:
        agreed = agreement.compare(loaded)
    changed = sum(off.texts.get(number) != text for number, text in guarded.texts.items())
    return Certificate(
        model=Path(order.path).name,
        model_type=str(loaded.config.get("model_type", "unknown")),
        caches=caches_in_words(make_prompt_cache(loaded.model)),
        batching=loaded.probe.batching,
        device=device.name(),
        versions=versions(),
        tokens=plan.steps,
        rows=plan.rows,
        source=Gauge(source).name,
        source_reason=source.reason,
        arms=arms,
        death=death,
        agreement=agreed,
        guard_streams=len(guarded.texts),
        guard_changed=changed,
        faults=faults_of(arms["guarded"], agreed, changed / max(1, len(guarded.texts))),
    )


def affordable_tokens(loaded: LoadedModel, rows: int) -> int:
    """Tokens of a run: as many as a few minutes have room for, as long as they are enough for a slope."""
    return max(FEWEST, min(TOKENS, int(RUN_SECONDS / (rows * model.step_seconds(loaded.model)))))


def open_source(order: Order) -> CountSource:
    """Metal's own count where it can be proved, elsewhere the native one; without either, the graphs are counted."""
    try:
        if mx.metal.is_available():
            return metal_count.open_count(order.buffer_limit)
        folder = cache_folder(Path(order.cache_dir) if order.cache_dir else None) / COUNTERS
        return native_count.open_count(folder, order.buffer_limit)
    except CountUnavailable as reason:
        return NoCount(str(reason))


def versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("mlx", "mlx-lm")}
    return {"marathon": server.__version__, **packages, "python": platform.python_version()}


def _gauge(source: CountSource, name: str, plan: Plan, progress: ReplayProgress) -> Gauge:
    def report(run: Run) -> None:
        newest = run.readings[-1]
        of = f" of {plan.steps:,}" if newest.step <= plan.steps else ""  # beyond the plan, up to the limit of buffers
        line = f"{name}: {newest.step:,}{of} tokens, {newest.buffers:,} buffers"
        progress.at(min(newest.step, plan.steps), line)

    return Gauge(source, report)


def _to_the_end(
    plan: Plan, loaded: LoadedModel, source: CountSource, order: Order, progress: ReplayProgress
) -> tuple[Run, Death | None]:
    """mlx-lm's run; on to the limit if one was given and the count rises."""
    limit = source.limit
    wanted = order.buffer_limit is not None

    def ended(run: Run) -> bool:
        if run.step < plan.steps:
            return False
        death = _death(run, plan.steps, limit)
        if not wanted or death is None or death.token is None:
            return True
        return run.readings[-1].buffers >= death.limit or run.step > BEYOND * death.token

    run = play_mlx_lm(plan, loaded, _gauge(source, "mlx-lm", plan, progress), ended)
    return run, _death(run, plan.steps, limit)


def _death(run: Run, steps: int, limit: int | None) -> Death | None:
    """Predicted from the readings up to `steps` alone, also where the run went on."""
    fit = run.fit(steps)
    if fit is None or limit is None:
        return None
    baseline = run.baseline(steps)
    token = fit.exhaustion(limit - baseline)
    return Death(limit, baseline, token if math.isfinite(token) else None, run.reached(limit))


# ---------------------------------------------------------------- judging
def _arm(name: str, run: Run, upto: int | None = None) -> Arm:
    fit = run.fit(upto)
    size = run.fit_bytes(upto)
    if run.failed or fit is None or size is None:
        return Arm(name, failed=run.failed or "too few readings")
    layers: dict[str, list[int]] = {}
    for finding in run.growing:
        layers.setdefault(f"{finding.cache}.{finding.field}", []).append(finding.layer)
    at_fault = [f"{what} (layers {', '.join(map(str, numbers))})" for what, numbers in layers.items()]
    return Arm(name, fit.slope, _interval(fit), size.slope, at_fault)


def _interval(fit: Fit) -> tuple[float, float]:
    return fit.slope - fit.half_width, fit.slope + fit.half_width


def faults_of(guarded: Arm, agreed: Agreement | None, changed: float) -> list[str]:
    faults = []
    if guarded.failed:
        faults.append(f"Marathon's run failed: {guarded.failed}")
    elif not guarded.flat:
        faults.append(f"Marathon's live buffers aren't flat within ±{FLAT} a token")
    if agreed is not None and not agreed.holds:
        faults.append("rows don't say the same together as alone")
    if changed > SHARE:
        faults.append(f"the guard changes the text of {changed:.0%} of the streams")
    return faults


def _print(line: str) -> None:
    if sys.stderr.isatty():
        print(f"{line:78}", end="\r", file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


def main() -> int:
    order = Order(**json.loads(sys.stdin.read()))
    child_place.name_temporary_folder()
    try:
        certificate = certify(order, _print)
        with checked_output():
            print(to_json(certificate) if order.as_json else to_text(certificate))
    except StartupError as error:
        print(f"marathon: {joined_lines(str(error))}", file=sys.stderr)
        return EXIT_UNABLE
    if certificate.passed:
        return 0
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
