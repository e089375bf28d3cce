"""Drives what plans the engine's iterations, without the loop: prompts being read, rows in groups, and an executor that
has no arrays.
"""

from __future__ import annotations

from time import perf_counter

from server.engine.executor import Executor
from server.engine.groups import Groups
from server.engine.joint_prefill import JointPrefill
from server.engine.plan import (
    Abandon,
    Begin,
    Census,
    ClearPool,
    Detach,
    EvictPrefixes,
    FetchTokens,
    Flush,
    Join,
    KeepPrompt,
    KeepRead,
    KeepRow,
    Leave,
    OperationFailure,
    Read,
    Result,
    Split,
    Step,
    follow,
)
from server.engine.prefill import ChunkBudget, Prefill
from server.engine.prefix_cache import PrefixCache
from server.ipc.probe import LARGEST_CHUNK
from server.ipc.snapshot import Snapshot


class Lane:
    """Prompts being read.

    `on_begin(row)` gives a row caches and says how many tokens they hold and where snapshots are due; `on_mark(row,
    length)` hears of a snapshot, `on_chunk(row, tokens, seconds)` of a chunk; `most()` tokens have room in memory.
    """

    def __init__(self, model, guard, *, on_begin, on_chunk=lambda *_: None, on_mark=lambda *_: None,
                 most=lambda: 8 * LARGEST_CHUNK, joint_prefill=None, clock=perf_counter):  # fmt: skip
        self.rows, self.plan = {}, []
        self._marks = {}
        self._on_begin, self._on_chunk, self._on_mark = on_begin, on_chunk, on_mark
        self._most, self._clock = most, clock
        self.executor = Executor(model, guard, PrefixCache(0, Snapshot()), self.rows)
        self.prefill = Prefill(self, joint_prefill or JointPrefill("alone"), lambda room, held: room)

    def __len__(self):
        return len(self.prefill)

    @property
    def readings(self):
        return self.prefill.readings

    # what the lane asks of the rules about kept prefixes
    def ends(self, one):
        return self._marks[one.seq]

    def keeps_prompt(self, one, length, waiting, room):
        return True

    def insert(self, one):
        self.rows[one.seq] = one
        self.prefill.insert(one)

    def remove(self, seq):
        self.prefill.remove(seq)

    def run(self, budget, enough=1 << 30, patience=None):
        """The rows to join."""
        return follow(self.prefill.plan(ChunkBudget(budget, self._most(), enough, patience)), self.do)

    def do(self, operation):
        started = self._clock()
        outcome = self._outcome(operation)
        seconds = self._clock() - started
        self.plan.append(operation)
        if isinstance(operation, Read):
            for seq, size in operation.parts:
                self._on_chunk(self.rows[seq], size, seconds)
        return Result(outcome, seconds, self._most())

    def _outcome(self, operation):
        if isinstance(operation, Begin):
            one = self.rows[operation.seq]
            one.read, self._marks[one.seq] = self._on_begin(one)
            return one.read
        if isinstance(operation, KeepPrompt):
            return self._on_mark(self.rows[operation.seq], operation.length)
        return self.executor.run(operation)


class Scripted:
    """An executor of batches that `make()` makes. It has no arrays where they have none."""

    def __init__(self, make, fails=(), *, reads=False):
        """`fails`: operations that fail, each once; `reads`: rows must have been read before they join."""
        self._make, self._fails, self._reads = make, list(fails), reads
        self.rows, self.batches, self.plan, self.kept = {}, {}, [], []

    def is_census_due(self):
        return True

    def run(self, operation):
        """Its outcome."""
        self.plan.append(operation)
        if operation in self._fails:
            self._fails.remove(operation)
            seqs = getattr(operation, "seqs", None) or tuple(self.batches[operation.batch].seqs)
            raise OperationFailure(operation, seqs)
        return self._outcome(operation)

    def do(self, operation):
        return Result(self.run(operation))

    def caches(self):
        return []

    def close(self):
        self.batches.clear()

    def _outcome(self, operation):
        if isinstance(operation, Begin):
            return 0
        if isinstance(operation, Read):
            for seq, size in operation.parts:
                assert size <= len(self.rows[seq].tokens) - 1 - self.rows[seq].read
                self.rows[seq].read += size
            return None
        if isinstance(operation, KeepPrompt | KeepRead | Detach | Flush | EvictPrefixes | Census | ClearPool):
            return 0
        if isinstance(operation, Join):
            assert not self._reads or all(self.rows[seq].is_read or self.rows[seq].produced for seq in operation.seqs)
            batch = self.batches.setdefault(operation.batch, None) or self._make()
            self.batches[operation.batch] = batch
            batch.join([self.rows[seq] for seq in operation.seqs])
            return None
        batch = self.batches[operation.batch]
        if isinstance(operation, Split | Leave):
            gone = [one for one in batch.rows if one.seq in operation.seqs]
            batch.leave(gone, keep_caches=isinstance(operation, Split))
            if not len(batch):
                del self.batches[operation.batch]
        elif isinstance(operation, KeepRow):
            place = [one.seq for one in batch.rows].index(operation.seq)
            self.kept.append((batch.held_tokens(batch.rows[place]), batch.single_caches(place)))
        elif isinstance(operation, Abandon):
            self.batches.pop(operation.batch).abandon()
        elif isinstance(operation, Step):
            return batch.step()
        elif isinstance(operation, FetchTokens):
            return batch.fetch()
        return None


class Gathering:
    """Rows in groups."""

    def __init__(self, make, facts, most=4, clock=perf_counter):
        self.executor = Scripted(make)
        self.groups = Groups(self.executor.batches, facts, most)
        self._clock = clock

    @property
    def rows(self):
        return self.groups.rows

    @property
    def batches(self):
        """Shortest rows first."""
        return [self.executor.batches[number] for number in self.groups.order()]

    def join(self, rows):
        self.executor.rows |= {one.seq: one for one in rows}
        follow(self.groups.join(rows), self.executor.do)

    def leave(self, rows, kept=()):
        follow(self.groups.leave([one.seq for one in rows], [one.seq for one in kept]), self.executor.do)

    def due(self):
        """The batches to step."""
        return [self.executor.batches[number] for number in follow(self.groups.due(), self.executor.do)]

    def number(self, batch):
        return next(number for number, one in self.executor.batches.items() if one is batch)

    def took(self, seconds):
        """Each batch's step, shortest first, has taken so long."""
        for number, value in zip(self.groups.order(), seconds, strict=True):
            self.groups.note(number, value)
        self.join([])

    def step(self, batch):
        number = self.number(batch)
        started = self._clock()
        news = self.executor.run(Step(number))
        self.groups.note(number, self._clock() - started)
        return news
