"""Reads kept caches for rows, in threads of its own, while other rows go on stepping.

Owns the threads and the state of each reading. The engine's main thread begins a `Fetch`, looks at it between steps,
and takes what was read; it never waits. A file that can't be used is given up, and what is left of the way is read.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

from server.errors import one_line
from server.kv_store.destination import Destination
from server.kv_store.files.index import Entry, Route
from server.kv_store.files.keys import KeyChain
from server.kv_store.files.record import DamagedFile, Head
from server.kv_store.image import Assembly, Image
from server.kv_store.layout import Layout
from server.kv_store.paces import Paces
from server.kv_store.store import Store

THREADS = 4
SHARE_BYTES = 16 << 20  # that one thread reads at a time; of a row with fewer it reads all
ROWS_AT_ONCE = 2
MOST_TRIES = 16  # files that may turn out to be damaged before a row is read by prefill altogether

ReadFile = tuple[Head, list[memoryview]]

log = logging.getLogger("marathon.engine")


class Fetch:
    """One row's caches on their way from the disk."""

    def __init__(self, chain: KeyChain, limit: int, destination: Destination, on_news: Callable[[], None]) -> None:
        """`limit`: tokens that may be taken at the most; `on_news` is called in a thread of the reader's when it begins
        and when it is done."""
        self.chain = chain
        self.destination = destination
        self.limit = limit
        self.began = self.started = monotonic()  # asked for; taken up by a thread
        self.is_started = False
        self.bytes_read = 0
        self.buffers: list[memoryview] = []
        self.files_read = 0  # rises while it gets on
        self._given_up = False
        self._result: Future[Image | None] = Future()
        self.on_news = on_news

    @property
    def is_done(self) -> bool:
        return self._result.done()

    @property
    def image(self) -> Image | None:
        """What was read, once it is done; None if there was nothing that could be used."""
        if self._given_up or self._result.exception() is not None:
            return None
        return self._result.result()

    def give_up(self) -> None:
        """Read no further file."""
        self._given_up = True
        self.destination.give_up()

    def wait(self, seconds: float) -> Image | None:
        """Wait for the end; for tests and measurements."""
        self._result.result(seconds)
        return self.image

    def finish(self, image: Image | None) -> None:
        self._result.set_result(image)
        self.on_news()

    @property
    def is_given_up(self) -> bool:
        return self._given_up


class KVReader:
    """Owned by the engine's main thread."""

    def __init__(self, store: Store, layout: Layout, paces: Paces | None = None) -> None:
        self._store = store
        self._layout = layout
        self._paces = paces or Paces()
        self._rows = ThreadPoolExecutor(ROWS_AT_ONCE, "kv reader")
        self._files = ThreadPoolExecutor(THREADS, "kv file")
        for threads in (self._rows, self._files):
            threads.submit(int)  # so that the first row doesn't wait for a thread to start

    def fetch(self, tokens: list[int], least: int, on_news: Callable[[], None] = lambda: None) -> Fetch | None:
        """Begin to read what is kept of `tokens`, all but the last at the most; None if that isn't more than `least`
        tokens, or if a prefill of those beyond takes less time."""
        chain = KeyChain(self._store.root, list(tokens))
        limit = len(tokens) - 1
        route = self._store.find(chain, limit)
        if route is None or route.length <= least or self._paces.prefers_prefill(route.length - least, route.size):
            return None
        destination = Destination(self._layout, route.length, _from_state(route))
        fetch = Fetch(chain, limit, destination, on_news)
        self._rows.submit(self._run, fetch, route)
        return fetch

    def save_paces(self) -> None:
        """A reading is rare, and the next one may be another engine's: what it showed is written down at once."""
        with contextlib.suppress(RuntimeError):  # the threads have ended
            self._files.submit(self._paces.save, at_once=True)

    def close(self) -> None:
        """End the threads; readings under way are given up."""
        self._rows.shutdown(wait=False, cancel_futures=True)
        self._files.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ its own threads
    def _run(self, fetch: Fetch, route: Route | None) -> None:
        image, in_place = None, True
        fetch.started = monotonic()
        fetch.is_started = True
        fetch.on_news()
        try:
            for _ in range(MOST_TRIES):
                if route is None or fetch.is_given_up:
                    break
                image = self._assembled(fetch, route, in_place=in_place)
                if image is not None:
                    break
                route = self._store.find(fetch.chain, fetch.limit)
                in_place = False  # the arrays are of the first one's length
        except Exception:
            log.exception("kept KV can't be read")
        fetch.finish(image)
        fetch.buffers.clear()  # not before, since the system takes a while to take them back
        if image is not None and route is not None:
            self._store.touch(route)

    def _assembled(self, fetch: Fetch, route: Route, *, in_place: bool) -> Image | None:
        """What the route's files hold; None if one of them can't be used. `in_place`: put together where it stays, in
        memory that is allocated while the first files are read."""
        assembly: Future[Assembly] = Future()
        shares = min(THREADS, 1 + route.size // SHARE_BYTES)
        jobs = [self._files.submit(self._add_all, fetch, assembly, route.entries[i::shares]) for i in range(shares)]
        memory = None
        if in_place:
            memory = fetch.destination.views()
        try:
            assembly.set_result(Assembly(self._layout, route.length, _from_state(route), memory))
        except Exception as error:
            assembly.set_exception(error)
        taken = [job.result() for job in jobs]  # all of them, so that none works on when the row is read by prefill
        if all(taken):
            return assembly.result().finished()
        return None

    def _add_all(self, fetch: Fetch, assembly: Future[Assembly], entries: Sequence[Entry]) -> bool:
        """Take a share of the files, one after the other; while there is nothing to put them into, as many are read as
        the memory here has room for. Memory that was used already takes half the time of fresh one."""
        memory = memoryview(mmap.mmap(-1, max([SHARE_BYTES, *(entry.size for entry in entries)])))
        fetch.buffers.append(memory)
        read: list[tuple[Entry, ReadFile | None]] = []
        place = 0
        for entry in entries:
            if assembly.done() or place + entry.size > len(memory):
                if not self._add(fetch, assembly, read):
                    return False
                read, place = [], 0
            read.append((entry, self._read(fetch, entry, memory[place : place + entry.size])))
            place += entry.size
        return self._add(fetch, assembly, read)

    def _read(self, fetch: Fetch, entry: Entry, memory: memoryview) -> ReadFile | None:
        """What a file holds; None if it can't be used or isn't wanted any more."""
        if fetch.is_given_up:
            return None
        try:
            return self._store.read(entry, fetch.chain.tokens, memory)
        except DamagedFile as error:
            self._store.discard(entry, error)
            return None

    def _add(self, fetch: Fetch, assembly: Future[Assembly], read: list[tuple[Entry, ReadFile | None]]) -> bool:
        for entry, file in read:
            if file is None:
                return False
            try:
                assembly.result().add(*file)
            except Exception as error:  # a head may be whole and say anything
                self._store.discard(entry, _damage(error))
                return False
            fetch.files_read += 1
            fetch.bytes_read += entry.size
        return True


def _from_state(route: Route) -> int:
    """A bit for each cache that the route's state brings."""
    if route.state is None:
        return 0
    return route.state.name.parts


def _damage(error: Exception) -> DamagedFile:
    if isinstance(error, DamagedFile):
        return error
    return DamagedFile("format", one_line(error))
