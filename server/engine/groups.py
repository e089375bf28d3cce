"""Which rows share a forward pass, and how often each group is stepped.

Owns the choice, and no batch. Runs in the engine process's main thread; it plans and never touches an array.

mlx-lm pads every row of a batch to its longest, so one row of 20,000 positions would make each short one carry 20,000;
here rows of similar length share a batch. The partition is the one that moves the fewest bytes a step: a fixed amount a
group (the weights, and what a step costs however short its rows are) plus the padded KV. It never moves more than the
single padded batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from server.compute.rows import Row
from server.engine.model import LoadedModel
from server.engine.plan import Join, KeepRow, Leave, Plan, Split
from server.ipc.probe import GROWTH

REGROUP_STEPS = GROWTH  # iterations between two looks at the grouping; until then no cache grows twice
WORTH = 0.6  # a grouping must move less than this share of a simpler one's bytes: moving rows copies their KV
SLOWED = 2.0  # short groups may be slowed by this factor before long ones are stepped less often
_MEMORY = 0.2


def partition(lengths: Sequence[int], group_bytes: int, row_bytes: Callable[[int], int]) -> list[list[int]]:
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
        rows = 0
        options = []
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


def moved(groups: Sequence[Sequence[int]], group_bytes: int, row_bytes: Callable[[int], int]) -> int:
    """Bytes that one step of all groups moves; each group is given by its rows' lengths."""
    return sum(group_bytes + len(group) * row_bytes(max(group)) for group in groups if group)


def intervals(seconds: Sequence[float], most: int) -> list[int]:
    """Each group's k (stepped each k-th iteration), shortest group first: 1 for all unless the longer ones would
    slow the first below 1 / SLOWED; then the smallest k ≤ `most` for the longer ones that avoids it."""
    if not seconds:
        return []
    first = seconds[0]
    rest = sum(seconds[1:])
    k = 1
    while k < most and first + rest / k > SLOWED * first:
        k += 1
    return [1] + [k] * (len(seconds) - 1)


class GroupBatch(Protocol):
    """What the grouping asks of a batch."""

    rows: list[Row]

    def __len__(self) -> int: ...
    def length(self, row: Row) -> int:
        """Tokens of one of its rows."""

    def is_fetched(self, row: Row) -> bool:
        """Return whether the newest token of one of its rows has been reported already."""

    @property
    def longest(self) -> int:
        """Tokens of its longest row."""


