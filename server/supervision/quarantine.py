"""Prompts that have cost engines, refused for a minute.

Owns that memory. An agent whose request has failed sends it again at once, sometimes by another route: it would kill as
many engines again. Runs on the event loop; one a supervisor, for every protocol. Never decides whose fault it is.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from server.errors import FatalPrompt

SECONDS = 60.0
MOST = 256  # prompts


class Quarantine:
    """Digests of prompts and when each was added; mutable. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: dict[bytes, float] = {}

    def add(self, prompt: Sequence[int]) -> None:
        """Refuse this prompt from now on. The newest is kept longest."""
        while len(self._times) >= MOST:
            del self._times[next(iter(self._times))]
        self._times[_digest(prompt)] = self._clock()

    def check(self, prompt: Sequence[int]) -> None:
        """Raise FatalPrompt for a prompt that is in quarantine. Costs nothing as long as none is."""
        oldest = self._clock() - SECONDS
        self._times = {digest: when for digest, when in self._times.items() if when > oldest}
        if self._times and _digest(prompt) in self._times:
            message = f"The engine was lost each time it worked on this prompt; it isn't tried again for {SECONDS:g} s."
            raise FatalPrompt(message, param=None)


def _digest(prompt: Sequence[int]) -> bytes:
    return hashlib.sha256(array("q", prompt).tobytes()).digest()
