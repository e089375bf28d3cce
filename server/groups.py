"""Which rows share a forward pass, and how often each group is stepped.

Owns the decode batches. Runs in the engine process's main thread. mlx-lm pads every row of a batch to its longest,
so one row of 20,000 positions would make each short one carry 20,000; here rows of similar length share a batch.
The partition is the one that moves the fewest bytes a step: a fixed amount a group (the weights, and what a step
costs however short its rows are) plus the padded KV. It never moves more than the single padded batch.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from time import perf_counter
from typing import Any

import mlx.core as mx

from server.batching import Batch
from server.cache_guard import Caches, Keep, parts
from server.messages import GroupState
from server.model import Loaded
from server.rows import Drawn, Row

REGROUP_STEPS = 256  # iterations between two looks at the grouping; KV grows by as many positions
WORTH = 0.6  # a grouping must move less than this share of a simpler one's bytes: moving rows copies their KV
SLOWED = 2.0  # short groups may be slowed by this factor before long ones are stepped less often
_MEMORY = 0.2


def partition(lengths: Many[int], group_bytes: int, row_bytes: Callable[[int], int]) -> list[list[int]]:
    """Indexes of `lengths` in groups that move the fewest bytes; contiguous in length, shortest first.

    Rows are taken by buckets of equal `row_bytes`, so the work is quadratic in the buckets, not in the rows.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    buckets: list[tuple[int, list[int]]] = []
    for i in order:
        size = row_bytes(lengths[i])
        if buckets and buckets[-1][0] == size:
            buckets[-1][1].append(i)
        else:
            buckets.append((size, [i]))
    best: list[tuple[int, int]] = [(0, 0)]  # bytes of the first j buckets, where their last group begins
    for end, (size, _) in enumerate(buckets, 1):
        rows, options = 0, []
        for start in range(end - 1, -1, -1):
            rows += len(buckets[start][1])
            options.append((best[start][0] + group_bytes + rows * size, start))
        best.append(min(options))
    groups: list[list[int]] = []
    end = len(buckets)
    while end:
        start = best[end][1]
        groups.append([i for _, bucket in buckets[start:end] for i in bucket])
        end = start
    return groups[::-1]


def moved(groups: Many[Many[int]], group_bytes: int, row_bytes: Callable[[int], int]) -> int:
    """Bytes that one step of all groups moves; each group is given by its rows' lengths."""
    return sum(group_bytes + len(group) * row_bytes(max(group)) for group in groups if group)


def intervals(seconds: Many[float], most: int) -> list[int]:
    """Each group's k (stepped each k-th iteration), shortest group first: 1 for all unless the longer ones would
    slow the first below 1 / SLOWED; then the smallest k ≤ `most` for the longer ones that avoids it."""
    if not seconds:
        return []
    first, rest = seconds[0], sum(seconds[1:])
    k = 1
    while k < most and first + rest / k > SLOWED * first:
        k += 1
    return [1] + [k] * (len(seconds) - 1)


