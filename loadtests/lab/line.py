"""A straight line through points, and how well it fits. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression


@dataclass(frozen=True, slots=True)
class Line:
    """y = intercept + slope · x, and R², the share of y's variance that it explains."""

    intercept: float
    slope: float
    r2: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def fit(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The least-squares line. Raises StatisticsError for fewer than two different xs."""
    slope, intercept = linear_regression(xs, ys)
    mean = fmean(ys)
    total = sum((y - mean) ** 2 for y in ys)
    rest = sum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return Line(intercept, slope, 1 - rest / total if total else 1.0)
