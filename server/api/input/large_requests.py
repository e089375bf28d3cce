"""Large requests are prepared in a process of their own.

Parsing, validating and searching 30 MB takes the interpreter for seconds, whatever thread does it, and no stream would
move meanwhile; what it takes of memory would stay. Owns that process: started with the first large request, ended
when it has grown, has been idle for long or doesn't answer. `prepare` is called on the event loop and works in a thread
of its own, where it only waits; the other end is `api/request_worker.py`. Never parses a body.

What comes back is loaded piece by piece, so that other threads run in between.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, TypeVar

from server.config import child_place
from server.errors import NotReady, RequestError, RequestTooLarge
from server.supervision.engine_process import without_settings
from server.supervision.exit_status import DYING_SECONDS, TRIES, is_stopped, was_ended_from_outside

LARGE_BYTES = 1 << 16  # of a body; threads that prepare ones of 256 KiB held the interpreter for 0.17 s
SECONDS = 120  # for one request; the largest that fits a context takes some seconds
START_SECONDS = 60  # more for the first one: a process that loads a tokenizer on a busy machine
IDLE_SECONDS = 600.0  # until the process ends: a conversation of this size comes back with its next turn
LOOK_SECONDS = 1.0  # between two looks whether the process was stopped
HEAD_BYTES = 4
BREATH = 5_000  # values that are loaded before another thread has its turn
_MODULE = "server.api.request_worker"
_READ_BYTES = 1 << 20

log = logging.getLogger("marathon.api")
Result = TypeVar("Result")


class LargeRequests:
    """The process, and who waits for it. Owned by `AppContext`.

    Args:
        start: the first message to the process: how to load the tokenizer, and how the model is served.
        tokenizer: this process's own; results that refer to the other one's get it instead.
    """

    def __init__(self, start: object, tokenizer: object, *, seconds: int = SECONDS, idle: float = IDLE_SECONDS) -> None:
        self._greeting = start
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._idle = idle
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large")
        self._lock = threading.Lock()  # around the two below, which `close` takes from another thread
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._was_stopped = False  # the one that had the request under way
        self._socket: socket.socket | None = None
        self._rest: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        process = self._process
        if process is None or process.poll() is not None:
            return None
        return process.pid

    async def prepare(self, work: Callable[..., Result], content: bytes, *more: object) -> Result:
        """`work(model, content, *more)` in the process.

        Raises what it raises, RequestTooLarge when the process doesn't survive it or takes too long, and NotReady when
        there is no process to be had, or it is stopped again and again.
        """
        loop = asyncio.get_running_loop()
        if self._rest is not None:
            self._rest.cancel()
        asked: asyncio.Future[Result] = loop.run_in_executor(self._thread, self._ask, work, content, more)
        try:
            while not (await asyncio.wait([asked], timeout=LOOK_SECONDS))[0]:
                self._end_if_stopped()
            return await asked
        finally:
            asked.cancel()  # of a client that has left; nothing, where it is done
            if not self._closed:
                self._rest = loop.call_later(self._idle, self._thread.submit, self._end)

    def _end_if_stopped(self) -> None:
        """One that stands still gives no answer, and hears no alarm of its own; the request gets another one."""
        with self._lock:
            process = self._process
            if process is not None and is_stopped(process.pid):
                log.warning("the process for large requests, %d, was stopped and is replaced", process.pid)
                self._was_stopped = True
                process.kill()

    def _ask(self, work: Callable[..., Any], content: bytes, more: tuple[object, ...]) -> Any:
        answer = None
        for _ in range(TRIES):
            try:
                answer = self._asked(work, content, more)
                break
            except (OSError, EOFError, pickle.UnpicklingError):
                if not self._was_ended_from_outside():
                    break
        if answer is None and self._was_stopped and not self._closed:
            raise NotReady("The process that prepares requests of this size was stopped", retry_after=2)
        if answer is None:
            log.error("a request of %d bytes ended the process that prepares large ones", len(content))
            message = f"Preparing a request of {len(content)} bytes fails, or takes longer than {self._seconds} s"
            raise RequestTooLarge(message)
        outcome, value, last = answer
        if last:
            self._end()
        if outcome == "failed":
            raise value
        return value

    def _asked(self, work: Callable[..., Any], content: bytes, more: tuple[object, ...]) -> tuple[str, Any, bool]:
        try:
            if self.pid is not None and self._socket is not None:
                peer = self._socket
            else:
                peer = self._start()
        except OSError as error:
            log.error("no process for a large request: %s", error)
            raise NotReady("No process can be started for a request of this size", retry_after=2) from None
        write(peer, (work, more), content)
        return self._answer(peer)

    def _was_ended_from_outside(self) -> bool:
        """The process is gone, or has to go; whether that says nothing about the request. One that neither answered nor
        heard its alarm was stopped."""
        process = self._process
        status = None
        if process is not None and not self._closed:
            try:
                status = process.wait(DYING_SECONDS)
            except subprocess.TimeoutExpired:
                self._was_stopped = True
        self._end()
        return self._was_stopped or was_ended_from_outside(status)

    def _answer(self, peer: socket.socket) -> tuple[str, Any, bool]:
        with io.BufferedReader(socket.SocketIO(peer, "r"), _READ_BYTES) as file:
            outcome, value, last = Unpacker(file, self._tokenizer).load()
        if outcome == "failed" and not isinstance(value, RequestError):
            raise EOFError
        return outcome, value, last

    # ---------------------------------------------------------------- the process
    def _start(self) -> socket.socket:
        self._end()  # it may have ended by itself
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            process = _launch(theirs)
        except OSError:
            ours.close()
            raise
        ours.settimeout(self._seconds + 2 * START_SECONDS)  # it ends itself sooner, unless it is stopped
        with self._lock:
            self._process = process
            self._socket = ours
            self._was_stopped = False
            if self._closed:
                process.kill()
        write(ours, (self._greeting, self._seconds), b"")
        return ours

    def _end(self) -> None:
        with self._lock:
            process = self._process
            peer = self._socket
            self._process = self._socket = None
        if peer is not None:
            peer.close()
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Nothing of it is left; who waits for an answer gets an error."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        if self._rest is not None:
            self._rest.cancel()
        self._thread.shutdown(cancel_futures=True)
        self._end()


def _launch(peer: socket.socket) -> subprocess.Popen[bytes]:
    with peer:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, "--fd", str(peer.fileno())],
            pass_fds=[peer.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is the server's to hear
            env=without_settings(os.environ),
            cwd=child_place.FOLDER,
        )


# ---------------------------------------------------------------- what crosses
def write(peer: socket.socket, value: object, content: bytes) -> None:
    """A pickled value and bytes that aren't copied into it."""
    head = pickle.dumps((value, len(content)))
    peer.sendall(len(head).to_bytes(HEAD_BYTES, "big") + head)
    peer.sendall(content)


