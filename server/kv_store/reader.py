"""Reads kept caches for rows, in threads of its own, while other rows go on stepping.

Owns the threads and the state of each reading. The engine's main thread begins a `Fetch`, looks at it between steps,
and takes what was read; it never waits. A file that can't be used is given up, and what is left of the way is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

from server.errors import one_line
from server.kv_store.files.index import Entry, Route
from server.kv_store.files.keys import KeyChain
from server.kv_store.files.record import DamagedFile
from server.kv_store.image import Assembly, Image
from server.kv_store.layout import Layout
from server.kv_store.paces import Paces
from server.kv_store.store import Store

FILES_AT_ONCE = 4
ROWS_AT_ONCE = 2
MOST_TRIES = 16  # files that may turn out to be damaged before a row is read by prefill altogether

log = logging.getLogger("marathon.engine")


class Fetch:
    """One row's caches on their way from the disk."""

    def __init__(self, chain: KeyChain, limit: int, on_done: Callable[[], None]) -> None:
        """`limit`: tokens that may be taken at the most; `on_done` is called in a thread of the reader's."""
        self.chain = chain
        self.limit = limit
        self.began = self.started = monotonic()  # asked for; taken up by a thread
        self.bytes_read = 0
        self.files_read = 0  # rises while it gets on
        self._given_up = False
        self._result: Future[Image | None] = Future()
        self._on_done = on_done

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

    def wait(self, seconds: float) -> Image | None:
        """Wait for the end; for tests and measurements."""
        self._result.result(seconds)
        return self.image

    def finish(self, image: Image | None) -> None:
        self._result.set_result(image)
        self._on_done()

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
        self._files = ThreadPoolExecutor(FILES_AT_ONCE, "kv file")

    def fetch(self, tokens: list[int], least: int, on_done: Callable[[], None] = lambda: None) -> Fetch | None:
        """Begin to read what is kept of `tokens`, all but the last at the most; None if that isn't more than `least`
        tokens, or if a prefill of those beyond takes less time."""
        chain = KeyChain(self._store.root, list(tokens))
        limit = len(tokens) - 1
        route = self._store.find(chain, limit)
        if route is None or route.length <= least or self._paces.prefers_prefill(route.length - least, route.size):
            return None
        fetch = Fetch(chain, limit, on_done)
        self._rows.submit(self._run, fetch, route)
        return fetch

    def close(self) -> None:
        """End the threads; readings under way are given up."""
        self._rows.shutdown(wait=False, cancel_futures=True)
        self._files.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ its own threads
    def _run(self, fetch: Fetch, route: Route | None) -> None:
        image = None
        fetch.started = monotonic()
        try:
            for _ in range(MOST_TRIES):
                if route is None or fetch.is_given_up:
                    break
                image = self._assembled(fetch, route)
                if image is not None:
                    break
                route = self._store.find(fetch.chain, fetch.limit)
        except Exception:
            log.exception("kept KV can't be read")
        fetch.finish(image)
        if image is not None and route is not None:
            self._store.touch(route)

    def _assembled(self, fetch: Fetch, route: Route) -> Image | None:
        """What the route's files hold; None if one of them can't be used."""
        from_state = 0
        if route.state is not None:
            from_state = route.state.name.parts
        assembly = Assembly(self._layout, route.length, from_state)
        jobs = [self._files.submit(self._add, fetch, assembly, entry) for entry in route.entries]
        taken = [job.result() for job in jobs]  # all of them, so that none works on when the row is read by prefill
        if all(taken):
            return assembly.finished()
        return None

    def _add(self, fetch: Fetch, assembly: Assembly, entry: Entry) -> bool:
        if fetch.is_given_up:
            return False
        try:
            assembly.add(*self._store.read(entry, fetch.chain.tokens))
        except Exception as error:  # a head may be whole and say anything
            self._store.discard(entry, _damage(error))
            return False
        fetch.files_read += 1
        fetch.bytes_read += entry.size
        return True


def _damage(error: Exception) -> DamagedFile:
    if isinstance(error, DamagedFile):
        return error
    return DamagedFile("format", one_line(error))