class Groups:
    """Which rows sit in which batch, and which batches are due. Owned by the loop.

    `batches` belongs to the executor, which changes it as it carries out what is planned here.
    """

    def __init__(self, batches: Mapping[int, GroupBatch], loaded: LoadedModel, most: int) -> None:
        """`most`: the largest k of `intervals`."""
        self._batches = batches
        self._loaded = loaded
        self._most = most
        self._number = 0  # of the newest batch
        self._seconds: dict[int, float] = {}  # by batch: smoothed time of its step
        self._every: dict[int, int] = {}
        self._iteration = 0

    @property
    def rows(self) -> int:
        return sum(map(len, self._batches.values()))

    def order(self) -> list[int]:
        """The batches, shortest rows first."""
        return sorted(self._batches, key=lambda number: self._batches[number].longest)

    def all_rows(self) -> list[Row]:
        """The rows of every batch, shortest batch first."""
        return [row for number in self.order() for row in self._batches[number].rows]

    def holding(self, seqs: Iterable[int]) -> list[int]:
        """The batches in which any of these rows sits."""
        wanted = set(seqs)
        return [number for number, batch in self._batches.items() if any(row.seq in wanted for row in batch.rows)]

    # ------------------------------------------------------------ membership
    def join(self, rows: list[Row]) -> Plan[None]:
        """Plan to take rows with single caches into the groups that suit them, moving others where that pays."""
        alone = [row for row in rows if row.solo or not self._loaded.batches]
        for row in alone:
            yield Join(self._new(), (row.seq,))
        shared = [row for row in rows if row not in alone]
        if shared:
            yield from self._place(shared)
        self._reckon()

    def _new(self) -> int:
        self._number += 1
        return self._number

    def _place(self, rows: list[Row]) -> Plan[None]:
        shared = self._shared()
        held = [(self._batches[number], row) for number in shared for row in self._batches[number].rows]
        everyone = [row for _, row in held] + rows
        lengths = [batch.length(row) for batch, row in held] + [row.length for row in rows]
        simple = self._simple(shared, lengths, len(held))
        chosen = self._better(simple, lengths) or simple
        yield from self._arrange([[everyone[i] for i in group] for group in chosen])

    def _better(self, now: list[list[int]], lengths: list[int]) -> list[list[int]] | None:
        """The best grouping, if it is worth the move or if `now` moves more than one padded batch would."""
        ideal = partition(lengths, self._loaded.group_bytes, self._loaded.row_bytes)
        best = sum(self._bytes(group, lengths) for group in ideal)
        cost = sum(self._bytes(group, lengths) for group in now)
        padded = self._bytes(list(range(len(lengths))), lengths)
        if best < WORTH * cost or cost > padded:
            return ideal
        return None

    def _simple(self, shared: list[int], lengths: list[int], held: int) -> list[list[int]]:
        """The groups as they are, each new row where it adds the fewest bytes (or in a group of its own)."""
        groups: list[list[int]] = []
        first = 0
        for number in shared:
            count = len(self._batches[number])
            groups.append(list(range(first, first + count)))
            first += count
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

    def _arrange(self, groups: list[list[Row]]) -> Plan[None]:
        """Make the shared batches hold these rows. A batch stays where most of its rows stay."""
        shared = self._shared()
        homes = self._homes(groups, shared)
        goal = {row.seq: number for number, group in zip(homes, groups, strict=True) for row in group}
        for number in shared:
            if leaving := tuple(row.seq for row in self._batches[number].rows if goal[row.seq] != number):
                yield Split(number, leaving)
        for number, group in zip(homes, groups, strict=True):
            here: set[int] = set()
            if number in self._batches:
                here = {row.seq for row in self._batches[number].rows}
            if coming := tuple(row.seq for row in group if row.seq not in here):
                yield Join(number, coming)
        self._sweep()

    def _homes(self, groups: list[list[Row]], shared: list[int]) -> list[int]:
        """The batch of each group: the one that holds the most of its rows, or a new one."""
        homes: list[int] = []
        for group in groups:
            seqs = {row.seq for row in group}
            counts = {
                number: sum(row.seq in seqs for row in self._batches[number].rows)
                for number in shared
                if number not in homes
            }
            best = max(counts, key=lambda number: counts[number], default=0)
            if not counts.get(best):
                best = self._new()
            homes.append(best)
        return homes

    def _shared(self) -> list[int]:
        """The batches that may take rows, shortest first."""
        if not self._loaded.batches:
            return []
        return [number for number in self.order() if not any(row.solo for row in self._batches[number].rows)]

    def lengths(self, seqs: Iterable[int]) -> dict[int, int]:
        """Return the tokens of each of these rows that is in a batch."""
        wanted = set(seqs)
        batches = self._batches.values()
        return {row.seq: batch.length(row) for batch in batches for row in batch.rows if row.seq in wanted}

    def leave(self, seqs: Iterable[int], kept: Collection[int] = ()) -> Plan[None]:
        """Plan to drop rows, of all batches at once; what the rows in `kept` have read is kept."""
        gone = set(seqs)
        if not gone:
            return
        for number in self.order():
            batch = self._batches[number]
            leaving = [row for row in batch.rows if row.seq in gone]
            if not leaving:
                continue
            for row in leaving:
                if row.seq in kept:
                    yield KeepRow(number, row.seq)
            yield Leave(number, tuple(row.seq for row in leaving))
        self._sweep()
        yield from self._regroup()

    def _sweep(self) -> None:
        self._seconds = {number: value for number, value in self._seconds.items() if number in self._batches}
        self._reckon()

    # ------------------------------------------------------------ the turn
    def due(self) -> Plan[list[int]]:
        """Plan a better grouping now and then; returns the batches to step in this iteration."""
        self._iteration += 1
        if len(self._batches) == 1:
            return list(self._batches)
        if self._iteration % REGROUP_STEPS == 0:
            yield from self._regroup()
        if self._iteration % 16 == 0:
            self._reckon()
        order = self.order()
        return [b for i, b in enumerate(order) if (self._iteration + i) % self._every.get(b, 1) == 0]

    def unfetched(self, seqs: set[int]) -> list[int]:
        """Return the batches that hold a row of these whose newest token hasn't been reported."""
        order = self.order()
        return [b for b in order if any(self._is_unfetched(row, b) for row in self._batches[b].rows if row.seq in seqs)]

    def _is_unfetched(self, row: Row, number: int) -> bool:
        return not self._batches[number].is_fetched(row)

    def note(self, number: int, seconds: float) -> None:
        """Learn how long a batch's step took."""
        before = self._seconds.get(number, seconds)
        self._seconds[number] = before + _MEMORY * (seconds - before)

    def _regroup(self) -> Plan[None]:
        shared = self._shared()
        if len(shared) < 2:  # rows grow alike, so one group is never worth splitting unless another row joins
            return
        batches = [self._batches[number] for number in shared]
        rows = [row for batch in batches for row in batch.rows]
        lengths = [batch.length(row) for batch in batches for row in batch.rows]
        better = self._better(self._simple(shared, lengths, len(rows)), lengths)
        if better is not None:
            yield from self._arrange([[rows[i] for i in group] for group in better])

    def _reckon(self) -> None:
        order = self.order()
        seconds = [self._seconds.get(number, 0.0) for number in order]
        every = [1] * len(order)
        if all(seconds) and self._loaded.batches:
            every = intervals(seconds, self._most)
        self._every = dict(zip(order, every, strict=True))

    def every(self, number: int) -> int:
        """In each how manieth iteration a batch is stepped."""
        return self._every.get(number, 1)
