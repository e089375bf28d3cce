"""Whether the live-buffer count stays flat: `python -m loadtests.flat [--families llama qwen3_5 …] [--steps 2000]`.

Plays one plan of rows that come and go, family by family, in the engine's own loop with the guard and without it, and
in mlx-lm's BatchGenerator, whose leak must still be there: if it isn't, an upstream release has mended it and we want
to hear of it. Owns what is expected of each. Writes one CSV row a run and a table; its exit code is 0 when all is as
expected. Runs MLX in its own process, with the native counter; models are the zoo's, tiny and random.

What mlx-lm loses with this plan: one buffer a step for each chain, and 5 more a chain each time two rows have come and
gone. A chain that only joins and leaves prolong loses 4 buffers then, and none between.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from loadtests import zoo
from loadtests.bench.ledger import Ledger
from loadtests.harness import ROOT, device
from server.certify import agreement
from server.certify.certificate import Agreement
from server.certify.replay import EVERY, Gauge, Plan, Run, play, play_mlx_lm
from server.config.cache_folder import COUNTERS, cache_folder
from server.engine import model
from server.engine.model import LoadedModel
from server.memory import native_count
from server.memory.allocator import CountUnavailable
from server.memory.residency import CountSource

FAMILIES = [
    *("llama", "gemma3_text", "gpt_oss", "qwen3_5", "qwen3_next", "falcon_h1", "nemotron_h", "mamba2"),
    *("lfm2", "smollm3", "cohere2", "kimi_linear", "minimax_m3_vl", "rwkv7", "recurrent_gemma", "deepseek_v32"),
]
RISES = ("smollm3", "cohere2", "minimax_m3_vl")  # without the guard, in the engine's loop
SLOW = {  # chains that only joins and leaves prolong
    "rwkv7": 4,
    "mamba": 4,
    "baichuan_m1": 4,
    "recurrent_gemma": 3,
    "bailing_moe_linear": 2,
    "jamba": 2,
    "longcat_flash_ngram": 1,
}
ARMS = ("guard", "off", "mlx_lm")
FLAT = 0.01  # buffers a step; the whole 95 % interval must lie within
WITHIN = 0.05  # of what is expected
POINTS = 20
SHARE = 0.02  # of the streams may part at a tie: guard against none


@dataclass(frozen=True, slots=True)
class SlopeRow:
    """What one run showed, and what was expected of it."""

    family: str
    arm: str
    slope: float
    half_width: float
    points: int
    bytes_a_step: float
    expected: str
    passed: bool
    note: str = ""

    def cells(self) -> list[str]:
        slope = f"{self.slope:.4f} ±{self.half_width:.4f}"
        verdict = "pass" if self.passed else "FAIL"
        return [
            self.family,
            self.arm,
            slope,
            str(self.points),
            f"{self.bytes_a_step:.1f}",
            self.expected,
            verdict,
            self.note,
        ]


@dataclass(slots=True)
class Report:
    """All rows so far. Owned by the main thread."""

    rows: list[SlopeRow] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def table(self, machine: str) -> str:
        head = ["family", "run", "buffers a step", "points", "bytes a step", "expected", "", ""]
        lines = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * 8, *(row.cells() for row in self.rows)]]
        return "\n".join([machine, "", *lines, "", *self.failures]) + "\n"

    @property
    def passed(self) -> bool:
        return not self.failures and all(row.passed for row in self.rows)


def rate(family: str) -> float:
    """Buffers a step that mlx-lm loses with this plan."""
    return zoo.FAMILIES[family].leaks * (1 + 5 / EVERY) + SLOW.get(family, 0) * 4 / EVERY


# ---------------------------------------------------------------- one family
@dataclass(frozen=True, slots=True)
class Trials:
    """Where families are played. `report` gets a line of what is under way."""

    source: CountSource
    plan: Plan
    arms: Sequence[str]
    folder: Path
    report: Callable[[str], None]

    def play(self, family: str, report: Report, ledger: Ledger) -> None:
        loaded = load(family, self.folder)
        self._play(family, loaded, report, ledger)
        if not loaded.batches and family in RISES:
            # Its rows run alone, where no batch cache is at work. Made to batch all the same, its text is wrong and
            # its leak is the one that the guard has to hold.
            self._play(family, made_to_batch(loaded), report, ledger, forced=True)

    def _play(self, family: str, loaded: LoadedModel, report: Report, ledger: Ledger, *, forced: bool = False) -> None:
        name = f"{family}, made to batch" if forced else family
        runs: dict[str, Run] = {}
        for arm in self.arms:
            if arm == "mlx_lm" and forced:
                continue
            self.report(f"{name}: {arm}")
            runs[arm] = self._run(arm, loaded)
            row = judge(family, arm, runs[arm], alone=not loaded.batches)
            report.rows.append(replace(row, family=name))
            ledger.note("flat", name, (1, 1), arm, figures(row))
        if "guard" in runs and "off" in runs:
            report.failures += same_text(name, runs["guard"], runs["off"])
        if "guard" in runs and loaded.batches and not forced:
            report.failures += agree(name, agreement.compare(loaded))

    def _run(self, arm: str, loaded: LoadedModel) -> Run:
        gauge = Gauge(self.source)
        if arm == "mlx_lm":
            return play_mlx_lm(self.plan, loaded, gauge)
        return play(self.plan, loaded, gauge, guard=arm == "guard")


def load(family: str, folder: Path) -> LoadedModel:
    path = zoo.write(family, folder / family)
    return model.load(path, trust_remote_code=False, probe=None, on_stage=lambda stage: None)


def made_to_batch(loaded: LoadedModel) -> LoadedModel:
    return replace(loaded, probe=msgspec.structs.replace(loaded.probe, batching="batched"))


def judge(family: str, arm: str, run: Run, *, alone: bool) -> SlopeRow:
    fit, size = run.fit(), run.fit_bytes()
    if run.failed or fit is None or size is None:
        passed = arm == "mlx_lm" and not zoo.FAMILIES[family].batches
        return SlopeRow(family, arm, float("nan"), 0.0, 0, float("nan"), "–", passed, f"can't be run: {run.failed}")
    points = len(run.readings) - len(run.readings) // 3
    flat = abs(fit.slope) + fit.half_width <= FLAT
    row = SlopeRow(family, arm, fit.slope, fit.half_width, points, size.slope, f"0 ±{FLAT}", flat and points >= POINTS)
    if arm == "off":
        return _judge_off(row, rises=family in RISES and not alone, alone=alone)
    if arm == "mlx_lm" and (wanted := rate(family)):
        near = abs(fit.slope / wanted - 1) <= WITHIN
        return replace(row, expected=f"{wanted:.3f} ±{WITHIN:.0%}", passed=near, note=fields(run))
    return row if arm == "guard" or points >= POINTS else replace(row, passed=flat)


def _judge_off(row: SlopeRow, *, rises: bool, alone: bool) -> SlopeRow:
    """Only some must rise; the others are only reported."""
    if rises:
        return replace(row, expected="rises", passed=row.slope - row.half_width > FLAT)
    word = "flat by construction" + (": rows run alone" if alone else "") if row.passed else "rises"
    return replace(row, expected="–", passed=True, note=word)


def fields(run: Run) -> str:
    return ", ".join(sorted({f"{finding.cache}.{finding.field}" for finding in run.growing}))


def same_text(name: str, guarded: Run, unguarded: Run) -> list[str]:
    parted = [number for number, text in guarded.texts.items() if unguarded.texts.get(number) != text]
    if len(parted) <= SHARE * len(guarded.texts):
        return []
    return [f"{name}: the guard changes {len(parted)} of {len(guarded.texts)} texts"]


def agree(name: str, found: Agreement) -> list[str]:
    return [] if found.holds else [f"{name}: together isn't as alone: {found}"]


def figures(row: SlopeRow) -> dict[str, float]:
    return {
        "buffers_a_step": row.slope,
        "half_width": row.half_width,
        "points": row.points,
        "bytes_a_step": row.bytes_a_step,
        "passed": float(row.passed),
    }


# ---------------------------------------------------------------- all of them
def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=sorted(zoo.FAMILIES), default=FAMILIES, metavar="NAME")
    parser.add_argument("--steps", type=int, default=2000, help="tokens of the long row")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="what is run")
    parser.add_argument("--guard", choices=("on", "off"), help="only the engine's loop, with the guard or without it")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the CSV and the table")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    logging.disable(logging.WARNING)  # without the guard the census has much to say
    arms = {"on": ("guard",), "off": ("off",)}.get(arguments.guard, arguments.arms)
    try:
        source = native_count.open_count(cache_folder() / COUNTERS, None)
    except CountUnavailable as reason:
        print(f"no live-buffer count: {reason}", file=sys.stderr)
        return 2
    report = Report()
    with tempfile.TemporaryDirectory() as folder, Ledger(arguments.out, "flat", device()) as ledger:
        say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        stage = Trials(source, Plan(arguments.steps), arms, Path(folder), say)
        for family in arguments.families:
            stage.play(family, report, ledger)
        text = report.table(f"{arguments.steps:,} steps; {ledger.machine.line()}")
    (arguments.out / "flat.md").write_text(text, encoding="utf-8")
    print(text)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
