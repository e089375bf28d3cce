"""Rows' caches kept on disk in process: a store over a folder, with its threads, and rows of tiny models."""

from __future__ import annotations

from contextlib import contextmanager

from mlx_lm.models.cache import make_prompt_cache

from server.kv_store.allowance import Allowance
from server.kv_store.copies import CacheSource, put_back
from server.kv_store.files.folder import FolderLock
from server.kv_store.files.keys import digest
from server.kv_store.keeper import Keeper
from server.kv_store.reader import KVReader
from server.kv_store.store import Store
from server.kv_store.trial import learn
from server.kv_store.writer import KVWriter

AMPLE = 1 << 40
PATIENCE = 20.0


class Kept:
    """What is kept of one model's rows in one folder."""

    def __init__(self, model, home, *, limit=AMPLE, hourly=AMPLE, disk=None, batches=True, layout=None, name=b"model"):
        self.model = model
        self.layout = layout or learn(model, batches=batches)
        home.mkdir(parents=True, exist_ok=True)
        self.lock = FolderLock(home)
        assert self.lock.take()
        root = digest(name, self.layout.digest())
        self.store = Store(home, self.lock, "a model", root, self.layout.everything, limit, disk)
        self.writer = KVWriter(self.store, Allowance.hourly(hourly))
        self.keeper = Keeper(self.store, self.writer, self.layout)
        self.reader = KVReader(self.store, self.layout)

    def save(self, tokens, caches, progress=None, *, row=None, most=AMPLE, lasting=False):
        """What came of it."""
        progress = progress or self.keeper.begin(tokens)
        return self.keeper.save(CacheSource(caches, len(tokens), row), progress, most, lasting=lasting)

    def flush(self):
        assert self.writer.flush(PATIENCE)

    def read(self, tokens, least=0):
        """(caches, tokens that they hold), or None."""
        fetch = self.reader.fetch(tokens, least)
        if fetch is None:
            return None
        fetch.destination.allocate(AMPLE)
        image = fetch.wait(PATIENCE)
        if image is None:
            return None
        caches = make_prompt_cache(self.model)
        put_back(fetch.destination, image, caches)
        return caches, image.length

    def close(self):
        self.reader.close()
        self.writer.close(PATIENCE)
        self.lock.release()


@contextmanager
def kept(model, home, **options):
    one = Kept(model, home, **options)
    try:
        yield one
    finally:
        one.close()
