"""How long other threads of this process can't run."""

from __future__ import annotations

import threading
import time


class Ticks:
    """The longest time for which another thread couldn't run."""

    def __enter__(self) -> Ticks:
        self.longest, self._ended = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._tick)
        self._thread.start()
        time.sleep(0.05)
        self.longest, self._began = 0.0, time.perf_counter()
        return self

    def _tick(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(0.001):
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last), now

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self._ended.set()
        self._thread.join()
