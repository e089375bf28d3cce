"""Work that is done again and again and must be done again after it has failed.

Owns no timer and no thread: its caller decides when. A fault is logged with its place, but not each second.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

QUIET_SECONDS = 60.0  # between two lines about the same work

log = logging.getLogger("marathon")


class Repetition:
    """Calls `work`; what it raises goes to the log and no further.

    Args:
        name: of the work, as a log line says it.
        clock: monotonic seconds.
    """

    def __init__(self, name: str, work: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._work = work
        self._clock = clock
        self._said = -math.inf

    def __call__(self) -> None:
        try:
            self._work()
        except Exception:
            self._say()

    def _say(self) -> None:
        if self._clock() - self._said >= QUIET_SECONDS:
            self._said = self._clock()
            log.exception("%s failed, and is tried again", self._name)
