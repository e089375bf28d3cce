"""Numbers: the CSV, medians, intervals, bars and the table at the end.

Owns what becomes of measurements. Pure arithmetic and two files; knows nothing of servers or models.
"""

from __future__ import annotations

import csv
import os
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Literal, TextIO

COLUMNS = (
    "time",
    "run",
    "row",
    "model",
    "round",
    "place",
    "subject",
    "figure",
    "value",
    "device",
    "mlx",
    "mlx_lm",
    "marathon",
)
RESAMPLES = 2000

Figures = Mapping[str, float]  # what one target reached in one round, by name
Round = Mapping[str, Figures]  # by target
Sense = Literal["≥", "≤"]


# ---------------------------------------------------------------- statistics
def interval(values: Sequence[float], confidence: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of the median: what resampled rounds would have shown."""
    if not values:
        raise ValueError("no values to take an interval of")
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    cut = (1 - confidence) / 2
    return medians[int(cut * RESAMPLES)], medians[min(RESAMPLES - 1, int((1 - cut) * RESAMPLES))]


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise: the median over the rounds of `value(round)` is `sense` `limit`; with `worst`, that of the worst
    round. Without a limit it is only shown.

    `value` may raise KeyError for a round in which a target failed, or divide by a figure of 0; that round doesn't
    count.
    """

    label: str
    value: Callable[[Round], float]
    sense: Sense = "≥"
    limit: float | None = None
    worst: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rounds said of one bar."""

    row: str
    bar: Bar
    values: list[float] = field(default_factory=list)

    @property
    def figure(self) -> float:
        if not self.values:
            return float("nan")
        if self.bar.worst:
            return min(self.values) if self.bar.sense == "≥" else max(self.values)
        return median(self.values)

    @property
    def passed(self) -> bool | None:
        """None where there is no limit. A bar without a value has failed."""
        if self.bar.limit is None:
            return None
        return self.figure >= self.bar.limit if self.bar.sense == "≥" else self.figure <= self.bar.limit

    def cells(self) -> list[str]:
        if not self.values:
            return [self.row, self.bar.label, "–", "–", "0", self._limit(), "FAIL" if self.passed is False else ""]
        low, high = interval(self.values)
        word = {True: "pass", False: "FAIL", None: ""}[self.passed]
        figures = [number(self.figure), f"{number(low)} – {number(high)}", str(len(self.values))]
        return [self.row, self.bar.label, *figures, self._limit(), word]

    def _limit(self) -> str:
        return "" if self.bar.limit is None else f"{self.bar.sense} {number(self.bar.limit)}"


def judge(row: str, bars: Sequence[Bar], rounds: Sequence[Round], targets: Sequence[str]) -> list[Verdict]:
    """A verdict for each bar, but for those that need a target which isn't in `targets`."""
    verdicts = []
    for bar in bars:
        values, absent = [], set()
        for one in rounds:
            try:
                values.append(bar.value(one))
            except KeyError as error:
                absent.add(error.args[0])
            except ZeroDivisionError:
                continue
        if values or not absent or absent & set(targets):
            verdicts.append(Verdict(row, bar, values))
    return verdicts


def ratio(figure: str, over: str = "raw", target: str = "marathon") -> Callable[[Round], float]:
    """`figure` of one target divided by the other's, in the same round."""
    return lambda one: one[target][figure] / one[over][figure]


def quotient(figure: str, over: str, target: str = "marathon") -> Callable[[Round], float]:
    """One figure of a target divided by another figure of the same."""
    return lambda one: one[target][figure] / one[target][over]


def of(figure: str, target: str = "marathon") -> Callable[[Round], float]:
    return lambda one: one[target][figure]


def number(value: float) -> str:
    """Three figures that matter; whole numbers whole."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# ---------------------------------------------------------------- the machine
def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the figures were taken."""

    device: str = ""

    def line(self) -> str:
        packages = ", ".join(f"{name} {version_of(name)}" for name in ("mlx", "mlx-lm", "mlx-marathon"))
        system = f"{platform.system()} {platform.machine()}, {cores()} cores, Python {platform.python_version()}"
        return f"{self.device or 'CPU'}; {system}; {packages}"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------- the files
class Ledger:
    """The CSV under way, one row a measurement, written as it comes. Use as a context manager."""

    def __init__(self, folder: Path, name: str, device: str = "") -> None:
        """Appends to `folder`/`name`.csv; several runs share it, which the column `run` keeps apart."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name, self.machine = folder, name, Machine(device)
        self._run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}"
        path = folder / f"{name}.csv"
        fresh = not path.exists() or not path.stat().st_size
        self._file: TextIO = path.open("a", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file)
        if fresh:
            self._rows.writerow(COLUMNS)

    def note(self, row: str, model: str, place: tuple[int, int], target: str, figures: Figures) -> None:
        """`place`: the round, and which in the round's random order it was."""
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        packages = [version_of(name) for name in ("mlx", "mlx-lm", "mlx-marathon")]
        for figure, value in figures.items():
            measured = [row, model, *place, target, figure, f"{value:.6g}"]
            self._rows.writerow([now, self._run, *measured, self.machine.device or "CPU", *packages])
        self._file.flush()

    def report(self, verdicts: Sequence[Verdict], notes: Sequence[str] = ()) -> str:
        """The table, also written to `name`.md."""
        head = ["row", "figure", "median", "95 % interval", "rounds", "bar", ""]
        lines = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * 7, *(v.cells() for v in verdicts)]]
        text = "\n".join([f"{datetime.now(UTC):%Y-%m-%d}; {self.machine.line()}", "", *lines, "", *notes]) + "\n"
        (self.folder / f"{self.name}.md").write_text(text, encoding="utf-8")
        return text

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
