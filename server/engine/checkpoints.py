"""Which rows' caches are saved to disk, and when; and which rows wait for theirs to be read from there.

Owns what is known of how far each row is saved, the budget of time for it, and the readings under way. Runs in the
engine process's main thread, between steps. The rules are here; bytes and files are `kv_store`'s.

A row is worth saving once it has lived: it has produced tokens for a while, its prompt took long to read, or it began
with something that was kept, as the turns of a conversation do. A prompt that is read once and answered shortly is none
of these, and isn't written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from server.batching import Batch
from server.cache_guard import Caches
from server.compute.rows import Model, Row
from server.engine.plan import Operation, Read, Step
from server.engine.prefill import Prefill
from server.engine.prefix_cache import PrefixCache
from server.engine.tail import Tail
from server.errors import one_line
from server.ipc.snapshot import Snapshot
from server.kv_store.allowance import Allowance
from server.kv_store.copies import CacheSource, put_back
from server.kv_store.keeper import RowProgress, SaveResult
from server.kv_store.layout import tokens_for_a_state
from server.kv_store.opening import Opening, Tier
from server.kv_store.reader import ROWS_AT_ONCE, Fetch

INTERVAL = 64  # tokens between two checkpoints of a row: as many as a death may cost
PUT_OFF = 192  # tokens by which one may come later while the log of newest positions has the row: pieces of 256
LONGEST_INTERVAL = 4096  # where the disk can't take them
LEAST = 256  # tokens below which no piece is written of a row: a prefill of so few costs little
LEAST_GAIN = 16  # tokens that the disk must have beyond memory, or a row that comes back beyond what is saved
LIVED = 1.0  # seconds of reading its prompt after which a row is worth saving
SHARE = 0.01  # of the engine's time that checkpoints may take
MOST_CREDIT = 0.05  # seconds of that which may be saved up
AT_ONCE = 0.008  # seconds that one row's checkpoint may take, as far as its pieces can be counted
AT_END = 0.05  # seconds for a row that leaves: there is no later turn
LOOK_EVERY = 8  # iterations between two looks at how far rows have come
REPORT_SECONDS = 0.5
UPLOAD_BYTES = 64 << 20  # that one iteration allocates of MLX or gives to it
SPEED = 2e9  # bytes a second of copies, until they are measured
SLOW = 3.0  # times what a prefill would take that a reading from the disk may take
PATIENCE = 5.0  # seconds that a reading may take anyway

log = logging.getLogger("marathon.engine")


class ProgressBeat(Protocol):
    """The heartbeat's counter."""

    def beat(self) -> None: ...


@dataclass(slots=True)
class LiveRow:
    """What is known of one row's checkpoints."""

    progress: RowProgress
    due: int  # tokens held at which the next one is due
    first: int  # tokens held when it was first seen decoding
    saved_at: float  # when its newest checkpoint was made, or it came
    is_worth: bool = False


@dataclass(slots=True)
class AwaitedRow:
    """A row that waits for its caches."""

    row: Row
    fetch: Fetch
    seen: int = 0  # files read when it was last looked at
    fresh: list[object] | None = None  # caches that are being filled
    filled: int = 0  # of their parts