class Groups:
    """The decode batches, shortest rows first. Owned by the loop."""

    def __init__(self, new_batch: Callable[[], Batch], loaded: Loaded, most: int) -> None:
        """`most`: the largest k of `intervals`."""
        self._new_batch, self._loaded, self._most = new_batch, loaded, most
        self.batches: list[Batch] = []
        self.stepping: list[Row] = []  # rows of the forward pass under way, for the error path
        self._seconds: dict[int, float] = {}  # by id(batch): smoothed time of its step
        self._every: dict[int, int] = {}
        self._iteration = 0

    @property
    def rows(self) -> int:
        return sum(map(len, self.batches))

    def all_rows(self) -> list[Row]:
        """Of every group."""
        return [row for batch in self.batches for row in batch.rows]

    def positions(self) -> int:
        """Tokens of all rows."""
        return sum(batch.length(row) for batch in self.batches for row in batch.rows)

    def caches(self) -> Caches:
        """Every layer of every group."""
        return [layer for batch in self.batches for layer in batch.caches]

    # ------------------------------------------------------------ membership
    def join(self, rows: list[Row]) -> None:
        """Take rows with single caches into the groups that suit them, moving others where that pays."""
        alone = [row for row in rows if row.solo or not self._loaded.batches]
        for row in alone:
            self._open([row])
        rows = [row for row in rows if row not in alone]
        if rows:
            self._place(rows)
        self._sort()

    def _place(self, rows: list[Row]) -> None:
        shared = self._shared()
        held = [(batch, row) for batch in shared for row in batch.rows]
        everyone = [row for _, row in held] + rows
        lengths = [batch.length(row) for batch, row in held] + [row.length for row in rows]
        simple = self._simple(shared, lengths, len(held))
        chosen = self._better(simple, lengths) or simple
        self._arrange([[everyone[i] for i in group] for group in chosen])

    def _better(self, now: list[list[int]], lengths: list[int]) -> list[list[int]] | None:
        """The best grouping, if it is worth the move or if `now` moves more than one padded batch would."""
        ideal = partition(lengths, self._loaded.group_bytes, self._loaded.row_bytes)
        best, cost = (sum(self._bytes(group, lengths) for group in way) for way in (ideal, now))
        padded = self._bytes(list(range(len(lengths))), lengths)
        return ideal if best < WORTH * cost or cost > padded else None

    def _simple(self, shared: list[Batch], lengths: list[int], held: int) -> list[list[int]]:
        """The groups as they are, each new row where it adds the fewest bytes (or in a group of its own)."""
        groups: list[list[int]] = []
        first = 0
        for batch in shared:
            groups.append(list(range(first, first + len(batch))))
            first += len(batch)
        for i in range(held, len(lengths)):
            options = [[*group, i] for group in groups]
            added = [self._bytes(new, lengths) - self._bytes(new[:-1], lengths) for new in options]
            alone = self._bytes([i], lengths)
            if added and WORTH * min(added) <= alone:
                groups[added.index(min(added))].append(i)
            else:
                groups.append([i])
        return groups

    def _bytes(self, group: list[int], lengths: list[int]) -> int:
        return moved([[lengths[i] for i in group]], self._loaded.group_bytes, self._loaded.row_bytes)

    def _arrange(self, groups: list[list[Row]]) -> None:
        """Make the shared batches hold these rows. A batch stays where most of its rows stay."""
        shared = self._shared()
        home = {id(row): batch for batch in shared for row in batch.rows}
        taken: set[int] = set()
        plan: list[tuple[Batch, list[Row]]] = []
        for group in groups:
            counts = [(sum(home.get(id(row)) is b for row in group), b) for b in shared if id(b) not in taken]
            count, batch = max(counts, key=lambda pair: pair[0], default=(0, None))
            if not count or batch is None:
                batch = self._new_batch()
            taken.add(id(batch))
            plan.append((batch, group))
        goal = {id(row): batch for batch, group in plan for row in group}
        for source in shared:
            if leaving := [row for row in source.rows if goal[id(row)] is not source]:
                source.leave(leaving, keep_caches=True)
        for batch, group in plan:
            here = {id(row) for row in batch.rows}
            batch.join([row for row in group if id(row) not in here])
            if not any(batch is known for known in self.batches):
                self.batches.append(batch)
        self._sweep()

    def _shared(self) -> list[Batch]:
        return [b for b in self.batches if self._loaded.batches and not any(row.solo for row in b.rows)]

    def _open(self, rows: list[Row]) -> None:
        batch = self._new_batch()
        batch.join(rows)
        self.batches.append(batch)

    def leave(self, rows: list[Row], keep: Keep | None = None) -> None:
        """Drop rows, of all groups at once; `keep(tokens, take)` is told what each one read, and may take the caches
        that hold it, compacted."""
        if not rows:
            return
        for batch in self.batches:
            gone = [row for row in batch.rows if any(row is r for r in rows)]
            if not gone:
                continue
            if keep is not None:
                for row in gone:
                    keep(batch.held_tokens(row), partial(batch.single_caches, batch.rows.index(row)))
            batch.leave(gone)
        self._sweep()
        self._regroup()

    def take(self, rows: list[Row]) -> list[Row]:
        """The rows, without their caches: the batches that held them are given up with all their rows."""
        lost = [batch for batch in self.batches if any(row is r for row in batch.rows for r in rows)]
        found = {id(row): row for batch in lost for row in batch.abandon()} | {id(row): row for row in rows}
        self._sweep()
        return list(found.values())

    def clear(self) -> None:
        self.batches.clear()

    def _sweep(self) -> None:
        self.batches = [batch for batch in self.batches if len(batch)]
        known = {id(batch) for batch in self.batches}
        self._seconds = {key: value for key, value in self._seconds.items() if key in known}
        self._sort()

    def _sort(self) -> None:
        self.batches.sort(key=lambda batch: batch.longest)
        self._reckon()

    # ------------------------------------------------------------ the turn
    def due(self) -> list[Batch]:
        """The batches to step in this iteration."""
        self._iteration += 1
        if len(self.batches) == 1:
            return self.batches[:]
        if self._iteration % REGROUP_STEPS == 0:
            self._regroup()
        if self._iteration % 16 == 0:
            self._reckon()
        return [b for i, b in enumerate(self.batches) if (self._iteration + i) % self._every.get(id(b), 1) == 0]

    def step(self, batch: Batch) -> Drawn:
        """Step one batch, noting how long it takes."""
        started = perf_counter()
        news = batch.step()
        seconds = perf_counter() - started
        before = self._seconds.get(id(batch), seconds)
        self._seconds[id(batch)] = before + _MEMORY * (seconds - before)
        return news

    def _regroup(self) -> None:
        shared = self._shared()
        if len(shared) < 2:  # rows grow alike, so one group is never worth splitting unless somebody joins
            return
        rows = [row for batch in shared for row in batch.rows]
        lengths = [batch.length(row) for batch in shared for row in batch.rows]
        if (better := self._better(self._simple(shared, lengths, len(rows)), lengths)) is not None:
            self._arrange([[rows[i] for i in group] for group in better])

    def _reckon(self) -> None:
        seconds = [self._seconds.get(id(batch), 0.0) for batch in self.batches]
        every = intervals(seconds, self._most) if all(seconds) and self._loaded.batches else [1] * len(seconds)
        self._every = {id(batch): k for batch, k in zip(self.batches, every, strict=True)}

    # ------------------------------------------------------------ facts
    def growth(self) -> int:
        """Bytes that the caches will take with the next step beyond what they hold."""
        return sum(growth(part) for part in parts(self.caches()))

    def state(self) -> list[GroupState]:
        """For /debug/batches and the metrics."""
        return [
            GroupState(
                rows=len(batch),
                length=batch.longest,
                kv_bytes=sum(getattr(layer, "nbytes", 0) for layer in batch.caches),
                real_bytes=sum(self._loaded.row_bytes(batch.length(row)) for row in batch.rows),
                every=self._every.get(id(batch), 1),
            )
            for batch in self.batches
        ]


def growth(part: Any) -> int:
    """Bytes that one of mlx-lm's caches takes with the next position. It holds room for more positions than it uses,
    and grows by `step` once that is used up; 0 for caches of another kind."""
    keys, step, most = getattr(part, "keys", None), getattr(part, "step", 0), getattr(part, "max_size", None)
    if not isinstance(keys, mx.array) or not step or (most and keys.shape[2] >= most):
        return 0
    used = getattr(part, "_idx", None)  # of a batch, whose `offset` is an array
    used = part.offset - getattr(part, "start_position", 0) if used is None else used
    return (keys.nbytes + part.values.nbytes) * step // keys.shape[2] if used >= keys.shape[2] else 0
