"""`marathon serve` that notes how long its event loop, which reads the engine's channel, was held up.

`python -m loadtests.pauses.observed_server FILE serve …`: FILE gets two floats, kept up to date: the longest time in
seconds that the loop was late, and the most processor time that the server process took while the loop was late. On a
busy machine only the second tells of the server: it doesn't grow while others have the processors. A reader may set
them to 0. Runs in the server process.
"""

from __future__ import annotations

import asyncio
import mmap
import socket
import struct
import sys
from pathlib import Path
from time import perf_counter, process_time

from server import cli, serve

TICK_SECONDS = 0.002
FORMAT = "dd"
SIZE = struct.calcsize(FORMAT)


class Note:
    """The longest times, in a file that two processes see."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), SIZE)

    def read(self) -> tuple[float, float]:
        """Seconds that the loop was late, and of those the ones that the process was at work."""
        late, held = struct.unpack(FORMAT, self._shared[:SIZE])
        return late, held

    def write(self, late: float, held: float) -> None:
        self._shared[:SIZE] = struct.pack(FORMAT, late, held)

    def raise_to(self, late: float, held: float) -> None:
        """Keeps the larger ones."""
        before = self.read()
        if late > before[0] or held > before[1]:
            self.write(max(late, before[0]), max(held, before[1]))


async def watch(note: Note) -> None:
    """Until it is cancelled."""
    last = perf_counter()
    worked = process_time()
    while True:
        await asyncio.sleep(TICK_SECONDS)
        late = perf_counter() - last - TICK_SECONDS
        note.raise_to(late, min(late, process_time() - worked))
        last = perf_counter()
        worked = process_time()


class ObservedServer(serve.Server):
    """The server, with the watch on its loop."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.watch = asyncio.ensure_future(watch(Note(Path(sys.argv[1]))))


def main() -> None:
    serve.Server = ObservedServer  # type: ignore[misc]
    cli.main(sys.argv[2:])


if __name__ == "__main__":
    main()
