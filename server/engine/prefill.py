"""Which prompts are read next: in chunks, within a budget of time, short ones together where the model allows it.

Owns the sequences whose prompt isn't read yet and the pace at which chunks of them run. Runs in the engine process's
main thread. It plans and never touches an array or a clock: the time that a chunk took comes back with its result. It
never samples: the last token of a sequence goes through the decode lane.

Chunk lengths come from a short fixed list, so that the buffer pool meets few sizes; only the last chunk of a
sequence has any length. How many fit a budget is learned from the chunks before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from server.compute.cudnn_shapes import chunk_growth, longest_chunk, rows_read
from server.compute.rows import Row
from server.engine.chunk_timing import CHUNKS, ChunkTiming
from server.engine.joint_prefill import LONGEST, ROOMY, JointPrefill
from server.engine.plan import Begin, Detach, KeepPrompt, KeepRead, Operation, Plan, Read, Result
from server.engine.prefix_policy import PrefixPolicy
from server.ipc.probe import LARGEST_CHUNK

_SCORED_CHUNK = 256  # the logits of a scored chunk are all there at once, vocabulary and all
_TRIAL = 1.5  # budgets that the first two lone chunks of a length may take
_TRIAL_SHARED = 2.0  # the same of passes that several share
_ANYWAY = 1.6  # a budget isn't less than this many of the shortest chunk, which is read anyway
_LEFT_OUT = 2  # turns that a sequence gives away; then it reads alone
_SHORT_SHARE = 0.5  # share of a budget by which short prompts may get ahead of the oldest


class PromptReading:
    """One sequence whose tokens are being read."""

    __slots__ = ("begun", "done", "is_shared", "left_out", "row", "snapshot_at", "token_seconds")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.begun = False
        self.done = 0  # tokens that the caches hold
        self.is_shared = False  # its caches are those of a pass that it shared in this iteration
        self.token_seconds: float | None = None  # seconds a token of its newest chunk; grows with the length
        self.snapshot_at: list[int] = []  # lengths at which a chunk must end
        self.left_out = 0  # how often its turn was given to others who can read more together

    def begin(self, done: int, snapshot_at: list[int]) -> None:
        """The caches are there and hold `done` tokens."""
        self.begun = True
        self.done = done
        self.snapshot_at = sorted({mark for mark in snapshot_at if done < mark <= self.goal})

    @property
    def complete(self) -> bool:
        return self.begun and self.left == 0

    @property
    def is_waiting(self) -> bool:
        """Whether tokens of it can be read: some are left, and its caches aren't on their way from the disk."""
        return not self.complete and not self.row.is_fetching

    @property
    def ready(self) -> bool:
        """Whether the row may join a batch."""
        return self.complete and self.row.is_compiled

    @property
    def goal(self) -> int:
        """All tokens but the last."""
        return len(self.row.tokens) - 1

    @property
    def left(self) -> int:
        return self.goal - self.done

    def next_stop(self) -> int:
        """How many tokens the next chunk may have at the most."""
        stop = self.goal
        if self.snapshot_at:
            stop = self.snapshot_at[0]
        return stop - self.done


@dataclass(slots=True)
class ChunkBudget:
    """How much may be read in one iteration, and how much of that is spent."""

    budget: float | None  # seconds; None: no limit
    room: int  # bytes that rows may still take
    enough: int = 1 << 30  # complete prompts that end the turn
    patience: float | None = None  # seconds that the first complete prompt waits for others
    spent: float = 0.0

    @property
    def left(self) -> float | None:
        """Seconds of the budget; None where there is none."""
        if self.budget is None:
            return None
        return self.budget - self.spent

    def do(self, operation: Operation) -> Plan[Result]:
        """Have an operation done; its time counts."""
        result = yield operation
        self.spent += result.seconds
        self.room = result.room
        return result

    def hurry(self) -> None:
        """A prompt is complete: others get no more than `patience` from now on."""
        if self.patience is None:
            return
        until = self.spent + self.patience
        if self.budget is None or until < self.budget:
            self.budget = until
        self.patience = None


