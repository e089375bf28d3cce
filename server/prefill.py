"""Reading prompts: in chunks, within a budget of time, short ones together where the model allows it.

Owns the sequences whose prompt isn't read yet and the pace at which chunks of them run. Runs in the engine process's
main thread. It never samples: the last token of a sequence goes through the decode lane.

Chunk lengths come from a short fixed list, so that the buffer pool meets few sizes; only the last chunk of a
sequence has any length. How many fit a budget is learned from the chunks before.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import mlx.core as mx

from server.cache_guard import Guard, Keep, cache_arrays
from server.cohort import LONGEST, ROOMY, Cohorts
from server.messages import LARGEST_CHUNK, TokenLogprobs
from server.pace import CHUNKS, Pace
from server.plans import rows_read
from server.rows import Model, Row
from server.sampling import top_candidates
from server.together import Shared, kept, read_together, taken_apart

_SCORED_CHUNK = 256  # the logits of a scored chunk are all there at once, vocabulary and all
_TRIAL, _TRIAL_SHARED = 1.5, 2.0  # budgets that the first two chunks of a length may take
_ANYWAY = 1.6  # a budget isn't less than this many of the shortest chunk, which is read anyway
_LEFT_OUT = 2  # turns that a sequence gives away; then it reads alone
_SHORT_SHARE = 0.5  # share of a budget by which short prompts may get ahead of the oldest


class ChunkFailed(Exception):
    """The forward pass of a chunk failed; the cause says why, `rows` whose it was."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(f"a prefill chunk of sequences {[row.seq for row in rows]} failed")
        self.rows = rows


class Reading:
    """One sequence whose tokens are being read into its own single caches."""

    __slots__ = ("begun", "done", "left_out", "pace", "row", "snapshot_at")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.begun = False
        self.done = 0  # tokens that the caches hold
        self.pace: float | None = None  # seconds a token of its newest chunk; grows with the length
        self.snapshot_at: list[int] = []  # lengths at which a chunk must end
        self.left_out = 0  # how often its turn was given to others who can read more together

    def begin(self, done: int, snapshot_at: list[int]) -> None:
        """The caches are there and hold `done` tokens."""
        self.begun, self.done = True, done
        self.snapshot_at = sorted({mark for mark in snapshot_at if done < mark <= self.goal})

    @property
    def complete(self) -> bool:
        return self.begun and self.left == 0

    @property
    def goal(self) -> int:
        """All tokens but the last."""
        return len(self.row.tokens) - 1

    @property
    def left(self) -> int:
        return self.goal - self.done

    def next_stop(self) -> int:
        """How many tokens the next chunk may have at the most."""
        return (self.snapshot_at[0] if self.snapshot_at else self.goal) - self.done


