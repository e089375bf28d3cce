"""Which rows' newest positions are logged, and with which steps.

Owns how far each row is logged, the copies under way and the budget of time for them. Runs in the engine process's main
thread. Pieces are written now and then, since each is a file; the log takes what has come since, so that a death costs
a few tokens of each row. A row can go on from the log if each of its caches grows by positions or is a small state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic

import mlx.core as mx

from server.batching import Batch
from server.cache_guard import Caches
from server.compute.rows import Row
from server.kv_store.allowance import Allowance
from server.kv_store.copies import CacheSource, RowCopy
from server.kv_store.files.keys import KeyChain
from server.kv_store.files.tail_log import RowBase, RowSpan
from server.kv_store.layout import Layout, tokens_for_a_state
from server.kv_store.newest import has_newest, newest, on_host
from server.kv_store.opening import Tier
from server.kv_store.tail_writer import TailRecord

MOST = 64  # positions that one record may have of each row, however many bytes they take
LONGEST = 256  # and if they take no more than so many bytes of all rows: records are rare where a step is short
RECORD_BYTES = 8 << 20
SHORT = 512  # tokens below which all is logged of a row of which no piece is written yet, if they take
SHORT_BYTES = 8 << 20  # less than this; of others a piece comes first
SHARE = 0.01  # of the engine's time that records may take, and what pieces leave of theirs
SHARE_AFTER_DEATH = 0.06  # of it where the engine before died with rows: what ended that one is often still there
AFTER_DEATH_SECONDS = 60.0  # from an engine's first row on, in which it has that share
MOST_CREDIT = 0.01  # seconds of that which may be saved up
KEPT = 0.8  # of the pieces' credit that stays theirs
EXECUTED = 3.0  # times the building of a copy's graph that building and running it take, on two CPU cores


@dataclass(slots=True)
class LoggedRow:
    """How far one row is logged or in pieces; `end` is None until there is anything of it. `is_based`: whether a record
    says what the next one builds upon. `logged_at`: when the newest one was made."""

    chain: KeyChain
    end: int | None = None
    is_based: bool = False
    logged_at: float = 0.0


@dataclass(slots=True)
class Copy:
    """Positions of a batch that a step was submitted with, and which of them each row has."""

    data: mx.array
    positions: int
    seqs: list[int]  # the batch's rows, in its own list: another one after any change
    spans: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # by row: its place, start and end


class Tail:
    """Owned by the checkpoints."""

    def __init__(self, batches: Mapping[int, Batch], pieces: Allowance, clock: Callable[[], float] = monotonic) -> None:
        """`pieces`: the budget of time that pieces have."""
        self._batches = batches
        self._clock = clock
        self._rows: dict[int, LoggedRow] = {}
        self._new: set[int] = set()  # rows of which nothing is logged
        self._submitted: dict[int, Copy] = {}  # by batch, in this iteration
        self._copied: list[Copy] = []  # in the one before
        self._usual = Allowance(MOST_CREDIT, SHARE, clock)
        self._after_death = Allowance(MOST_CREDIT, SHARE_AFTER_DEATH, clock)
        self._calm_at: float | None = None  # from when on records have the usual time; None before the first row
        self._pieces = pieces
        self._can: dict[bool, bool] = {}  # whether rows can go on from records, by whether they share caches

    # ------------------------------------------------------------ rows
    def begin(self, seq: int, chain: KeyChain, *, after_death: bool = False) -> None:
        """A row comes; `after_death`: the engine before this one died with rows."""
        if self._calm_at is None:
            self._calm_at = self._clock() + AFTER_DEATH_SECONDS * after_death
        self._rows[seq] = LoggedRow(chain)
        self._new.add(seq)

    def saved(self, seq: int, length: int, tier: Tier) -> None:
        """Pieces hold the first `length` tokens of a row."""
        logged = self._rows.get(seq)
        if logged is not None and length >= (logged.end or 0):
            logged.end = length
            logged.is_based = False
            for copied in self._copied:
                copied.spans.pop(seq, None)
            self._new.discard(seq)
            tier.tail.release(seq)

    def forget(self, seq: int, tier: Tier | None) -> None:
        """A row has left."""
        self._rows.pop(seq, None)
        self._new.discard(seq)
        if tier is not None:
            tier.tail.release(seq)

    def covers(self, seq: int, held: int) -> bool:
        """Whether records follow a row so closely that a piece of its newest positions can wait."""
        logged = self._rows.get(seq)
        return logged is not None and logged.end is not None and logged.is_based and held - logged.end <= MOST

    def logged_at(self, seq: int) -> float:
        """When a row's newest record was made; 0 before the first."""
        logged = self._rows.get(seq)
        if logged is None:
            return 0.0
        return logged.logged_at

    # ------------------------------------------------------------ a step
    def positions(self, number: int, tier: Tier) -> int:
        """How many positions of each of its rows the next step of a batch is to copy; 0 for none."""
        batch = self._batches[number]
        if not self._has_time or not self._can_log(tier, batch):
            return 0
        most = self._most(tier.layout, len(batch))
        lacking = max((tokens for row in batch.rows if (tokens := self._lacking(batch, row)) <= most), default=0)
        if lacking < _least(tier.layout):
            return 0
        return lacking

    @property
    def _has_time(self) -> bool:
        return self._own.left > 0 or self._pieces.is_ample(KEPT)

    @property
    def _own(self) -> Allowance:
        if self._calm_at is not None and self._clock() < self._calm_at:
            return self._after_death
        return self._usual

    def _spend(self, seconds: float) -> None:
        budget = self._own
        if budget.left <= 0:
            budget = self._pieces
        budget.spend(seconds)

    @staticmethod
    def _most(layout: Layout, rows: int) -> int:
        """Positions that one record may have of each of so many rows; none if their states alone take too much."""
        room = RECORD_BYTES - layout.state_bytes * rows
        if room < 0:
            return 0
        return max(MOST, min(LONGEST, room // (max(1, layout.position_bytes) * rows)))

    def _can_log(self, tier: Tier, batch: Batch) -> bool:
        shares = len(batch) > 1
        if shares not in self._can:
            self._can[shares] = has_newest(tier.layout, len(batch)) and _least(tier.layout) <= MOST
        return self._can[shares] and tier.tail.takes

    def _lacking(self, batch: Batch, row: Row) -> int:
        """Positions that a row will have after a step beyond those logged; more than any record takes for none."""
        logged = self._rows.get(row.seq)
        if logged is None or logged.end is None:
            return LONGEST + 1
        return batch.held(row) + 1 - logged.end

    def copy(self, number: int, positions: int, caches: Caches, layout: Layout) -> list[mx.array]:
        """Copy what `positions` has asked for, in the midst of the step; returns what is to be submitted with it."""
        began = self._clock()
        batch = self._batches[number]
        held = batch.held(batch.rows[0]) + 1
        data = newest(layout, caches, positions, held, len(batch))
        self._submitted[number] = Copy(data, positions, batch.seqs)
        self._spend(EXECUTED * (self._clock() - began))
        return [data]

    # ------------------------------------------------------------ behind the steps
    def take(self, tier: Tier) -> None:
        """Log what the iteration before has copied; of what this one has, note what it is."""
        if not (self._copied or self._submitted):
            return
        began = self._clock()
        for batch in self._batches.values():
            batch.flush()
        for copied in self._copied:
            self._log(tier, copied)
        self._copied = [self._noted(number, copied) for number, copied in self._submitted.items()]
        self._submitted.clear()
        self._spend(self._clock() - began + tier.tail.charge())

    def _noted(self, number: int, copied: Copy) -> Copy:
        batch = self._batches.get(number)
        if batch is not None and batch.seqs is copied.seqs:
            for place, row in enumerate(batch.rows):
                self._note(copied, place, row.seq, batch.held(row))
        return copied

    def _note(self, copied: Copy, place: int, seq: int, held: int) -> None:
        logged = self._rows.get(seq)
        if logged is not None and logged.end is not None and 0 < held - logged.end <= copied.positions:
            copied.spans[seq] = (place, logged.end, held)
            logged.end = held
            logged.logged_at = self._clock()

    def _log(self, tier: Tier, copied: Copy) -> None:
        spans = tuple(self._span(seq, *found) for seq, found in copied.spans.items() if seq in self._rows)
        if spans:
            rows = len(copied.seqs)
            parts = tier.layout.piece(copied.positions, rows) + tier.layout.states(rows)
            data = on_host(copied.data, tier.tail.memory(copied.data.size))
            tier.tail.append(TailRecord(spans, parts, (data,)))

    def _span(self, seq: int, place: int, start: int, end: int) -> RowSpan:
        logged = self._rows[seq]
        base = None
        if not logged.is_based:
            border, ids = logged.chain.border(start)
            base = RowBase(border, tuple(ids))
            logged.is_based = True
        return RowSpan(seq, place, start, tuple(logged.chain.tokens[start:end]), base)

    # ------------------------------------------------------------ a row's first record
    def admit(self, tier: Tier) -> None:
        """Log all of rows whose answers have just begun, of those that are short. Answers of one token have ended."""
        if not self._new:
            return
        for batch in self._batches.values():
            if not self._can_log(tier, batch):
                continue
            for row in batch.rows:
                if row.seq in self._new and batch.produced(row) and self._has_time:
                    self._admit(tier, batch, row)

    def _admit(self, tier: Tier, batch: Batch, row: Row) -> None:
        began = self._clock()
        self._new.discard(row.seq)
        batch.flush()
        logged = self._rows[row.seq]
        held = batch.held(row)
        start = tier.store.reach(logged.chain, held, tier.layout.growing)
        if self._is_short(tier.layout, held - start):
            if held > start:
                self._log_first(tier, CacheSource(batch.caches, held, batch.place(row)), row.seq, start)
            logged.end = held
            logged.logged_at = began
        self._spend(self._clock() - began)

    @staticmethod
    def _is_short(layout: Layout, tokens: int) -> bool:
        return tokens < min(SHORT, SHORT_BYTES // max(1, layout.position_bytes))

    def _log_first(self, tier: Tier, source: CacheSource, seq: int, start: int) -> None:
        copy = RowCopy(tier.layout, source)
        (piece,) = copy.pieces([(start, source.held)])
        state = copy.state()
        span = self._span(seq, 0, start, source.held)
        tier.tail.append(TailRecord((span,), piece.parts + state.parts, piece.data + state.data))


def _least(layout: Layout) -> int:
    """Tokens that a record must have, so that the states in it aren't most of what is written."""
    return tokens_for_a_state(layout.state_bytes, layout.position_bytes)
