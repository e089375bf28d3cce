"""Whether a client is still there, and how far it has read.

Owns what TCP knows about one connection's other end. Runs on the event loop. Never decides what follows from it, but
for a connection that turns out to be lost, which it aborts.

A client that shuts down its sending side looks like one that has left: both send a FIN. They differ in what comes back
for bytes that are sent to them. A client that has left resets the connection on the first byte, and the next finds
that out; one that waits for its answer must be able to ignore them. `probe` sends what it can ignore.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import socket
import sys
import termios
from collections.abc import Callable

SO_NWRITE = 0x1024  # macOS; Python has no name for it
FIRST_PROBE_SECONDS = 0.02
LAST_PROBE_SECONDS = 10.0


class Presence:
    """The other end of one connection. `filler` gives the bytes that may be sent now and mean nothing to the client;
    none where there are none."""

    def __init__(self, transport: asyncio.Transport, filler: Callable[[], bytes]) -> None:
        self._transport = transport
        self._filler = filler
        self._timer: asyncio.TimerHandle | None = None
        self._seconds = FIRST_PROBE_SECONDS

    # ---------------------------------------------------------------- how far it has read
    def unsent(self) -> int:
        """Bytes of answers that the client's machine hasn't acknowledged, as far as the system knows."""
        if self._transport.is_closing():
            return 0
        return self._transport.get_write_buffer_size() + in_kernel(self._transport.get_extra_info("socket").fileno())

    # ---------------------------------------------------------------- whether it is there
    @property
    def is_local(self) -> bool:
        """The client is on this machine."""
        peer = self._transport.get_extra_info("peername")
        return isinstance(peer, tuple) and ipaddress.ip_address(peer[0].partition("%")[0]).is_loopback

    def watch(self) -> None:
        """Finds out within moments, and from then on ever more rarely, whether a client that sends no more is there."""
        if self._transport.is_closing():
            return
        if not self._transport.get_write_buffer_size():  # else what is still to be sent will show it
            self._probe()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self.watch)
        self._seconds = min(2 * self._seconds, LAST_PROBE_SECONDS)

    def forget(self) -> None:
        """Ends the watch."""
        if self._timer is not None:
            self._timer.cancel()

    def _probe(self) -> None:
        filler = self._filler()
        if filler is not OUT_OF_BAND:
            self._transport.write(filler)
        elif not send_out_of_band(self._transport.get_extra_info("socket").fileno()):
            self._transport.abort()


# A byte that TCP carries beside the stream: no HTTP client sees it. Some firewalls put it into the stream, so only
# clients on this machine are sent any. A further one would put an earlier one there while what stood before that is
# unread, so they are only sent before the connection's first answer.
OUT_OF_BAND = b"\n"


def send_out_of_band(descriptor: int) -> bool:
    """False where the connection is lost."""
    with socket.socket(fileno=os.dup(descriptor)) as sock:  # uvloop's own lends no method to send
        try:
            sock.send(OUT_OF_BAND, socket.MSG_OOB | socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError:
            return False
    return True


def in_kernel(descriptor: int) -> int:
    """Bytes that the kernel keeps to send, or to send again; 0 where it doesn't say."""
    with contextlib.suppress(OSError):
        if sys.platform == "darwin":
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                return sock.getsockopt(socket.SOL_SOCKET, SO_NWRITE)
        return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0
