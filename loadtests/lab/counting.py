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
    return {
        "thousand": number,
        "tok_s": rows * len(gaps) / (times[-1] - times[0]),
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
