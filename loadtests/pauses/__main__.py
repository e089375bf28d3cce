"""Whether a request can stop the streams of others: `python -m loadtests.pauses [--only text ids …] [--share 0.1]`.

Serves a tiny model, lets streams run, sends the worst request of each kind beside them, and prints the longest pause of
a stream, of `GET /live` and of the event loop, which reads the engine's channel; `held` is the part of the loop's pause
in which the server process itself was at work, which others on the machine don't change. The first line is the same
without any such request. The exit code is 1 when a pause is longer than its bound: 0.1 s beside a body of more than
1 MiB, else 0.05 s; where the machine pauses longer by itself, that counts. Never imports MLX.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, sleep

from loadtests import harness
from loadtests.pauses.observed_server import Note
from loadtests.pauses.watchers import SECONDS, LiveWatcher, StreamWatcher
from loadtests.pauses.worst_requests import MIB, WorstRequest, worst
from loadtests.zoo.models import obtain

MODEL = "cheap"
CONTEXT = 8192  # tokens: no text of the sizes that are sent fits, so that none is generated from
STREAMS = 2
IDLE_SECONDS = 8.0  # of the comparison without a request
REST_SECONDS = 0.3  # before and after each kind
LARGE_BOUND, BOUND = 0.1, 0.05
HEAD = f"{'kind':32} {'bytes':>11} {'seconds':>8} {'stream':>7} {'/live':>7} {'loop':>7} {'held':>7}  answers"


@dataclass(frozen=True, slots=True)
class Pauses:
    """The longest of each, in seconds."""

    stream: float
    live: float
    loop: float
    held: float

    @property
    def longest(self) -> float:
        return max(self.stream, self.live, self.loop)

    def __str__(self) -> str:
        return f"{self.stream:7.3f} {self.live:7.3f} {self.loop:7.3f} {self.held:7.3f}"


class Site:
    """A server, and who looks at it."""

    def __init__(self, server: harness.Server, note: Note, stack: ExitStack) -> None:
        self.port = server.port
        self._note = note
        self._streams = [stack.enter_context(StreamWatcher(server.port)) for _ in range(STREAMS)]
        self._live = stack.enter_context(LiveWatcher(server.port))
        while not all(stream.seen for stream in self._streams):
            sleep(REST_SECONDS)

    def beside(self, work: Callable[[], None]) -> Pauses:
        """The longest pauses while `work` is done."""
        sleep(REST_SECONDS)
        self._note.write(0.0, 0.0)
        for watcher in (*self._streams, self._live):
            watcher.longest = 0.0
        work()
        sleep(REST_SECONDS)
        return Pauses(max(stream.longest for stream in self._streams), self._live.longest, *self._note.read())


@contextmanager
def observed(model: Path, folder: Path, **values: object) -> Iterator[Site]:
    """A running server with streams; `values` are its options with underscores."""
    file, port = folder / "loop", harness.free_port()
    file.write_bytes(bytes(64))
    command = [sys.executable, "-m", "loadtests.pauses.observed_server", str(file), "serve"]
    chosen = harness.options({"model": model, "port": port, "context": CONTEXT, **values})
    server = harness.Server("marathon", [*command, *chosen], port, "/ready", folder / "log")
    try:
        server.wait_ready()
        with ExitStack() as stack:
            yield Site(server, Note(file), stack)
    finally:
        server.stop()


# ---------------------------------------------------------------- the requests
def send(port: int, request: WorstRequest, answers: Counter[str]) -> None:
    """Sends all bodies at once; counts each status in `answers`, and each error."""
    threads = [threading.Thread(target=_ask, args=(port, request, body, answers)) for body in request.bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _ask(port: int, request: WorstRequest, body: bytes, answers: Counter[str]) -> None:
    for _ in range(request.repeated):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        try:
            connection.request("POST" if body else "GET", request.path, body or None, request.headers)
            answer = connection.getresponse()
            while answer.read(MIB):
                pass
            answers[str(answer.status)] += 1
        except (OSError, http.client.HTTPException) as error:
            answers[type(error).__name__] += 1
        finally:
            connection.close()


def bound(request: WorstRequest, idle: Pauses) -> float:
    """The longest pause that is allowed beside this request."""
    return max(idle.longest, LARGE_BOUND if request.size > MIB else BOUND)


def measure(site: Site, requests: Iterable[WorstRequest], idle: Pauses) -> Iterator[tuple[WorstRequest, Pauses]]:
    """The pauses beside each kind; a line tells them as soon as they are known."""
    for request in requests:
        answers: Counter[str] = Counter()
        began = perf_counter()
        pauses = site.beside(partial(send, site.port, request, answers))
        seconds = perf_counter() - began - 2 * REST_SECONDS
        said = ", ".join(f"{count} × {answer}" for answer, count in answers.items())
        mark = "  TOO LONG" if pauses.longest > bound(request, idle) else ""
        print(f"{request.name:32} {request.size:11,} {seconds:8.2f} {pauses}  {said}{mark}", flush=True)
        yield request, pauses


def rest(site: Site) -> Pauses:
    """The pauses beside no request at all."""
    print(f"{harness.device()}\n{HEAD}", flush=True)
    idle = site.beside(lambda: sleep(IDLE_SECONDS))
    print(f"{'(no request)':32} {0:11} {IDLE_SECONDS:8.2f} {idle}", flush=True)
    return idle


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="kinds whose names begin so")
    parser.add_argument("--share", type=float, default=1.0, help="size of the bodies as part of the full one")
    parser.add_argument("--models", type=Path, default=harness.ROOT / "results" / "models", help="folder of the model")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    gc.disable()  # this program's own pauses would be taken for the server's
    chosen = (one for one in worst(asked.share) if one.name.startswith(tuple(asked.only)))
    with tempfile.TemporaryDirectory() as folder, observed(obtain(MODEL, asked.models), Path(folder)) as site:
        idle = rest(site)
        measured = measure(site, chosen, idle)
        missed = [request.name for request, pauses in measured if pauses.longest > bound(request, idle)]
    print(f"too long: {', '.join(missed)}" if missed else "all within their bounds")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
