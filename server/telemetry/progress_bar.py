"""A line at the foot of a terminal that shows how far something is.

Owns that line. It is drawn anew over itself, and the cursor rests at its beginning: a log line of any process takes
its place (`logs.TerminalLines` clears it first), and the next drawing comes below that. Any thread may draw; each
drawing is one write. Never shown in a pipe.
"""

from __future__ import annotations

import os
from typing import TextIO

CLEAR = "\r\033[K"
CELLS = 20
_NARROW = 80  # columns where the terminal doesn't say how many it has


def is_terminal(stream: TextIO) -> bool:
    """Whether a line of `stream` can be written over."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def cells(share: float) -> str:
    full = round(CELLS * min(1.0, max(0.0, share)))
    return "#" * full + "." * (CELLS - full)


class ProgressBar:
    """One line of one stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def draw(self, text: str, share: float | None = None) -> None:
        """Show `text`, behind a bar where a share of the work is done. What is too wide is cut; no text is no line."""
        if share is not None:
            text = f"[{cells(share)}] {share:4.0%} {text}"
        if text:
            self._write(f"{CLEAR}{text[: self._columns() - 1]}\r")
        else:
            self.clear()

    def clear(self) -> None:
        self._write(CLEAR)

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _NARROW
        except (OSError, ValueError):
            return _NARROW

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
