"""An experiment: cases that are measured one after another, each in a process of its own, and the bounds over them.

Owns the child processes, the progress line with the time left, and the CSV with one row a run. Runs in the program's
own process, which never imports MLX. A case that fails gets a row that says why; the others go on.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from loadtests import harness
from loadtests.bench.ledger import version_of

BFLOAT16 = ("llama-1b", "mha-1b", "hybrid-1b")  # the zoo's models of that type, with random weights
SHAPES = f"family, small, {', '.join(BFLOAT16)}, or a folder"

Row = dict[str, Any]  # column → value: what was asked and what was measured
COMMON = ("time", "device", "backend", "system", "python", "mlx", "mlx_lm", "marathon", "commit")
OF_THE_PROCESS = ("drift", "process_peak_mib", "seconds", "error")
SECONDS = 1800.0  # the longest that a case may take
RESULTS = harness.ROOT / "results" / "lab"


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: the values that it is given, its share of the time (1 is usual), and the module in
    `loadtests.lab` whose `measure` takes it, where that isn't the program's own."""

    values: dict[str, Any]
    cost: float = 1.0
    module: str = ""

    def words(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.values.items() if not isinstance(value, list))


@dataclass(frozen=True, slots=True)
class Bound:
    """Whether something holds, in words with the figure in them."""

    words: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Experiment:
    """A program of the laboratory.

    Attributes:
        name: of the program, its CSV, and its module in `loadtests.lab`, whose `measure(values)` gives the rows.
        columns: what is asked and measured; a row may leave some empty.
        judge: the bounds over all rows that have no error.
    """

    name: str
    columns: tuple[str, ...]
    cases: list[Case]
    judge: Callable[[list[Row]], list[Bound]]


# ---------------------------------------------------------------- the files
class Sheet:
    """The CSV of one program, written row by row. Use as a context manager."""

    def __init__(self, folder: Path, name: str, columns: Sequence[str]) -> None:
        """Appends where a file with the same columns is there. Raises HarnessError for one with other columns."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.csv"
        header = _header_of(path)
        if header and header != list(columns):
            raise harness.HarnessError(f"{path} has other columns, from another version: choose another --out")
        self._file = path.open("a", encoding="utf-8", newline="")
        self._rows = csv.DictWriter(self._file, columns)
        if not header:
            self._rows.writeheader()

    def write(self, row: Row) -> None:
        """Raises ValueError for a value whose column isn't known."""
        self._rows.writerow({name: _plain(value) for name, value in row.items()})
        self._file.flush()

    def __enter__(self) -> Sheet:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _header_of(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), [])


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV, numbers as numbers; empty where there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: _number(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


# ---------------------------------------------------------------- the environment
def commit() -> str:
    """The short name of the commit, with a plus where files differ from it; `unknown` outside of git."""
    found = _git("rev-parse", "--short", "HEAD")
    changed = found and _git("status", "--porcelain", "--untracked-files=no")
    return (found or "unknown") + ("+" if changed else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=harness.ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


# ---------------------------------------------------------------- the children
def measure(module: str, values: dict[str, Any], seconds: float = SECONDS) -> list[Row]:
    """The rows of one case, measured by `python -m loadtests.lab.child`. Raises HarnessError when there are none."""
    child = harness.start([sys.executable, "-m", "loadtests.lab.child", module], stdin=-1, stdout=-1)
    try:
        output, _ = child.communicate(json.dumps(values).encode(), seconds)
    except subprocess.TimeoutExpired:
        raise harness.HarnessError(f"not done after {seconds:.0f} s") from None
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode or not output:
        raise harness.HarnessError(f"the process ended with {child.returncode}")
    return list(json.loads(output))


@dataclass(slots=True)
class Progress:
    """How much is done and how long the rest takes at this speed."""

    name: str
    costs: list[float]
    began: float = field(default_factory=monotonic)

    def report(self, number: int, words: str) -> None:
        print(f"{self.name} {number + 1}/{len(self.costs)}: {words}{self._left(number)}", file=sys.stderr, flush=True)

    def _left(self, number: int) -> str:
        done = sum(self.costs[:number])
        if not done:
            return ""
        seconds = (monotonic() - self.began) / done * sum(self.costs[number:])
        return f"; about {seconds / 60:.1f} min left" if seconds > 90 else f"; about {seconds:.0f} s left"


def carry_out(experiment: Experiment, arguments: argparse.Namespace) -> int:
    """Measures all cases, writes the rows, prints the bounds; the exit code is 0 when each of them holds."""
    columns = (*COMMON, *OF_THE_PROCESS, *experiment.columns)
    progress = Progress(experiment.name, [case.cost for case in experiment.cases])
    rows: list[Row] = []
    with Sheet(arguments.out, experiment.name, columns) as sheet:
        for number, case in enumerate(experiment.cases):
            progress.report(number, case.words())
            for row in _rows_of(experiment, case, arguments):
                sheet.write(_environment(arguments) | row)
                rows.append(row)
    return conclude(experiment, rows)


def _rows_of(experiment: Experiment, case: Case, arguments: argparse.Namespace) -> list[Row]:
    asked = {name: value for name, value in case.values.items() if name in experiment.columns}
    try:
        found = measure(case.module or experiment.name, case.values, arguments.limit)
    except harness.HarnessError as error:
        print(f"{experiment.name}: {case.words()}: {error}", file=sys.stderr, flush=True)
        return [asked | {"error": str(error)}]
    return [asked | row for row in found]


def _environment(arguments: argparse.Namespace) -> Row:
    packages = {name.replace("-", "_"): version_of(name) for name in ("mlx", "mlx-lm")}
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {"time": now, "marathon": version_of("mlx-marathon"), "commit": arguments.commit} | packages


def conclude(experiment: Experiment, rows: list[Row]) -> int:
    """Prints each bound; 1 when one is missed or a case failed."""
    failed = [row["error"] for row in rows if row.get("error")]
    bounds = experiment.judge([row for row in rows if not row.get("error")])
    for bound in bounds:
        print(f"{'holds ' if bound.holds else 'MISSED'}  {bound.words}")
    for error in failed:
        print(f"FAILED  {error}")
    return 1 if failed or not all(bound.holds for bound in bounds) else 0


# ---------------------------------------------------------------- the command line
def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every program of the laboratory has."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV files")
    parser.add_argument("--limit", type=float, default=SECONDS, help="seconds that one case may take")
    parser.add_argument("--commit", default=commit(), help="what the rows name; default: that of this checkout")
    return parser
