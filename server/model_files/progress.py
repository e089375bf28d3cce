"""How work on files reports its progress.

Owns the shape of that, its words, and the way into the log. Pure but for the log.
"""

from __future__ import annotations

import logging
from typing import Protocol

log = logging.getLogger("marathon")


class ReportProgress(Protocol):
    """Hears a line, with the share of the work that is done where that is known. What it raises ends the work."""

    def __call__(self, line: str, share: float | None = None, /) -> None: ...


def to_log(line: str, share: float | None = None, /) -> None:
    """Write the line to the log."""
    log.info("%s", line)


def amount(done: int, total: int) -> str:
    """Say a part of some bytes, such as `3.2 of 14.9 GB`; without a total what there is."""
    digits, unit, name = (1, 1e9, "GB") if max(done, total) >= 1e9 else (0, 1e6, "MB")
    if not total:
        return f"{done / unit:.{digits}f} {name}"
    return f"{done / unit:.{digits}f} of {total / unit:.{digits}f} {name}"
