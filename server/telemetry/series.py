"""Metric families that count for themselves: a counter, a histogram, and a rate over a short window.

Owns nothing but the numbers put into it. Runs on the server's event loop only, hence no locks: an observation costs
well under a microsecond, so it may be made for every token. Never touches a registry; `Metrics` hands the results to
one at scrape time. Label sets are created up front, so that `rate()` works from the first event on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

LabelValues = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of a family before anything is counted."""

    name: str
    help: str
    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def metric(family: Family, samples: Mapping[LabelValues, float]) -> Metric:
    """A counter's or gauge's samples in the client library's form."""
    kind: type[CounterMetricFamily | GaugeMetricFamily] = GaugeMetricFamily
    if family.type == "counter":
        kind = CounterMetricFamily
    result = kind(family.name, family.help, labels=family.labels)
    for values, value in samples.items():
        result.add_metric(values, value)
    return result


class Counter:
    """Only rises. `labels` maps each label to the values that exist from the start; none: they come as they come."""

    def __init__(self, name: str, help: str, **labels: Iterable[str]) -> None:
        self.family = Family(name, help, "counter", tuple(labels))
        self._values = dict.fromkeys(product(*labels.values()), 0.0)

    def add(self, amount: float, *values: str) -> None:
        """Adds `amount`; values never seen before begin a series, so that no caller can fail here."""
        self._values[values] = self._values.get(values, 0.0) + max(amount, 0.0)

    def read(self) -> dict[str, int]:
        """Counts by the value of the only label."""
        return {values[0]: round(value) for values, value in self._values.items()}

    def __bool__(self) -> bool:
        """Whether there is any series yet."""
        return bool(self._values)

    def collect(self) -> Metric:
        return metric(self.family, self._values)


class Histogram:
    """Observations by upper bound. The client library's own takes a lock and three times as long."""

    def __init__(self, name: str, help: str, buckets: tuple[float, ...], **labels: Iterable[str]) -> None:
        self.family = Family(name, help, "histogram", tuple(labels), buckets)
        self._rows = {values: self._row() for values in product(*labels.values())}

    def _row(self) -> list[float]:
        """Observations in each bucket, those beyond the last bound, and at the end their sum."""
        return [0.0] * (len(self.family.buckets) + 2)

    def observe(self, value: float, *values: str, count: int = 1) -> None:
        """`count` observations of `value`. A clock that stepped back counts as no time."""
        row = self._rows.get(values)
        if row is None:
            row = self._rows[values] = self._row()
        if value < 0.0:
            value = 0.0
        row[bisect_left(self.family.buckets, value)] += count
        row[-1] += value * count

    def read(self) -> tuple[int, float]:
        """Number and sum of all observations."""
        return round(sum(sum(row[:-1]) for row in self._rows.values())), sum(row[-1] for row in self._rows.values())

    def __bool__(self) -> bool:
        """Whether there is any series yet."""
        return bool(self._rows)

    def collect(self) -> Metric:
        family = self.family
        result = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        bounds = [*(str(float(bound)) for bound in family.buckets), "+Inf"]
        for values, (*counts, total) in self._rows.items():
            result.add_metric(values, list(zip(bounds, accumulate(counts), strict=True)), total)
        return result


class Rate:
    """Events a second over the last `window` seconds; 0 once they have passed in silence."""

    def __init__(self, clock: Callable[[], float], window: float = 5.0, slot: float = 0.25) -> None:
        self._clock = clock
        self._window = window
        self._slot = slot
        self._slots: deque[list[float]] = deque()  # [time of the first event, events]

    def add(self, events: float) -> None:
        now = self._clock()
        if self._slots and now - self._slots[-1][0] < self._slot:
            self._slots[-1][1] += events
        else:
            self._forget(now)
            self._slots.append([now, events])

    def read(self) -> float:
        """A burst shorter than a second is spread over one, or its first event would read as a very high rate."""
        now = self._clock()
        self._forget(now)
        if not self._slots:
            return 0.0
        return sum(events for _, events in self._slots) / max(1.0, now - self._slots[0][0])

    def _forget(self, now: float) -> None:
        while self._slots and now - self._slots[0][0] > self._window:
            self._slots.popleft()
