"""The sockets that the server listens on.

Owns the way from a host and a port to sockets that listen, taken before anything is loaded, so that a second server on
the same port ends at once instead of being unreachable. Runs in the main thread, before the event loop. Accepts no
connection.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from typing import Any

from server.errors import StartupError

BACKLOG = 2048
_TRIES = 20  # for a free port that is free on every address of a host
_PRIVILEGED = 1024
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}

Address = tuple[int, Any]  # family, and what `bind` takes


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on each address that `host` has on this machine, all with one port; 0 takes a free one.

    Raises StartupError with one line when the port is taken on any of them, or can't be had.
    """
    addresses = _addresses(host, port)
    for tries_left in reversed(range(_TRIES if port == 0 else 1)):
        try:
            return _listen(addresses, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not tries_left:
                raise _cannot_listen(error, host, port) from None
    raise AssertionError("the last try returns or raises")


def _addresses(host: str, port: int) -> list[Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "there is no host of that name"
        raise StartupError(f"--host {host}: {reason or error}") from None
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _listen(addresses: list[Address], port: int) -> list[socket.socket]:
    with contextlib.ExitStack() as undo:
        sockets: list[socket.socket] = []
        absent: OSError | None = None
        for family, address in addresses:
            if port == 0 and sockets:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            try:
                sockets.append(undo.enter_context(_listening(family, address)))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent = error  # `localhost` is ::1 too where IPv6 is switched off
        if not sockets and absent is not None:
            raise absent
        undo.pop_all()
        return sockets


def _listening(family: int, address: Any) -> socket.socket:
    if sys.platform == "darwin" and is_answered(family, address):
        raise OSError(errno.EADDRINUSE, "in use")
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # With SO_REUSEADDR two may bind one address; only the first of them may listen.
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def is_answered(family: int, address: Any) -> bool:
    """Whether another process listens where `address` would.

    BSD's SO_REUSEADDR lets 127.0.0.1 be bound beside 0.0.0.0, of which the more precise one then gets every connection;
    Linux refuses that by itself.
    """
    host = _ANY.get(address[0], address[0])
    port = address[1]
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        return port != 0 and sock.connect_ex((host, port)) == 0


def _cannot_listen(error: OSError, host: str, port: int) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        return StartupError(f"port {port} on {host} is already in use; choose another with --port")
    if error.errno == errno.EADDRNOTAVAIL:
        return StartupError(f"can't listen on {host}: this machine doesn't have that address; choose one with --host")
    if error.errno == errno.EACCES and port < _PRIVILEGED:
        return StartupError(f"port {port} is kept for the system; choose one from {_PRIVILEGED} up with --port")
    return StartupError(f"can't listen on port {port} of {host}: {error.strerror or error}")
