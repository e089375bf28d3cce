"""Keeps a Mac from idle sleep while generations run.

Owns the sleep assertion: a child `caffeinate` that lives from the first generation to some seconds after the last.
Runs on the event loop of the server process, looking once a second. Never delays a request: without caffeinate the Mac
may sleep, and a log line says so. The lid and the Apple menu still put it to sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

PERIOD_SECONDS = 1.0
IDLE_SECONDS = 10.0  # so that a conversation's short pauses start no new child

log = logging.getLogger("marathon")


class Assertion(Protocol):
    """The assertion that this machine stays awake, in force from `hold` to `release`."""

    def hold(self) -> None: ...

    def release(self) -> None: ...


class Caffeinate:
    """macOS's own tool as a child. With `-w` it ends when this process does, however that comes about."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = command or ["caffeinate", "-i", "-w", str(os.getpid())]
        self._process: subprocess.Popen[bytes] | None = None

    def hold(self) -> None:
        try:  # a session of its own: Ctrl-C in the terminal begins a drain, during which it is still needed
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            log.warning("keep_awake: %s can't be started: %s", self._command[0], error.strerror)

    def release(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.kill()  # the system drops what a dead process asked for; this one has nothing to tidy up
            process.wait()


def assertion(wanted: bool, platform: str = sys.platform) -> Assertion | None:
    """The one of this system; None where none is wanted or there is none."""
    if wanted and platform != "darwin":
        log.info("keep_awake does nothing here: it is for macOS")
    if wanted and platform == "darwin":
        return Caffeinate()
    return None


async def watch(
    busy: Callable[[], bool],
    held: Assertion,
    *,
    period: float = PERIOD_SECONDS,
    idle: float = IDLE_SECONDS,
) -> None:
    """Holds while `busy` and for `idle` seconds after, until cancelled."""
    clock = asyncio.get_running_loop().time
    until = -math.inf  # when to let go; in the past: nothing is held
    holding = False
    try:
        while True:
            if busy():
                until = clock() + idle
            if holding != (clock() < until):
                holding = not holding
                (held.hold if holding else held.release)()
            await asyncio.sleep(period)
    finally:
        if holding:
            held.release()


@contextlib.asynccontextmanager
async def while_busy(wanted: bool, busy: Callable[[], bool]) -> AsyncIterator[None]:
    """Watches as long as the block lasts. Nothing is left running after it."""
    held = assertion(wanted)
    if held is None:
        yield
        return
    task = asyncio.create_task(watch(busy, held))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
