"""Messages to systemd about the server's life: that it serves, that it ends, and that it isn't stuck.

Owns systemd's protocol of datagrams (sd_notify). Runs on the event loop. Says nothing where no service manager asked,
which it does in the environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

SOCKET = "NOTIFY_SOCKET"
WATCHDOG = "WATCHDOG_USEC"
WATCHDOG_PID = "WATCHDOG_PID"

log = logging.getLogger("marathon")


class ServiceManager:
    """The service manager that started this process, if one did."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get(SOCKET, "")
        self._watchdog_seconds = _watchdog_seconds(environment)

    def ready(self) -> None:
        """An engine is ready."""
        self._notify("READY=1")

    def stopping(self) -> None:
        """The drain has begun."""
        self._notify("STOPPING=1")

    async def watch(self) -> None:
        """Say twice in each of its periods that the event loop turns, until cancelled."""
        if not self._watchdog_seconds:
            return
        while True:
            self._notify("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_seconds / 2)

    def _notify(self, news: str) -> None:
        if not self._address:
            return
        address = self._address
        if address.startswith("@"):  # a name in Linux's abstract namespace
            address = "\0" + address[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.sendto(news.encode(), address)
        except OSError as error:
            log.warning("the service manager can't be sent %s: %s", news, error)


def _watchdog_seconds(environment: Mapping[str, str]) -> float:
    """Seconds within which it wants to hear of this process; 0: never."""
    if environment.get(WATCHDOG_PID, str(os.getpid())) != str(os.getpid()):
        return 0.0
    try:
        return int(environment.get(WATCHDOG, "0")) / 1e6
    except ValueError:
        return 0.0
