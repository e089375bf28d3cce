"""Carries operations out with arrays.

Owns the batches and what a plan does to rows, caches and kept prefixes. Runs in the engine process's main thread. It
decides nothing, reads no clock and no memory: its orders come from `plan`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from server.batching import Batch
from server.cache_guard import Caches, Guard, cache_arrays, is_loose, pack, settle
from server.compute.merged_caches import MergedCaches, kept, read_together, taken_apart
from server.compute.rows import Model, Row, StepOutput, on_host
from server.compute.sampling import top_candidates
from server.compute.stopwatch import Laps
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
    Operation,
    OperationFailure,
    Read,
    Seqs,
    Split,
    Step,
)
from server.engine.prefix_cache import PrefixCache
from server.ipc.sequence import TokenLogprobs


class MarkSaver(Protocol):
    """Saves what a row holds at the lengths at which prompts are kept."""

    def save_mark(self, row: Row, length: int) -> None:
        """The row's caches hold its first `length` tokens now."""

    def copy_newest(self, step: Step, caches: Caches) -> list[mx.array]:
        """Copy the newest positions that a step is to copy; returns what is to be submitted with it."""


class Executor:
    """Owned by the loop, which puts rows in and takes them out; `rows` is by their numbers."""

    def __init__(
        self, model: Model, guard: Guard, prefix: PrefixCache, rows: dict[int, Row], laps: Laps | None = None
    ) -> None:
        """`laps` takes the host's time by part of a step."""
        self._model = model
        self._guard = guard
        self._prefix = prefix
        self.rows = rows
        self._laps = laps
        self.batches: dict[int, Batch] = {}
        self.marks: MarkSaver | None = None
        self._verbs = {
            Begin: self._begin,
            Read: self._read,
            KeepPrompt: self._keep_prompt,
            KeepRead: self._keep_read,
            Detach: self._detach,
            Join: self._join,
            Split: self._split,
            Leave: self._leave,
            KeepRow: self._keep_row,
            Step: self._step,
            FetchTokens: self._fetch,
            Abandon: self._abandon,
            Flush: self._flush,
            EvictPrefixes: self._evict_prefixes,
            Census: self._census,
            ClearPool: self._clear_pool,
        }

    def run(self, operation: Operation) -> Any:
        """Carry one operation out; returns its outcome. Raises OperationFailure with the rows that it costs."""
        try:
            return self._verbs[type(operation)](operation)  # type: ignore[operator]
        except Exception as error:
            raise OperationFailure(operation, self._touched(operation)) from error

    def _touched(self, operation: Operation) -> Seqs:
        """The rows whose caches an operation may leave in no known state."""
        if isinstance(operation, Step | FetchTokens | Split | Leave | KeepRow | Join):
            batch = self.batches.get(operation.batch)
            mates: tuple[int, ...] = ()
            if batch is not None:
                mates = tuple(batch.seqs)
            return mates + getattr(operation, "seqs", ())
        if isinstance(operation, Read | Detach):
            return operation.seqs
        seq = getattr(operation, "seq", None)
        if seq is None:
            return ()
        return (seq,)

    def caches(self) -> Caches:
        """Every layer of every batch."""
        return [layer for batch in self.batches.values() for layer in batch.caches]

    def close(self) -> None:
        """Let go of all arrays."""
        self.batches.clear()
        self._prefix.clear()

    def _picked(self, seqs: Seqs) -> list[Row]:
        return [self.rows[seq] for seq in seqs]

    # ------------------------------------------------------------ prompts
    def _begin(self, operation: Begin) -> int:
        row = self.rows[operation.seq]
        found = None
        if not row.sequence.prompt_logprobs:
            found = self._prefix.lookup(row.tokens)
        if row.restored is not None and (found is None or row.restored[1] > found[1]):
            found = row.restored
            row.is_from_disk = True
        row.restored = None
        row.caches, row.cached = found or (make_prompt_cache(self._model), 0)
        row.read = row.cached
        return row.cached

    def _read(self, operation: Read) -> None:
        if len(operation.parts) == 1:
            self._read_alone(*operation.parts[0])
        else:
            self._read_together(operation)

    def _read_alone(self, seq: int, size: int) -> None:
        row = self.rows[seq]
        tokens = row.tokens[row.read : row.read + size + 1]
        logits = self._model(mx.array([tokens[:-1]]), cache=row.caches)
        if row.sequence.prompt_logprobs and not row.produced:
            row.prompt_scores += _scores(logits[0], tokens[1:], row.sequence.logprobs)
        del logits  # else never evaluated: the head over a whole chunk costs hundreds of MB
        if self._guard.enabled:
            mx.eval(cache_arrays(row.caches))
            if is_loose(row.caches):  # a state that is a view of the whole chunk
                pack(row.caches)
        else:
            mx.eval([layer.state for layer in row.caches])
        row.read += size

    def _read_together(self, operation: Read) -> None:
        """Those that are read to the end stay merged until they join a batch; the others get their own caches back."""
        rows = self._picked(operation.seqs)
        sizes = [size for _, size in operation.parts]
        texts = [row.tokens[row.read : row.read + size] for row, size in zip(rows, sizes, strict=True)]
        caches = read_together(self._model, [row.caches for row in rows], texts)
        for row, size in zip(rows, sizes, strict=True):
            row.read += size
        through = [i for i, row in enumerate(rows) if row.is_read]
        others = [i for i, row in enumerate(rows) if not row.is_read]
        for i, single in zip(others, taken_apart(caches, others), strict=True):
            rows[i].caches = single
        if through:
            if others:
                caches = kept(caches, through, compacting=self._guard.enabled)
            shared = MergedCaches(caches, [rows[i].seq for i in through])
            for i in through:
                rows[i].caches = []
                rows[i].shared = shared

    def _keep_prompt(self, operation: KeepPrompt) -> None:
        row = self.rows[operation.seq]
        self._prefix.insert_copy(row.tokens[: operation.length], row.single())
        if self.marks is not None:
            self.marks.save_mark(row, operation.length)

    def _keep_read(self, operation: KeepRead) -> None:
        row = self.rows[operation.seq]
        self._prefix.insert(row.tokens[: operation.length], row.single())

    def _detach(self, operation: Detach) -> None:
        for row in self._picked(operation.seqs):
            row.caches = row.single()
            row.shared = None

    # ------------------------------------------------------------ batches
    def _join(self, operation: Join) -> None:
        batch = self.batches.get(operation.batch) or Batch(self._model, self._guard, self._laps)
        batch.join(self._picked(operation.seqs))
        self.batches[operation.batch] = batch  # one that takes no row is none

    def _split(self, operation: Split) -> None:
        self.batches[operation.batch].leave(self._picked(operation.seqs), keep_caches=True)
        self._drop_if_empty(operation.batch)

    def _leave(self, operation: Leave) -> None:
        batch = self.batches[operation.batch]
        gone = set(operation.seqs)
        batch.leave([row for row in batch.rows if row.seq in gone])
        self._drop_if_empty(operation.batch)

    def _drop_if_empty(self, number: int) -> None:
        if not len(self.batches[number]):
            del self.batches[number]

    def _keep_row(self, operation: KeepRow) -> None:
        batch = self.batches[operation.batch]
        place = batch.seqs.index(operation.seq)
        tokens = batch.held_tokens(batch.rows[place])
        self._prefix.insert(tokens, batch.single_caches(place))

    def _step(self, operation: Step) -> StepOutput:
        batch = self.batches[operation.batch]
        if operation.newest and self.marks is not None:
            return batch.step(partial(self.marks.copy_newest, operation))
        return batch.step()

    def _fetch(self, operation: FetchTokens) -> StepOutput:
        return self.batches[operation.batch].fetch()

    def _abandon(self, operation: Abandon) -> None:
        self.batches.pop(operation.batch).abandon()

    # ------------------------------------------------------------ memory
    def _flush(self, operation: Flush) -> None:
        settle(self.caches())  # also with the guard off: what is evaluated here is memory won back

    def _evict_prefixes(self, operation: EvictPrefixes) -> int:
        return self._prefix.evict("guard", operation.bytes, operation.buffers)

    def is_census_due(self) -> bool:
        """Count an iteration that has stepped; whether a census is due behind it."""
        return self._guard.is_due()

    def _census(self, operation: Census) -> None:
        self._guard.take_census(*(batch.caches for batch in self.batches.values()))

    def _clear_pool(self, operation: ClearPool) -> None:
        mx.clear_cache()


def _scores(logits: mx.array, targets: list[int], alternatives: int) -> list[TokenLogprobs]:
    """Logprobs of `targets` under `logits` [L, V], with the best alternatives."""
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    own = (mx.take_along_axis(logits, mx.array(targets)[:, None], axis=-1) - total)[:, 0]
    width = min(1 << (max(1, alternatives) - 1).bit_length(), logits.shape[-1])
    best, ids = top_candidates(logits, width)
    columns = zip(on_host(own), on_host(ids), on_host(best - total), strict=True)
    return [TokenLogprobs(o, list(zip(i, b, strict=True))[: max(0, alternatives)]) for o, i, b in columns]
