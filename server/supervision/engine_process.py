"""One engine process and the socket to it.

Owns both from spawn to burial: writes commands, cuts what comes back into events, notices the end. Runs on the event
loop of the server process and never blocks it. It doesn't know what the messages mean, and it never starts a second
engine: the next engine after a death, and its time, are the engine lifecycle's business.

The end is noticed twice over: by EOF on the socket, and by a pidfd where the system has them. Whichever comes first,
everything that the engine wrote before it died is read and handed on before `lost` is set; a torn last frame is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from server.config import child_place
from server.ipc import framing, messages
from server.settings import ENV_PREFIX

SOCKET_BUFFER = 4 << 20  # macOS gives 8 KiB, less than one step of a large batch with logprobs
READ_SIZE = 1 << 18
_POLL_SECONDS = 0.01

log = logging.getLogger("marathon")


class Engine(Protocol):
    """A process at the other end of `socket`. `exit_fd`, if any, turns readable when it ends."""

    pid: int
    socket: socket.socket
    exit_fd: int | None

    def kill(self) -> None: ...

    def poll(self) -> int | None: ...


class EngineProcess:
    """A real one, leader of a process group of its own."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.socket = sock
        self.pid = process.pid
        self.exit_fd = _exit_fd(process.pid)
        self._process = process

    def kill(self) -> None:
        """End the whole group. Once the leader is reaped its number may be another process's: then nothing happens."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        return self._process.poll()


def _exit_fd(pid: int) -> int | None:
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel: EOF has to do
        return None


def launch(command: Sequence[str]) -> EngineProcess:
    """Starts `command --fd N`, N being its end of a new socketpair. Raises OSError if no process can be had."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
            fd = theirs.fileno()
            process = subprocess.Popen(
                [*command, "--fd", str(fd)],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=child_place.FOLDER,
                env=without_settings(os.environ),
            )
    except OSError:
        ours.close()
        raise
    ours.setblocking(False)
    return EngineProcess(process, ours)


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings travel in `Start`; the API keys among them are none of the engine's business."""
    return {name: value for name, value in environment.items() if not name.upper().startswith(ENV_PREFIX)}


def spawn(epoch: int) -> Engine:
    """The engine of `server.engine`. `-P`: a server.py in the user's folder must not be imported instead of us."""
    return launch([sys.executable, "-P", "-m", "server.engine"])


class EngineConnection:
    """The server's end of one engine's life. `lost` is set once, after the last event."""

    def __init__(self, engine: Engine, epoch: int, on_event: Callable[[messages.Event], None]) -> None:
        self.epoch = epoch
        self.pid = engine.pid
        self.garbage: str | None = None  # what made the bytes on the socket no message
        self._engine = engine
        self._on_event = on_event
        self._frames = framing.Frames()
        self._outbox = bytearray()
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(engine.socket, self._readable)
        if engine.exit_fd is not None:
            self._loop.add_reader(engine.exit_fd, self._exited)

    # ---------------------------------------------------------------- out
    def send(self, command: messages.Command) -> None:
        """Never blocks; what the socket won't take waits here. To a dead engine: nothing happens."""
        if self.lost.done():
            return
        self._outbox += framing.pack(command)
        self._flush()

    def _flush(self) -> None:
        try:
            sent = self._engine.socket.send(self._outbox)
        except BlockingIOError:
            sent = 0
        except OSError:  # it is gone; the reader will find out
            sent = len(self._outbox)
        del self._outbox[:sent]
        if self._outbox:
            self._loop.add_writer(self._engine.socket, self._flush)
        else:
            self._loop.remove_writer(self._engine.socket)

    # ---------------------------------------------------------------- in
    def drain(self) -> None:
        """Handles whatever has arrived, now."""
        while not self.lost.done() and self._readable():
            pass

    def _readable(self) -> bool:
        """One read. False: nothing there, or nothing will come any more."""
        try:
            data = self._engine.socket.recv(READ_SIZE)
        except BlockingIOError:
            return False
        except OSError:  # reset: the same as the end
            data = b""
        if not data:
            self._end()
            return False
        self._take(data)
        return not self.lost.done()

    def _take(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                event = framing.unpack_event(frame)
                if event.epoch == self.epoch:
                    self._on_event(event)
        except framing.TornFrame as error:
            self._give_up(str(error))
        except Exception as error:  # of the server's own: what follows was never handled, so this engine is of no use
            log.exception("a message of engine %d can't be handled", self.pid)
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        self.garbage = why
        self.kill()
        self._end()

    def release(self) -> Engine:
        """Lets go of a living engine, which another connection may take over. Nothing of it may be unread."""
        self._unwatch()
        self.lost.set_result(None)
        return self._engine

    # ---------------------------------------------------------------- the end
    def kill(self) -> None:
        """SIGKILL to the engine's group; `lost` follows."""
        self._engine.kill()

    def _exited(self) -> None:
        self.drain()
        self._end()

    def _end(self) -> None:
        if not self.lost.done():
            self._forget()
            self.lost.set_result(None)

    def _unwatch(self) -> None:
        self._loop.remove_reader(self._engine.socket)
        self._loop.remove_writer(self._engine.socket)
        if self._engine.exit_fd is not None:
            self._loop.remove_reader(self._engine.exit_fd)

    def _forget(self) -> None:
        self._unwatch()
        self._engine.socket.close()
        if self._engine.exit_fd is not None:
            os.close(self._engine.exit_fd)
            self._engine.exit_fd = None

    async def bury(self, timeout: float) -> int | None:
        """Kills what is left of the group and waits for its memory to be given back. The exit status, or None if the
        process is still there after `timeout` seconds.

        A new engine must not load next to an old one that still holds its weights, hence the wait.
        """
        self._engine.kill()
        self._end()
        until = self._loop.time() + timeout
        while (status := self._engine.poll()) is None and self._loop.time() < until:
            await asyncio.sleep(_POLL_SECONDS)
        if status is None:
            log.warning("engine %d is still there %.0f s after it was killed", self.pid, timeout)
        return status
