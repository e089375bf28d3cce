"""The engine's end of the socket, and its heartbeat.

Owns the reader thread, which takes commands and ends the process at EOF so that no engine outlives its server, and
the writer thread, which sends progress each second, also while the main thread is stuck. Never touches MLX.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from time import monotonic

from server.ipc import framing, messages
from server.ipc.framing import Frames
from server.ipc.messages import PROGRESS_SECONDS, Command, Event, Progress, WeightsRead
from server.ipc.sequence import TokenTable
from server.ipc.snapshot import Snapshot

READ_SIZE = 1 << 16
SERVING = "serving"  # the stage that doesn't end

log = logging.getLogger("marathon.engine")


class Channel:
    """The engine's end of the socket. `send` may be called by the main and the writer thread.

    Attributes:
        tokens: what the model's tokens say, once the server has sent it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: something else has come
        self.tokens: Future[TokenTable] = Future()

    def start_reader(self) -> None:
        """Begin to take commands."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()

    def _read(self) -> None:
        frames = Frames()
        try:
            while data := self._socket.recv(READ_SIZE):
                for frame in frames.feed(data):
                    self._take(framing.unpack_command(frame))
        except (OSError, framing.TornFrame) as error:
            log.error("the connection to the server is broken: %s", error)
        os._exit(0)  # the server is gone; whatever the main thread does, none waits for it

    def _take(self, command: Command) -> None:
        """Tokens go by the main thread, which may be loading the model."""
        if isinstance(command, messages.Learn):
            self.tokens.set_result(command.tokens)
        else:
            self._inbox.put(command)

    def send(self, event: Event) -> None:
        frame = framing.pack(event)
        with self._lock:
            self._socket.sendall(frame)

    def send_garbage(self) -> None:
        """What a process that writes over its own memory might send. For fault injection."""
        with self._lock:
            self._socket.sendall(b"\xff\x00garbage" * 64)

    def wake(self) -> None:
        """End the main thread's wait for a command; from any thread."""
        self._inbox.put(None)

    def receive(self, timeout: float | None) -> Command | None:
        """The next command; None after `timeout` seconds, or when it is woken."""
        try:
            return self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None

    def received(self) -> Iterator[Command]:
        """Commands that are here already."""
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None:
                yield command


class Heartbeat:
    """The progress counter and the thread that reports it."""

    def __init__(self, channel: Channel, epoch: int, snapshot: Snapshot) -> None:
        self._channel = channel
        self._epoch = epoch
        self._snapshot = snapshot
        self._stopped = threading.Event()
        self.count = 0
        self.stage = "starting"
        self._weights: WeightsRead | None = None
        self._beaten = monotonic()

    def start(self) -> None:
        threading.Thread(target=self._run, name="writer", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def enter(self, stage: str) -> None:
        """A stage of loading begins; the server gets it at once."""
        self.stage = stage
        self._weights = None
        self.beat()
        self.report()

    def note_weights(self, done: int, total: int) -> None:
        """So many bytes of the weights are read; sent at once, since a quick load is over within a second."""
        self._weights = WeightsRead(done, total)
        self.beat()
        self.report()

    def beat(self) -> None:
        """A chunk, a step or a stage is done."""
        self.count += 1
        self._beaten = monotonic()

    def report(self) -> None:
        """Send progress, from the writer thread too: packing the snapshot there is safe, as `ipc.snapshot` explains.

        The snapshot goes with it once the engine serves. Before that nothing has been read, and nothing isn't zero.
        """
        still = monotonic() - self._beaten
        snapshot = None
        if self.stage == SERVING:
            snapshot = self._snapshot
        self._channel.send(Progress(self._epoch, self.count, self.stage, snapshot, still, self._weights))

    def _run(self) -> None:
        while not self._stopped.wait(PROGRESS_SECONDS):
            try:
                self.report()
            except OSError:
                return  # the reader thread ends the process