class Prefill:
    """The sequences being read, in order of arrival. Owned by the loop."""

    def __init__(
        self,
        model: Model,
        guard: Guard,
        *,
        on_begin: Callable[[Row], tuple[int, list[int]]],
        on_chunk: Callable[[Row, int, float], None],
        on_mark: Callable[[Row, int], None],
        on_start: Callable[[int], None] = lambda size: None,
        most: Callable[[int], int] = lambda held: ROOMY * LARGEST_CHUNK,
        cohorts: Cohorts | None = None,
    ) -> None:
        """`on_begin(row)` before a sequence's first chunk: gives it caches and says how many tokens they hold and at
        which lengths a snapshot is due; `on_mark(row, length)` when one is; `on_start(tokens)` before each chunk and
        `on_chunk(row, tokens, seconds)` after it, for each row that took part; `most(held)` tokens of a chunk have room
        in memory now, if so many are held before it; without `cohorts` each sequence reads alone."""
        self._model = model
        self._guard = guard
        self._on_begin = on_begin
        self._on_chunk = on_chunk
        self._on_mark = on_mark
        self._on_start = on_start
        self._most = most
        self._cohorts = cohorts or Cohorts("alone")
        # Apart, since a lone chunk of many tokens attends to more than many short ones.
        self._alone, self._shared = Pace(), Pace(CHUNKS[-1])
        self._ahead = 0.0  # seconds that short prompts got more than the oldest
        self.readings: list[Reading] = []

    def __len__(self) -> int:
        return len(self.readings)

    @property
    def waiting(self) -> list[Row]:
        """Those that aren't begun."""
        return [reading.row for reading in self.readings if not reading.begun]

    def insert(self, row: Row) -> None:
        """A new sequence, behind the others."""
        self.readings.append(Reading(row))

    def remove(self, seq: int, keep: Keep | None = None) -> Row | None:
        """Take a sequence out, read or not; `keep(tokens, take)` hears what it has read, and may take its caches."""
        for reading in self.readings:
            if reading.row.seq == seq:
                self.readings.remove(reading)
                if keep is not None and reading.done:
                    keep(reading.row.tokens[: reading.done], reading.row.single)
                return reading.row
        return None

    def run(
        self, budget: float | None, ready: Callable[[Row], bool], enough: int, patience: float | None = None
    ) -> list[Row]:
        """Read chunks until `budget` seconds are spent (None: no limit) or `enough` sequences are complete.

        At least one chunk runs, so that every call makes progress. `ready(row)`: whether a row that is read may join;
        the first of them waits no more than `patience` seconds for others. Returns the rows to join, which leave this
        object.
        """
        started, chunks = perf_counter(), 0
        while waiting := [r for r in self.readings if not r.complete]:
            reading = self._turn(waiting, budget)
            if not reading.begun:
                self._begin(reading)
            if reading.left:
                left = None if budget is None else budget - (perf_counter() - started)
                if left is not None and not chunks:
                    left = max(left, _ANYWAY * self._expected(reading, CHUNKS[-1]))
                size = self._size(reading, left)
                if chunks and left is not None and self._expected(reading, size) > left:
                    break
                chosen = self._together(reading, waiting, left) or [(reading, size)]
                if all(one is not reading for one, _ in chosen):
                    reading.left_out += 1
                    chosen = chosen if reading.left_out <= _LEFT_OUT else [(reading, size)]
                self._account(reading, waiting, budget, self._chunk(chosen))
                chunks += 1
            complete = sum(r.complete and ready(r.row) for r in self.readings)
            if complete >= enough:
                break
            if complete and patience is not None:
                until = perf_counter() - started + patience
                budget, patience = until if budget is None else min(budget, until), None
        finished = [r for r in self.readings if r.complete and ready(r.row)]
        self.readings = [r for r in self.readings if r not in finished]
        for reading in self.readings:  # what is shared doesn't outlive the iteration
            reading.row.caches, reading.row.shared = reading.row.single(), None
        return [r.row for r in finished]

    def _begin(self, reading: Reading) -> None:
        reading.begin(*self._on_begin(reading.row))

    def _together(self, reading: Reading, waiting: list[Reading], left: float | None) -> list[tuple[Reading, int]]:
        """Who reads in one pass with this one, and how much; nobody if it had better read alone."""
        others = [other for other in waiting if other is not reading]
        limit = self._fits(left, self._of_all, self._shared, _TRIAL_SHARED)
        if not others or (left is not None and limit == CHUNKS[-1] and self._of_all(limit) > left):
            return []
        return self._cohorts.choose(reading, others, min(limit, self._most(LONGEST) // ROOMY), self._begin)

    def _turn(self, waiting: list[Reading], budget: float | None) -> Reading:
        """Whose chunk is next: the one with the least left, unless such are too far ahead of the oldest."""
        if budget is not None and self._ahead >= _SHORT_SHARE * budget:
            return waiting[0]
        return min(waiting, key=lambda r: r.left)

    def _account(self, reading: Reading, waiting: list[Reading], budget: float | None, seconds: float) -> None:
        """Over iterations, since a budget may have room for one chunk only."""
        if len(waiting) < 2 or budget is None:
            self._ahead = 0.0
        else:
            change = -seconds if reading is waiting[0] else seconds
            self._ahead = min(max(0.0, self._ahead + change), budget)

    def _expected(self, reading: Reading, size: int) -> float:
        """Seconds of a chunk of one sequence; 0 while nothing is known."""
        return max(self._alone.seconds(size) or 0.0, (reading.pace or 0.0) * size)

    def _of_all(self, size: int) -> float:
        """The same of a pass of several."""
        return self._shared.seconds(size) or self._alone.seconds(size) or 0.0

    @staticmethod
    def _fits(left: float | None, seconds: Callable[[int], float], pace: Pace, budgets: float) -> int:
        """Tokens of the largest chunk that `left` seconds have room for, or so many times as much for a trial."""
        if left is None:
            return CHUNKS[0]
        near = [size for size in CHUNKS if size <= pace.reach]
        fits = [size for size in near if seconds(size) <= (budgets * left if size == pace.next else left)]
        return CHUNKS[-1] if not seconds(CHUNKS[-1]) or not fits else fits[0]

    def _size(self, reading: Reading, left: float | None) -> int:
        limit = self._fits(left, lambda size: self._expected(reading, size), self._alone, _TRIAL)
        if reading.row.sequence.prompt_logprobs:
            limit = min(limit, _SCORED_CHUNK)
        return self._cut(reading, max(CHUNKS[-1], min(limit, self._most(reading.done))))

    @staticmethod
    def _cut(reading: Reading, limit: int) -> int:
        stop = reading.next_stop()
        if stop <= limit:
            return stop
        return next(size for size in CHUNKS if size <= limit)

    def _chunk(self, chosen: list[tuple[Reading, int]]) -> float:
        """Read so many tokens of each in one pass; the seconds that it took."""
        total = rows_read(len(chosen)) * max(size for _, size in chosen)  # with padding
        self._on_start(total)
        started = perf_counter()
        try:
            self._pass(chosen)
        except Exception as error:
            raise ChunkFailed([reading.row for reading, _ in chosen]) from error
        seconds = perf_counter() - started
        if len(chosen) == 1 and total >= CHUNKS[-1]:
            chosen[0][0].pace = seconds / total
        (self._alone if len(chosen) == 1 else self._shared).learn(total, seconds)
        for reading, size in chosen:
            self._advance(reading, size, seconds)
        return seconds

    def _advance(self, reading: Reading, size: int, seconds: float) -> None:
        reading.done += size
        self._on_chunk(reading.row, size, seconds)
        passed = [mark for mark in reading.snapshot_at if mark <= reading.done]
        reading.snapshot_at = reading.snapshot_at[len(passed) :]
        if passed and passed[-1] == reading.done:
            self._on_mark(reading.row, reading.done)

    def _pass(self, chosen: list[tuple[Reading, int]]) -> None:
        if len(chosen) == 1:
            reading, size = chosen[0]
            self._forward(reading.row, reading.row.tokens[reading.done : reading.done + size + 1])
            return
        rows = [reading.row for reading, _ in chosen]
        texts = [reading.row.tokens[reading.done : reading.done + size] for reading, size in chosen]
        caches = read_together(self._model, [row.caches for row in rows], texts)
        through = [i for i, (reading, size) in enumerate(chosen) if size == reading.left]
        others = [i for i in range(len(rows)) if i not in through]
        for i, single in zip(others, taken_apart(caches, others), strict=True):
            rows[i].caches = single
        if through:
            if others:
                caches = kept(caches, through, compacting=self._guard.enabled)
            shared = Shared(caches, [rows[i].seq for i in through])
            for i in through:
                rows[i].caches, rows[i].shared = [], shared

    def _forward(self, row: Row, tokens: list[int]) -> None:
        """Read all of `tokens` but the last, which is only there to be scored."""
        logits = self._model(mx.array([tokens[:-1]]), cache=row.caches)
        if row.sequence.prompt_logprobs and not row.produced:
            row.prompt_scores += _scores(logits[0], tokens[1:], row.sequence.logprobs)
        del logits  # else never evaluated: the head over a whole chunk costs hundreds of MB
        if self._guard.enabled:
            mx.eval(cache_arrays(row.caches))
        else:
            mx.eval([layer.state for layer in row.caches])


def _scores(logits: mx.array, targets: list[int], alternatives: int) -> list[TokenLogprobs]:
    """Logprobs of `targets` under `logits` [L, V], with the best alternatives."""
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    own = (mx.take_along_axis(logits, mx.array(targets)[:, None], axis=-1) - total)[:, 0]
    width = min(1 << (max(1, alternatives) - 1).bit_length(), logits.shape[-1])
    best, ids = top_candidates(logits, width)
    columns = zip(_listed(own), _listed(ids), _listed(best - total), strict=True)
    return [TokenLogprobs(o, list(zip(i, b, strict=True))[: max(0, alternatives)]) for o, i, b in columns]


def _listed(array: mx.array) -> list[Any]:
    listed = array.tolist()
    assert isinstance(listed, list)
    return listed
