"""Opens the store for a model that is being loaded, beside the loading.

Owns the thread that takes the folder's lock and learns which model it is, which reads all weights the first time. The
engine's main thread starts it before the weights are read and asks now and then whether the store is there. Without it
the engine runs as if nothing were kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from server.compute.rows import Model
from server.config.cache_folder import KEPT_KV, TRIALS, cache_folder
from server.errors import StartupError, one_line
from server.faults import Spec
from server.kv_store import trial
from server.kv_store.allowance import Allowance
from server.kv_store.files import folder
from server.kv_store.files.folder import FolderLock
from server.kv_store.files.keys import digest
from server.kv_store.keeper import Keeper
from server.kv_store.layout import Layout
from server.kv_store.paces import Paces
from server.kv_store.reader import KVReader
from server.kv_store.store import Disk, Store
from server.kv_store.tail_recovery import recover
from server.kv_store.tail_writer import TailWriter
from server.kv_store.writer import KVWriter
from server.model_files.fingerprint import cache_fingerprint
from server.model_files.trial_results import TrialResults
from server.settings import Settings

LOCK_SECONDS = 3.0  # in which an engine that has just been killed is gone
OPEN_SECONDS = 5.0  # that an engine with its model loaded waits for the store; it opens later where that is too short
CLOSE_SECONDS = 1.5  # for what is queued when an engine leaves; the server kills it soon after

TRIED_OUT_BY = [Path(__file__).with_name(name) for name in ("trial.py", "layout.py", "trees.py")]

log = logging.getLogger("marathon.engine")


@dataclass(frozen=True, slots=True)
class Place:
    """Where KV is kept, and how much of it."""

    home: Path
    limit: int  # bytes
    hourly: int  # bytes that may be written in an hour
    disk: Disk


@dataclass(frozen=True, slots=True)
class Tier:
    """The store with all that works on it. Owned by the engine's main thread. `recovered`: rows that an engine before
    this one had when it died, and whose newest positions it had logged."""

    store: Store
    keeper: Keeper
    reader: KVReader
    writer: KVWriter
    tail: TailWriter
    layout: Layout
    paces: Paces
    recovered: int

    def close(self) -> None:
        """Write what is queued, within a moment, and end the threads."""
        self.paces.save(at_once=True)
        self.reader.close()
        self.tail.close(CLOSE_SECONDS)
        self.writer.close(CLOSE_SECONDS)


class Opening:
    """A store that is being opened."""

    def __init__(self, place: Place, model: Path, trials: TrialResults[Layout] | None) -> None:
        """`model`: its folder; `trials`: where layouts are kept that were learned once."""
        self._place = place
        self._model = model
        self._trials = trials
        self._lock = FolderLock(place.home)
        self._layout: Layout | None = None
        self._learned = threading.Event()
        self._tier: Tier | None = None
        self._thread = threading.Thread(target=self._run, name="kv opening", daemon=True)
        self._thread.start()

    @property
    def tier(self) -> Tier | None:
        """The store, once it is open; None before, and where there can be none."""
        return self._tier

    def learn(self, model: Model, *, batches: bool) -> None:
        """Learn how the loaded model's caches are laid out, and wait a moment for the store. `batches`: whether its
        rows may be merged."""
        try:
            self._layout = self._known_or_learned(model, batches=batches)
        except Exception as error:  # of the model's own code, too
            log.warning("no KV is kept on disk: %s", one_line(error))
        self._learned.set()
        self._thread.join(OPEN_SECONDS)

    def _known_or_learned(self, model: Model, *, batches: bool) -> Layout:
        if self._trials is None:
            return trial.learn(model, batches=batches)
        layout = self._trials.recall(self._model)
        if layout is None:
            layout = trial.learn(model, batches=batches)
            self._trials.keep(self._model, layout)
        return layout

    def close(self) -> None:
        """Close the store, if it was opened, and free the folder."""
        self._layout = None
        self._learned.set()
        if self._tier is not None:
            self._tier.close()
        self._lock.release()

    # ------------------------------------------------------------ its own thread
    def _run(self) -> None:
        try:
            self._open()
        except (OSError, StartupError) as error:
            log.warning("no KV is kept in %s: %s", self._place.home, one_line(error))
            self._lock.release()

    def _open(self) -> None:
        home = self._place.home
        folder.prepare(home)
        if not _patiently(self._lock.take):
            log.warning("no KV is kept: %s is in use by another server; --kv-disk-folder names another", home)
            return
        began = time.perf_counter()
        fingerprint = cache_fingerprint(self._model, home / folder.HASHES)
        log.debug("the model's files are known after %.1f s", time.perf_counter() - began)
        self._learned.wait()
        if self._layout is None:
            self._lock.release()
            return
        self._tier = self._opened(fingerprint, self._layout)
        log.info("KV is kept in %s: %d files, %d bytes", home, self._tier.store.files, self._tier.store.size)

    def _opened(self, fingerprint: str, layout: Layout) -> Tier:
        place = self._place
        root = digest(fingerprint.encode(), layout.digest())
        own = place.home / root.hex()
        shown = _shown(self._model)
        store = Store(place.home, self._lock, shown, root, layout.everything, place.limit, place.disk)
        recovered = recover(store, layout, own)
        if recovered:
            log.info("the newest positions of %d rows are there", recovered)
        paces = Paces(own / folder.PACES)
        allowance = Allowance.hourly(place.hourly)
        writer = KVWriter(store, allowance, after=paces.save)
        tail = TailWriter(store, own, allowance)
        keeper = Keeper(store, writer, layout)
        return Tier(store, keeper, KVReader(store, layout, paces), writer, tail, layout, paces, recovered)


def opened(settings: Settings, faults: Spec, model: Path, device: str | None = None) -> Opening | None:
    """Begin to open the store that the settings ask for; None if they ask for none. `model`: its folder; `device`: in
    words, if what its caches showed on that one may be kept for the next start."""
    if not settings.kv_disk:
        return None
    home = settings.kv_disk_folder or cache_folder(settings.cache_dir) / KEPT_KV
    disk = Disk(faults.slow_disk or None, faults.full_disk)
    trials = None
    if device is not None:
        trials = TrialResults(Layout, cache_folder(settings.cache_dir) / TRIALS, device, TRIED_OUT_BY)
    return Opening(Place(home, settings.kv_disk, settings.kv_disk_hourly, disk), model, trials)


def _patiently(take: Callable[[], bool]) -> bool:
    until = time.monotonic() + LOCK_SECONDS
    while not take():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _shown(model: Path) -> str:
    """A model's name for people: of the hub's cache the one of its repository."""
    for part in reversed(model.parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return model.name
