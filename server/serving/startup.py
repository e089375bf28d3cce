"""What a start is busy with, said while it goes on.

Owns the name and the time of each stage between the open port and the first engine, and a thread that makes sure that
no more than a few seconds pass without a line. `begin` and `say` may be called from any thread. Never does any of the
work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

QUIET_SECONDS = 2.0  # longest silence
_TICK_SECONDS = 0.25

log = logging.getLogger("marathon")


class StartupInterrupt(Exception):
    """The server is to end while it starts."""


class Startup:
    """The stages of one start. Owned by the code that begins it; used as a context."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}  # by stage
        self._clock = clock
        self._lock = threading.Lock()
        self._stage = self._newest = ""
        self._began = self._stage_began = self._said = clock()
        self._over = threading.Event()
        self._ended = False

    def __enter__(self) -> Startup:
        threading.Thread(target=self._tick, name="startup", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    @property
    def reason(self) -> str:
        """The newest line, for those who ask why nothing is served yet."""
        return self._newest

    @property
    def total(self) -> float:
        """Seconds since the start began."""
        return self._clock() - self._began

    def begin(self, stage: str) -> None:
        """A stage begins, and the one before it is done. Raises Ended when the start is given up."""
        with self._lock:
            if stage == self._stage:
                return
            self._close_stage()
            self._stage = stage
        self.say(stage)

    def say(self, line: str) -> None:
        """A line about the stage. Raises Ended when the start is given up, which ends work that says how far it is."""
        if self._ended:
            raise StartupInterrupt
        self._newest = line
        self._said = self._clock()
        log.info("%s", line)

    def give_up(self) -> None:
        """The next line raises Ended."""
        self._ended = True
        self.finish()

    def finish(self) -> None:
        """Nothing more is said."""
        with self._lock:
            self._close_stage()
            self._stage = ""
        self._over.set()

    def _close_stage(self) -> None:
        now = self._clock()
        if self._stage:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._stage_began
        self._stage_began = now

    def _tick(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            now = self._clock()
            with self._lock:
                due = self._stage and now - self._said >= QUIET_SECONDS
                line = f"{self._newest}: {now - self._stage_began:.0f} s so far"
                if due:
                    self._said = now
            if due:
                log.info("%s", line)
