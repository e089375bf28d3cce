"""What the process for large requests is asked to do in tests. It imports this module, so there is little in it."""

from __future__ import annotations

import os
import signal
from typing import Any

from server.errors import ContextLengthError


def reply(model: Any, content: bytes, *more: object) -> object:
    return len(content), more


def refuse(model: Any, content: bytes) -> object:
    raise ContextLengthError.of(5, 4)


def fail(model: Any, content: bytes) -> object:
    raise ValueError(content)


def sleep(model: Any, content: bytes) -> object:
    signal.pause()
    return None


def sleep_at_first(model: Any, content: bytes, mark: str) -> object:
    if not os.path.exists(mark):
        with open(mark, "w", encoding="utf-8"):
            signal.pause()
    return len(content)


def be_killed(model: Any, content: bytes) -> object:
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def be_stopped(model: Any, content: bytes) -> object:
    os.kill(os.getpid(), signal.SIGSTOP)
    return None


def die(model: Any, content: bytes) -> object:
    os._exit(1)
