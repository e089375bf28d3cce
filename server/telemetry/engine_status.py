"""The state of a server's engines at one moment, as /health and /metrics show it.

A value: it says nothing of what comes next, and reading it asks no engine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from server.ipc.messages import Ready, WeightsRead
from server.ipc.snapshot import Action, Snapshot


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engines of one server at one moment."""

    ready: Ready | None = None  # facts of the living engine, once its model is loaded
    known: Ready | None = None  # facts of the newest engine that was ever ready
    snapshot: Snapshot | None = None  # newest of the living engine
    stage: str = ""  # of the newest engine, in words such as `loading the weights`
    weights: WeightsRead | None = None  # how far that has read them, while it does
    epoch: int = 0
    pid: int | None = None
    restarts: int = 0  # engines lost so far, planned or not
    is_up: bool = False  # an engine has its model loaded and gives its signs of life
    last_step_age_seconds: float | None = None  # since an engine finished a step or a chunk; None before the first
    spare: bool = False  # a spare process is ready to become the next engine
    paces: Mapping[int, float] = field(default_factory=dict)  # tokens a second by sequence, of prompts being read
    actions: tuple[Action, ...] = ()  # newest automatic acts of the server process

    @property
    def last_step_time(self) -> float | None:
        """When an engine last finished a step or a chunk, in seconds since 1970."""
        if self.last_step_age_seconds is None:
            return None
        return time.time() - self.last_step_age_seconds