class Checkpoints:
    """Owned by the loop. Without a store it does nothing."""

    def __init__(
        self,
        model: Model,
        batches: Mapping[int, Batch],
        prefill: Prefill,
        prefix: PrefixCache,
        heartbeat: ProgressBeat,
        snapshot: Snapshot,
        opening: Opening | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._model = model
        self._batches = batches
        self._prefill = prefill
        self._prefix = prefix
        self._heartbeat = heartbeat
        self._snapshot = snapshot
        self._opening = opening
        self._wake = wake
        self._clock = clock
        self._live: dict[int, LiveRow] = {}
        self._arrivals: dict[int, AwaitedRow] = {}
        self._interval = INTERVAL
        self._budget = Allowance(MOST_CREDIT, SHARE, clock)
        self._tail = Tail(batches, self._budget, clock)
        self._reported = clock()
        self._iteration = 0
        self._speed = SPEED
        self._tokens_read = 0  # of prompts
        self._noted = (0, 0.0)  # of those and their seconds, what the store's paces have

    @property
    def _tier(self) -> Tier | None:
        if self._opening is None:
            return None
        return self._opening.tier

    # ------------------------------------------------------------ a row comes
    def begin(self, row: Row) -> None:
        """A row comes: see whether the disk has more of its tokens than memory."""
        tier = self._tier
        if tier is None or row.sequence.prompt_logprobs:
            return
        now = self._clock()
        live = self._live[row.seq] = LiveRow(tier.keeper.begin(row.tokens), 0, 0, now)
        self._tail.begin(row.seq, live.progress.chain, after_death=tier.recovered > 0)
        fetch = tier.reader.fetch(row.tokens, self._prefix.reach(row.tokens) + LEAST_GAIN, self._wake)
        if fetch is None:
            return
        row.is_fetching = True
        self._arrivals[row.seq] = AwaitedRow(row, fetch)
        if len(self._arrivals) <= ROWS_AT_ONCE:
            self._allocate(fetch, UPLOAD_BYTES)

    def arrive(self) -> None:
        """Give to MLX what was read from the disk; rows whose caches are complete may go on."""
        if not self._arrivals:
            return
        left = UPLOAD_BYTES
        for arrival in list(self._arrivals.values()):
            if arrival.fetch.is_done:
                left = self._fill(arrival, left)
            else:
                left -= self._watch(arrival, left)

    def _watch(self, arrival: AwaitedRow, left: int) -> int:
        """Look how a reading gets on; returns the bytes that were allocated for it, `left` at the most."""
        allocated = 0
        if arrival.fetch.is_started and not arrival.fetch.destination.is_settled:  # one that waits needs no memory yet
            allocated = self._allocate(arrival.fetch, max(1, left))
            self._wake()
        if arrival.fetch.files_read > arrival.seen:
            arrival.seen = arrival.fetch.files_read
            self._heartbeat.beat()
        expected = SLOW * len(arrival.row.tokens) * self._token_seconds
        now = self._clock()
        if now - arrival.fetch.began > PATIENCE + expected:
            arrival.fetch.give_up()
            self._note_reading(arrival.fetch.bytes_read, now - arrival.fetch.started)
            log.warning("KV of sequence %d is read by prefill: the disk is too slow", arrival.row.seq)
            self._go_on(arrival)
        return allocated

    def _allocate(self, fetch: Fetch, most: int) -> int:
        """Returns the bytes that were allocated, about `most`; where there is no room the row is read by prefill."""
        try:
            return fetch.destination.allocate(most)
        except RuntimeError as error:
            log.warning("there is no memory for kept KV: %s", one_line(error))
            fetch.give_up()
            return 0

    def _fill(self, arrival: AwaitedRow, left: int) -> int:
        """Upload what `left` bytes have room for; returns what is left of them."""
        image = arrival.fetch.image
        if image is None:
            self._go_on(arrival)
            return left
        if arrival.fresh is None:
            arrival.fresh = make_prompt_cache(self._model)
        first = arrival.filled
        while arrival.filled < len(image.parts) and left > 0:
            left -= image.parts[arrival.filled].upload_bytes
            arrival.filled += 1
        put_back(arrival.fetch.destination, image, arrival.fresh, first, arrival.filled)
        self._heartbeat.beat()
        if arrival.filled == len(image.parts):
            arrival.row.restored = (arrival.fresh, image.length)
            self._note_reading(image.nbytes, self._clock() - arrival.fetch.started)
            self._go_on(arrival)
        return left

    def _go_on(self, arrival: AwaitedRow) -> None:
        arrival.row.is_fetching = False
        del self._arrivals[arrival.row.seq]

    # ------------------------------------------------------------ between steps
    def take(self, record: Iterable[Operation]) -> None:
        """Save what is due of rows that are in the engine, within the budget; `record` of the iteration shows how much
        was read."""
        self._iteration += 1
        tier = self._tier
        if tier is None:
            return
        self._tokens_read += sum(size for done in record if isinstance(done, Read) for _, size in done.parts)
        if self._iteration % LOOK_EVERY == 0:
            self._save_due(tier)
        self._save_readings(tier)
        self._tail.take(tier)
        self._tail.admit(tier)

    def newest(self, batch: int) -> int:
        """How many of the newest positions the next step of a batch is to copy."""
        if (tier := self._tier) is None:
            return 0
        return self._tail.positions(batch, tier)

    def copy_newest(self, step: Step, caches: Caches) -> list[mx.array]:
        """Copy them, from the caches as the step leaves them; returns what is to be submitted with it."""
        tier = self._tier
        if tier is None:
            return []
        try:
            return self._tail.copy(step.batch, step.newest, caches, tier.layout)
        except Exception as error:  # of a cache that isn't as it was when it was tried out
            self._cease(error)
            return []

    def _save_due(self, tier: Tier) -> None:
        for batch in list(self._batches.values()):
            for row in self._due(batch):
                if self._budget.left > 0:
                    self._save(tier, row.seq, self._of_batch(batch, row), AT_ONCE)

    def _save_readings(self, tier: Tier) -> None:
        """Save what is due of rows whose prompts are being read. A chunk takes long, and all that it allows is used."""
        for reading in self._prefill.readings:
            row = reading.row
            if self._budget.left > 0 and self._is_due_reading(row):
                self._save(tier, row.seq, CacheSource(row.caches, row.read), max(AT_ONCE, self._budget.left))

    def _due(self, batch: Batch) -> list[Row]:
        """The rows of a batch that are due; with one of them all that soon will be, so that the device waits once."""
        held = {row.seq: batch.length(row) for row in batch.rows}
        due = [row for row in batch.rows if self._is_due(row, held[row.seq])]
        if not due:
            return []
        return [row for row in batch.rows if row in due or self._is_due(row, held[row.seq], self._interval // 2)]

    def _is_due_reading(self, row: Row) -> bool:
        """The same of a row whose prompt is being read."""
        live = self._live.get(row.seq)
        if live is None or row.read < LEAST or not row.caches:
            return False
        live.is_worth = live.is_worth or self._is_costly(row, row.read)
        return live.is_worth and row.read >= live.due

    def _is_due(self, row: Row, held: int, soon: int = 0) -> bool:
        """Whether a checkpoint is due now, or within `soon` tokens."""
        live = self._live.get(row.seq)
        if live is None:
            return False
        live.first = live.first or held
        if held < LEAST:
            return False
        if not live.is_worth:
            live.is_worth = self._has_lived(row, live, held)
        return live.is_worth and held + soon >= live.due + self._put_off(row, held)

    def _put_off(self, row: Row, held: int) -> int:
        """Tokens by which a row's checkpoint may be later, since a death doesn't cost what was logged."""
        return PUT_OFF * self._tail.covers(row.seq, held)

    def _has_lived(self, row: Row, live: LiveRow, held: int) -> bool:
        return held - (live.first or held) >= INTERVAL or self._is_costly(row, held)

    def _is_costly(self, row: Row, held: int) -> bool:
        """Whether a row began with something that was kept, or took long to read as prompts go in this engine."""
        return row.cached >= LEAST or (held - row.cached) * self._token_seconds > LIVED

    @property
    def _token_seconds(self) -> float:
        """Seconds that a token of a prompt takes, in this engine or those before; 0 while none has read any."""
        if self._tokens_read < LEAST:
            return self._tier.paces.token_seconds if self._tier else 0.0
        return self._snapshot.step_seconds.get("prefill", 0.0) / self._tokens_read

    def _of_batch(self, batch: Batch, row: Row) -> CacheSource:
        batch.flush()  # the saved positions are named by the tokens
        return CacheSource(batch.caches, batch.held(row), batch.place(row))

    def _save(self, tier: Tier, seq: int, source: CacheSource, seconds: float, *, lasting: bool = False) -> None:
        live = self._live[seq]
        began = self._clock()
        try:
            done = tier.keeper.save(source, live.progress, int(seconds * self._speed), lasting=lasting)
        except Exception as error:  # of a cache that isn't as it was when it was tried out
            self._cease(error)
            return
        took = self._clock() - began
        self._budget.spend(took)
        self._note(tier, live, source.held, done, took)
        if live.progress.complete == source.held:
            self._tail.saved(seq, source.held, tier)

    def _cease(self, error: Exception) -> None:
        log.exception("a row's KV can't be saved, and none is from now on: %s", error)
        self.close()

    def _note(self, tier: Tier, live: LiveRow, held: int, done: SaveResult, took: float) -> None:
        if done.refusal:
            tier.store.counts.skip(done.refusal)
            self._interval = min(LONGEST_INTERVAL, 2 * self._interval)
            live.due = held + self._interval
            return
        if done.size > 1 << 20 and took > 0:
            self._speed += 0.2 * (done.size / took - self._speed)
        if live.progress.complete == held:
            live.saved_at = self._clock()
            self._interval = max(self._shortest(done), self._interval // 2)
            live.due = held + self._interval

    @staticmethod
    def _shortest(done: SaveResult) -> int:
        """Tokens between two checkpoints while the disk keeps up: states that are large are saved less often."""
        return min(max(INTERVAL, tokens_for_a_state(done.state_bytes, done.position_bytes)), 16 * INTERVAL)

    # ------------------------------------------------------------ a row leaves
    def save_leaving(self, seqs: Iterable[int], *, ended: bool) -> None:
        """Save what isn't saved of rows of batches that are about to leave. `ended`: not to come back, so that only
        what may serve others is worth it."""
        tier = self._tier
        if tier is None:
            return
        wanted = set(seqs)
        for batch in list(self._batches.values()):
            for row in [row for row in batch.rows if row.seq in wanted]:
                self._save_last(tier, batch, row, ended=ended)

    def _save_last(self, tier: Tier, batch: Batch, row: Row, *, ended: bool) -> None:
        live = self._live.get(row.seq)
        held = batch.length(row)
        if live is None or held < (LEAST if ended else LEAST_GAIN):
            return
        if not ended or live.is_worth or self._has_lived(row, live, held):
            self._save(tier, row.seq, self._of_batch(batch, row), AT_END, lasting=True)

    def save_mark(self, row: Row, length: int) -> None:
        """A row that is being read is where later prompts may go on. Where all its caches hold positions any place will
        do, and nothing is saved for it."""
        tier = self._tier
        live = self._live.get(row.seq)
        if tier is None or live is None or length < LEAST or length not in row.sequence.marks:
            return
        constant = not all(part.grows and not part.turns for part in tier.layout.parts)
        if constant and (live.is_worth or self._has_lived(row, live, length)):
            self._save(tier, row.seq, CacheSource(row.single(), length), AT_END, lasting=True)

    def forget(self, seq: int) -> None:
        """A row has left."""
        self._live.pop(seq, None)
        self._tail.forget(seq, self._tier)
        arrival = self._arrivals.pop(seq, None)
        if arrival is not None:
            arrival.fetch.give_up()

    # ------------------------------------------------------------ figures
    def report(self) -> None:
        """Put the figures into the snapshot, now and then."""
        tier = self._tier
        now = self._clock()
        if tier is None or now - self._reported < REPORT_SECONDS:
            return
        self._reported = now
        self._note_prefill(tier)
        counts = tier.store.counts
        snapshot = self._snapshot
        snapshot.kv_disk_files = tier.store.files
        snapshot.kv_disk_bytes = tier.store.size
        snapshot.kv_disk_written_bytes = counts.written_bytes
        snapshot.kv_disk_read_bytes = counts.read_bytes
        snapshot.kv_disk_seconds = {"read": counts.read_seconds, "write": counts.write_seconds}
        snapshot.kv_disk_dropped = dict(counts.dropped)
        snapshot.kv_disk_evicted = counts.evicted
        snapshot.kv_disk_skipped = dict(counts.skipped)
        snapshot.kv_disk_checkpoint_age = self._age(now)

    def _note_reading(self, size: int, seconds: float) -> None:
        if tier := self._tier:
            tier.paces.note_reading(size, seconds)
            tier.reader.save_paces()

    def _note_prefill(self, tier: Tier) -> None:
        tokens, seconds = self._noted
        read = self._tokens_read - tokens
        if read >= LEAST:
            now = self._snapshot.step_seconds.get("prefill", 0.0)
            tier.paces.note_prefill(read, now - seconds)
            self._noted = (self._tokens_read, now)

    def _age(self, now: float) -> float | None:
        """Seconds since the oldest checkpoint of a live row was made; None without a row that is worth one."""
        ages = (
            now - max(live.saved_at, self._tail.logged_at(seq)) for seq, live in self._live.items() if live.is_worth
        )
        return max(ages, default=None)

    def close(self) -> None:
        """Write what is queued, within a moment; from now on nothing is kept."""
        for arrival in list(self._arrivals.values()):
            arrival.fetch.give_up()
            self._go_on(arrival)
        self._live.clear()
        opening = self._opening
        self._opening = None
        if opening is not None:
            opening.close()
            mx.synchronize()
