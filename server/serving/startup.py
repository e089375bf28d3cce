"""What a start is busy with, said while it goes on.

Owns the name and the time of each stage between the open port and the first engine, and a thread that makes sure that
no more than a few seconds pass without a line. In a terminal there is a bar below the lines instead of their
repetition. `begin` and `say` may be called from any thread. Never does any of the work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from server.telemetry.progress_bar import ProgressBar

QUIET_SECONDS = 2.0  # longest silence
_TICK_SECONDS = 0.25
_TELLING_SECONDS = 1.0  # of work before its pace says when it ends,
_TELLING_SHARE = 0.02  # and so much of it must be done

log = logging.getLogger("marathon")


class StartupInterrupt(Exception):
    """The server is to end while it starts."""


class Startup:
    """The stages of one start. Owned by the code that begins it; used as a context."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, bar: ProgressBar | None = None) -> None:
        """`bar`: of the terminal, if the log goes to one."""
        self.seconds: dict[str, float] = {}  # by stage
        self._clock = clock
        self._bar = bar
        self._lock = threading.Lock()
        self._stage = self._newest = ""
        self._share: float | None = None  # of the newest line's work that is done
        self._began = self._stage_began = self._said = clock()
        self._measured = (clock(), 0.0)  # when the first share was known, and that share
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
        """A stage begins, and the one before it is done. Raises StartupInterrupt when the start is given up."""
        with self._lock:
            if stage == self._stage:
                return
            self._close_stage()
            self._stage = stage
        self.say(stage)

    def say(self, line: str, share: float | None = None) -> None:
        """A line about the stage. With a `share` of its work it is one of many, of which a terminal shows a bar and a
        file gets one now and then. Raises StartupInterrupt when the start is given up, which ends work that says how
        far it is."""
        if self._ended:
            raise StartupInterrupt
        if share is not None and self._share is None:
            self._measured = (self._clock(), share)
        self._newest = line
        self._share = share
        if share is None:
            self._log(line)
        elif self._bar is not None:
            self._draw()
        elif self._clock() - self._said >= QUIET_SECONDS:
            self._log(", ".join([f"{line} ({share:.0%})", *self._left()]))

    def give_up(self) -> None:
        """The next line raises StartupInterrupt."""
        self._ended = True
        self.finish()

    def finish(self) -> None:
        """Nothing more is said."""
        with self._lock:
            self._close_stage()
            self._stage = ""
            if self._bar is not None and not self._over.is_set():
                self._bar.clear()
            self._over.set()

    def _log(self, line: str) -> None:
        self._said = self._clock()
        log.info("%s", line)

    def _left(self) -> list[str]:
        """When the work ends at its pace so far, in words; nothing while that is too little to estimate."""
        began, first = self._measured
        took = self._clock() - began
        done = (self._share or 0.0) - first
        if self._share is None or took < _TELLING_SECONDS or done < _TELLING_SHARE:
            return []
        return [f"{took * (1 - self._share) / done:.0f} s left"]

    def _close_stage(self) -> None:
        now = self._clock()
        if self._stage:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._stage_began
        self._stage_began = now

    def _tick(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            if self._bar is not None:
                self._draw()
            elif self._stage and self._clock() - self._said >= QUIET_SECONDS:
                self._log(f"{self._newest}: {self._stage_seconds:.0f} s so far")

    @property
    def _stage_seconds(self) -> float:
        return self._clock() - self._stage_began

    def _draw(self) -> None:
        """The newest line as a bar, unless all is over."""
        with self._lock:
            if self._bar is None or not self._stage or self._over.is_set():
                return
            left = self._left()
            so_far = [] if left else [f"{self._stage_seconds:.0f} s so far"]
            self._bar.draw(", ".join([*left, self._newest, *so_far]), self._share)