class Prefill:
    """The sequences being read, in order of arrival. Owned by the loop."""

    def __init__(
        self, policy: PrefixPolicy, joint_prefill: JointPrefill, affordable: Callable[[int, int], int]
    ) -> None:
        """`affordable(room, held)`: tokens of the longest chunk behind `held` others that `room` bytes suffice for."""
        self._policy = policy
        self._joint_prefill = joint_prefill
        self._affordable = affordable
        longest = longest_chunk()
        self._lengths = [length for length in CHUNKS if length <= longest]
        # Apart, since a lone chunk of many tokens attends to more than many short ones.
        self._alone = ChunkTiming(growth=chunk_growth())
        self._scored = ChunkTiming(CHUNKS[-1])  # every token's logits are made, and their best ones sought
        self._shared = ChunkTiming(CHUNKS[-1])
        self._ahead = 0.0  # seconds that short prompts got more than the oldest
        self.readings: list[PromptReading] = []

    def __len__(self) -> int:
        return len(self.readings)

    @property
    def waiting(self) -> list[Row]:
        """Those that aren't begun."""
        return [reading.row for reading in self.readings if not reading.begun]

    def insert(self, row: Row) -> None:
        """Take a new sequence, behind the others."""
        self.readings.append(PromptReading(row))

    def holds(self, seq: int) -> bool:
        return any(reading.row.seq == seq for reading in self.readings)

    def remove(self, seq: int) -> None:
        """Forget a sequence, read or not; one that isn't here is no fault."""
        self.readings = [reading for reading in self.readings if reading.row.seq != seq]

    def keep(self, seq: int, room: int) -> Plan[None]:
        """Plan to keep what a sequence has read that is about to be removed."""
        for reading in self.readings:
            if reading.row.seq == seq and reading.done and self._policy.keeps_read(reading.done, room):
                yield KeepRead(seq, reading.done)

    # ------------------------------------------------------------ the turn
    def plan(self, turn: ChunkBudget) -> Plan[list[Row]]:
        """Plan chunks until the turn's budget is spent or enough sequences are complete.

        At least one chunk is read, so that every turn makes progress. Returns the rows to join, which leave this
        object.
        """
        chunks = 0
        while waiting := [reading for reading in self.readings if reading.is_waiting]:
            reading = self._turn(waiting, turn.budget)
            if not reading.begun:
                yield from self._begin(reading, turn)
            if reading.left:
                chosen = yield from self._choose(reading, waiting, turn, is_first=not chunks)
                if not chosen:
                    break
                seconds = yield from self._read(chosen, turn)
                self._account(reading, waiting, turn.budget, seconds)
                chunks += 1
            complete = sum(reading.ready for reading in self.readings)
            if complete >= turn.enough:
                break
            if complete:
                turn.hurry()
        return (yield from self._finish())

    def _finish(self) -> Plan[list[Row]]:
        """What was shared in this iteration doesn't outlive it."""
        finished = [reading for reading in self.readings if reading.ready]
        self.readings = [reading for reading in self.readings if not reading.ready]
        shared = [reading for reading in self.readings if reading.is_shared]
        if shared:
            yield Detach(tuple(reading.row.seq for reading in shared))
        for reading in shared:
            reading.is_shared = False
        return [reading.row for reading in finished]

    def _begin(self, reading: PromptReading, turn: ChunkBudget) -> Plan[None]:
        result = yield from turn.do(Begin(reading.row.seq))
        reading.begin(result.outcome, self._policy.ends(reading.row))

    def _choose(
        self, reading: PromptReading, waiting: list[PromptReading], turn: ChunkBudget, *, is_first: bool
    ) -> Plan[list[tuple[PromptReading, int]]]:
        """Who reads the next chunk, and how much of each; none if the next one no longer fits the budget."""
        left = turn.left
        if left is not None and is_first:
            left = max(left, _ANYWAY * self._expected(reading, CHUNKS[-1]))
        size = self._size(reading, left, turn)
        if not is_first and left is not None and self._expected(reading, size) > left:
            return []
        alone = [(reading, size)]
        chosen = (yield from self._together(reading, waiting, left, turn)) or alone
        if all(one is not reading for one, _ in chosen):
            reading.left_out += 1
            if reading.left_out > _LEFT_OUT:
                return alone
        return chosen

    def _together(
        self, reading: PromptReading, waiting: list[PromptReading], left: float | None, turn: ChunkBudget
    ) -> Plan[list[tuple[PromptReading, int]]]:
        """Who reads in one pass with this one, and how much; none if it had better read alone."""
        others = [other for other in waiting if other is not reading]
        limit = min(LARGEST_CHUNK, self._fits(left, self._of_all, self._shared, _TRIAL_SHARED))
        if not others or (left is not None and limit == CHUNKS[-1] and self._of_all(limit) > left):
            return []
        limit = min(limit, self._affordable(turn.room, LONGEST) // ROOMY)
        mates = [reading]
        for other in self._joint_prefill.candidates(reading, others, limit):
            if not other.begun:
                yield from self._begin(other, turn)
            if other.left:
                mates.append(other)
        return self._joint_prefill.choose(mates, limit)

    def _turn(self, waiting: list[PromptReading], budget: float | None) -> PromptReading:
        """Whose chunk is next: the one with the least left, unless such are too far ahead of the oldest."""
        if budget is not None and self._ahead >= _SHORT_SHARE * budget:
            return waiting[0]
        return min(waiting, key=lambda r: r.left)

    def _account(
        self, reading: PromptReading, waiting: list[PromptReading], budget: float | None, seconds: float
    ) -> None:
        """Over iterations, since a budget may have room for one chunk only."""
        if len(waiting) < 2 or budget is None:
            self._ahead = 0.0
            return
        if reading is waiting[0]:
            seconds = -seconds
        self._ahead = min(max(0.0, self._ahead + seconds), budget)

    # ------------------------------------------------------------ sizes
    def _expected(self, reading: PromptReading, size: int) -> float:
        """Seconds of a chunk of one sequence; 0 while nothing is known."""
        return max(self._timing(reading).seconds(size) or 0.0, (reading.token_seconds or 0.0) * size)

    def _timing(self, reading: PromptReading) -> ChunkTiming:
        """What chunks of one sequence alone have taken."""
        if reading.row.sequence.prompt_logprobs:
            return self._scored
        return self._alone

    def _of_all(self, size: int) -> float:
        """The same of a pass of several."""
        return self._shared.seconds(size) or self._alone.seconds(size) or 0.0

    def _fits(self, left: float | None, seconds: Callable[[int], float], timing: ChunkTiming, budgets: float) -> int:
        """Tokens of the largest chunk that `left` seconds have room for, or so many times as much for a trial."""
        if left is None:
            return min(LARGEST_CHUNK, self._lengths[0])
        if not seconds(CHUNKS[-1]):
            return CHUNKS[-1]
        allowed = dict.fromkeys(CHUNKS, left) | {timing.next: budgets * left}
        fits = [size for size in self._lengths if size <= timing.reach and seconds(size) <= allowed[size]]
        return max(fits, default=CHUNKS[-1])

    def _size(self, reading: PromptReading, left: float | None, turn: ChunkBudget) -> int:
        limit = self._fits(left, lambda size: self._expected(reading, size), self._timing(reading), _TRIAL)
        if reading.row.sequence.prompt_logprobs:
            limit = min(limit, _SCORED_CHUNK)
        return self._cut(reading, max(CHUNKS[-1], min(limit, self._affordable(turn.room, reading.done))))

    def _cut(self, reading: PromptReading, limit: int) -> int:
        stop = reading.next_stop()
        if stop <= limit:
            return stop
        return next(size for size in self._lengths if size <= limit)

    # ------------------------------------------------------------ the chunk
    def _read(self, chosen: list[tuple[PromptReading, int]], turn: ChunkBudget) -> Plan[float]:
        """Read so many tokens of each in one pass; the seconds that it took."""
        operation = Read(tuple((reading.row.seq, size) for reading, size in chosen))
        result = yield from turn.do(operation)
        self._learn(chosen, result.seconds)
        for reading, size in chosen:
            yield from self._advance(reading, size, turn)
        if len(chosen) > 1:
            for reading, _ in chosen:
                reading.is_shared = reading.complete
        return result.seconds

    def _learn(self, chosen: list[tuple[PromptReading, int]], seconds: float) -> None:
        total = padded(size for _, size in chosen)
        if len(chosen) > 1:
            self._shared.learn(total, seconds)
            return
        self._timing(chosen[0][0]).learn(total, seconds)
        if total >= CHUNKS[-1]:
            chosen[0][0].token_seconds = seconds / total

    def _advance(self, reading: PromptReading, size: int, turn: ChunkBudget) -> Plan[None]:
        reading.done += size
        passed = [mark for mark in reading.snapshot_at if mark <= reading.done]
        reading.snapshot_at = reading.snapshot_at[len(passed) :]
        is_due = bool(passed) and passed[-1] == reading.done
        if is_due and self._policy.keeps_prompt(reading.row, reading.done, self.waiting, turn.room):
            yield from turn.do(KeepPrompt(reading.row.seq, reading.done))


def padded(sizes: Iterable[int]) -> int:
    """Tokens of a pass over chunks of these sizes, those included that fill shorter ones up."""
    listed = list(sizes)
    return rows_read(len(listed)) * max(listed)
