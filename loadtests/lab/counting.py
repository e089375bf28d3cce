"""The figures of a long generation by thousands of tokens. Pure arithmetic; never imports MLX."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from loadtests.chaos.clients import percentile

THOUSAND = 1000


def by_thousand(number: int, times: Sequence[float], rows: int = 1) -> dict[str, Any]:
    """Figures of the tokens that came between the first and the last of `times`, one a row at each of the others."""
    gaps = [1e3 * (b - a) for a, b in pairwise(times)]
    return _figures(number, gaps, rows * len(gaps) / (times[-1] - times[0]))


def of_arrivals(number: int, arrivals: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Figures of one thousand of an answer; `arrivals` has (time, tokens so far) of each piece of its text, and of the
    last one before it. A token without text of its own shares the gap of the piece that it came with."""
    gaps: list[float] = []
    for (before, known), (now, tokens) in pairwise(arrivals):
        count = max(1, tokens - known)
        gaps += [1e3 * (now - before) / count] * count
    (first, known), (last, tokens) = arrivals[0], arrivals[-1]
    return _figures(number, gaps, (tokens - known) / (last - first))


def _figures(number: int, gaps: list[float], speed: float) -> dict[str, Any]:
    return {
        "thousand": number,
        "tok_s": speed,
        "p50_ms": percentile(gaps, 50),
        "p99_ms": percentile(gaps, 99),
    }


def numbers_in_order(text: str) -> int:
    """How many numbers from 1 on the text has in order before the first that is wrong or missing."""
    count = 0
    for word in text.replace(",", " ").split():
        digits = word.strip(".:;")
        if digits.isdecimal():
            if int(digits) != count + 1:
                break
            count += 1
    return count
