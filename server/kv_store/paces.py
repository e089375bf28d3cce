"""How fast this machine reads kept caches and how fast it reads prompts, so that a row begins by the faster way.

Owns both measured paces and their file beside a model's kept caches, since an engine that has just started has measured
neither. The engine's main thread notes what it sees and asks; the writer's thread saves.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from server.config.whole_file import write_whole
from server.kv_store.files.folder import FILE_MODE

ASSUMED = 2e-9  # seconds a byte of a reading takes, until one was measured: 0.5 GB/s, as on a GPU with its own memory
SURE = 0.7  # share of a reading's seconds that a prefill may take to be chosen: it keeps other rows from their steps
DOUBT = 0.9  # by which a reading is taken for faster each time that it isn't chosen, so that it is tried again
MEMORY = {"prefill": 1 << 17, "reading": 1 << 31}  # tokens and bytes after which what was seen counts half
LEAST = {"prefill": 256, "reading": 1 << 20}  # less of them at a time says little
SAVE_SECONDS = 5.0


log = logging.getLogger("marathon.engine")


class Pace(msgspec.Struct):
    """How long so much took, lately."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float, memory: float) -> None:
        self.amount += amount
        self.seconds += seconds
        if self.amount > memory:
            self.amount /= 2
            self.seconds /= 2

    @property
    def each(self) -> float:
        """Seconds for one; 0 while nothing is known."""
        if not self.amount:
            return 0.0
        return self.seconds / self.amount


class _SavedPaces(msgspec.Struct):
    prefill: Pace
    reading: Pace


class Paces:
    """Owned by the engine's main thread."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`file`: where they are kept; a file that can't be read or written is no fault."""
        self._file = file
        self._clock = clock
        self._seen = _SavedPaces(Pace(), Pace())
        self._saved = -math.inf
        self._has_changed = False
        if file is not None:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                self._seen = msgspec.json.decode(file.read_bytes(), type=_SavedPaces)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """So many tokens of prompts were read."""
        if tokens >= LEAST["prefill"]:
            self._seen.prefill.add(tokens, seconds, MEMORY["prefill"])
            self._has_changed = True

    def note_reading(self, size: int, seconds: float) -> None:
        """So many bytes of kept caches were read, put together and given to MLX."""
        if size >= LEAST["reading"]:
            self._seen.reading.add(size, seconds, MEMORY["reading"])
            self._has_changed = True

    @property
    def token_seconds(self) -> float:
        """Seconds that a token of a prompt takes; 0 while nothing is known."""
        return self._seen.prefill.each

    def prefers_prefill(self, tokens: int, size: int) -> bool:
        """Whether a prompt's next `tokens` are there sooner by prefill than by reading `size` bytes of kept caches."""
        reading = size * (self._seen.reading.each or ASSUMED)
        prefill = tokens * self.token_seconds
        chosen = 0 < prefill < SURE * reading
        log.debug("%d tokens: %.3f s by prefill (0: unknown), %.3f s from disk", tokens, prefill, reading)
        if chosen:
            self._seen.reading.seconds *= DOUBT
        return chosen

    def save(self, *, at_once: bool = False) -> None:
        """Write down what has changed, now and then."""
        now = self._clock()
        if self._file is None or not self._has_changed or (not at_once and now - self._saved < SAVE_SECONDS):
            return
        self._saved = now
        self._has_changed = False
        with contextlib.suppress(OSError):
            write_whole(self._file, msgspec.json.encode(self._seen), FILE_MODE)
