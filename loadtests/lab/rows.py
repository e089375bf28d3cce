"""Rows of the laboratory's CSV files in groups, with their medians, their spread and where they were taken.

Owns the rule of what counts as noise. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from loadtests.bench.ledger import number

Row = dict[str, Any]
Rows = Sequence[Row]
Key = tuple[str, ...]

UNSTEADY = 1.25  # the machine's speed changed by so much while a row was taken
NOISE_RULE = (
    "A ratio is followed by its range: the least and the most that the recorded runs allow, widened for times by the "
    "drift of the machine in either process. Where the range has 1 in it, the table says “within noise”."
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two medians and its range; without one where a side was measured once."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def known(self) -> bool:
        """Whether there is a figure with a range at all."""
        return self.low is not None and self.value == self.value

    @property
    def above(self) -> bool:
        """Beyond noise more than 1."""
        return self.low is not None and self.low > 1

    @property
    def below(self) -> bool:
        """Beyond noise less than 1."""
        return self.high is not None and self.high < 1

    @property
    def words(self) -> str:
        if self.value != self.value:
            return "–"
        if self.low is None or self.high is None:
            return f"{self.value:.2f}, one run"
        between = f"{self.low:.2f} to {self.high:.2f}"
        if between == "1.00 to 1.00":
            return "1.00"
        if self.above or self.below:
            return f"{self.value:.2f} ({between})"
        return f"within noise ({between})"


# ---------------------------------------------------------------- groups
def groups(rows: Iterable[Row], *names: str) -> dict[Key, list[Row]]:
    """Rows by their values of these columns, in order of first appearance."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(word(row[name]) for name in names), []).append(row)
    return found


def word(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def values(rows: Iterable[Row], name: str) -> list[float]:
    """A column without its empty cells."""
    return [row[name] for row in rows if row[name] != ""]


def middle(rows: Iterable[Row], name: str) -> float:
    """The median of a column; nan where it is empty."""
    found = values(rows, name)
    return median(found) if found else float("nan")


def ratio(rows: Rows, base: Rows, name: str, *, timed: bool) -> Ratio:
    """The column's median over that of `base`, with the range that the recorded runs allow."""
    ours, theirs = values(rows, name), values(base, name)
    value = middle(rows, name) / middle(base, name)
    if min(len(ours), len(theirs)) < 2:
        return Ratio(value)
    wider = max(drift(rows), drift(base)) if timed else 1.0
    return Ratio(value, min(ours) / max(theirs) / wider, max(ours) / min(theirs) * wider)


def drift(rows: Rows) -> float:
    """By how much the machine's speed changed at most while these rows were taken, in either direction; 1: not."""
    return max((max(value, 1 / value) for value in values(rows, "drift")), default=1.0)


# ---------------------------------------------------------------- cells
def cell(value: Any) -> str:
    if value == "" or value != value:
        return "–"
    return number(value) if isinstance(value, float) else str(value)


def spread(rows: Rows, name: str) -> str:
    """The median of the runs, with the least and the most where there are several."""
    found = values(rows, name)
    if len(set(map(number, found))) < 2:
        return cell(middle(rows, name))
    return f"{number(median(found))} ({number(min(found))} to {number(max(found))})"


def drift_cell(rows: Rows) -> str:
    """The drift of each process, marked where the machine was unsteady."""
    found = list(dict.fromkeys(values(rows, "drift")))
    mark = " *" if drift(rows) > UNSTEADY else ""
    return (", ".join(f"{value:.2f}" for value in found) or "–") + mark


def taken(rows: Iterable[Row]) -> str:
    """The commits and the days that rows are from."""
    found = {f"{row['commit']}, {str(row['time'])[:10]}".strip(", ") for row in rows}
    return "; ".join(sorted(found))


def origin(rows: Rows) -> str:
    """Device, commits and days, where a table has no column for the device."""
    return f"{listed(devices(rows))}; {taken(rows)}"


def devices(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["device"] for row in rows))


def listed(words: Sequence[str], last: str = "and") -> str:
    """`a, b and c`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