def read(file: IO[bytes]) -> tuple[Any, bytes]:
    """What `write` wrote. Raises EOFError when there is no more."""
    size = file.read(HEAD_BYTES)
    if len(size) < HEAD_BYTES:
        raise EOFError
    value, length = pickle.loads(file.read(int.from_bytes(size, "big")))
    return value, file.read(length)


class Packer(pickle.Pickler):
    """Writes a result for `Unpacker`: the tokenizer by name, and a mark at each so-many-th value."""

    def __init__(self, file: IO[bytes], tokenizer: object) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tokenizer = tokenizer
        self._count = 0

    def persistent_id(self, value: Any) -> object:
        if value is self._tokenizer:
            return "tokenizer"
        self._count += 1
        if self._count % BREATH == 0 and type(value) in (int, float, str):
            return (value,)
        return None


class Unpacker(pickle.Unpickler):
    """Loads what `Packer` wrote. At each mark a function is called, and with that other threads may run: a list of a
    million numbers, loaded in one go, would stop them all."""

    def __init__(self, file: IO[bytes], tokenizer: object) -> None:
        super().__init__(file)
        self._tokenizer = tokenizer

    def persistent_load(self, mark: Any) -> object:
        if mark == "tokenizer":
            return self._tokenizer
        return mark[0]
