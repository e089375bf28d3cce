"""The generations that are alive: who waits, who runs, who comes back.

Owns three tables (the queue, those to be continued, those in the engine) and every move between them. Event-loop
thread only. The lifecycle says which engine to feed, and never starts, kills or judges one.

    open ──► queue ──────────► running ──► ended
               ▲  preempted ◄──┤    ▲
                               └► returning        the engine was lost
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from server.errors import ExceedsMemory, GenerationError, GrammarFailure, QueueFull, RequestError, RequestTimeout
from server.ipc import messages
from server.ipc.sequence import TokenSequence
from server.ipc.snapshot import PromptProgress, Snapshot
from server.supervision import probation
from server.supervision.admission import Capacity, Outlook, Room
from server.supervision.engine_process import EngineConnection
from server.supervision.generation import Cause, Generation, GenerationHandle, TokenLog
from server.supervision.outputs import OutputCounts, OutputRouter
from server.supervision.timeouts import DrainRate

RECLAIM_SECONDS = 10.0  # between two requests to the engine to free what it can
TURN_SECONDS = 30.0  # until one that runs apart has its turn, however many others there are
_FAILURES: dict[str, type[RequestError]] = {"memory": ExceedsMemory, "grammar": GrammarFailure}

log = logging.getLogger("marathon")


class Scheduler:
    """All live generations. `lives` are the requests whose clients are still there."""

    def __init__(self, counts: OutputCounts, clock: Callable[[], float], queue_limit: int) -> None:
        self.clock = clock
        self.lives: set[GenerationHandle] = set()
        self.running: dict[int, Generation] = {}
        self.queue_limit = queue_limit
        self._counts = counts
        self._router = OutputRouter(counts, clock)
        self._queue: deque[Generation] = deque()
        self._returning: deque[Generation] = deque()
        self._tried: Generation | None = None  # the one on probation in the engine
        self._seqs = itertools.count(1)
        self._outlook = Outlook()
        self._drain_rate = DrainRate()
        self._connection: EngineConnection | None = None
        self._capacity: Capacity | None = None
        self._feeding = False
        self._loading_at = 0.0  # when it began to load its weights
        self._fed = 0.0  # since when
        self._busy_since = 0.0  # that the engine has had something to do
        self._settling: asyncio.TimerHandle | None = None  # the engine must live for longer until one may join
        self._snapshot = Snapshot()
        self._calm_since = 0.0
        self._reclaimed = -math.inf

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._returning)

    @property
    def busy_since(self) -> float:
        """When the engine was given work that isn't done; inf if it has none."""
        if self.running:
            return self._busy_since
        return math.inf

    def retry_after(self) -> int:
        """Seconds until a further request has a chance."""
        return self._drain_rate.retry_after(self.waiting)

    def generations(self) -> Iterator[Generation]:
        """Yield those that haven't ended, the oldest request first."""
        for live in sorted(self.lives, key=lambda live: live.generations[0].seq):
            yield from (generation for generation in live.generations if not generation.ended)

    # ---------------------------------------------------------------- in and out
    def enter(
        self,
        sequences: Sequence[TokenSequence],
        endpoint: str,
        deadline: float | None,
        *,
        log: TokenLog | None = None,
        generated: Sequence[Sequence[int]] | None = None,
        background: bool = False,
    ) -> GenerationHandle:
        """A new request, or one of an earlier life of the server with the ids that it has; starts at once if there is
        room. Raises QueueFull when there is none for a new one to wait either."""
        if generated is None:
            self._check_queue(sequences)
        seqs = [next(self._seqs) for _ in sequences]
        live = GenerationHandle(self, sequences, endpoint, seqs, log=log, background=background)
        if generated is not None:
            for generation, ids in zip(live.generations, generated, strict=True):
                generation.go_on(ids, live.arrived)
        if deadline is not None:
            delay = max(0.0, deadline - self.clock())
            live.expiry = asyncio.get_running_loop().call_later(delay, self._expire, live)
        self.lives.add(live)
        self._queue.extend(live.generations)
        self.pump()
        return live

    def _check_queue(self, sequences: Sequence[TokenSequence]) -> None:
        waiting = sum(g.cause is None for g in self._queue)
        if waiting + len(sequences) - self._startable(sequences) > self.queue_limit:
            raise QueueFull(
                f"The queue is full: {waiting} waiting, and no more than {self.queue_limit} may.",
                retry_after=self.retry_after(),
            )

    def _startable(self, sequences: Sequence[TokenSequence]) -> int:
        """How many of them wouldn't have to wait."""
        if not self._feeding or self.waiting or self._tried:
            return 0
        room = self._room()
        count = 0
        for sequence in sequences:
            length = self._outlook.length(sequence, 0)
            unread = len(sequence.prompt)
            if not room.admits_new(length, unread):
                break
            room.take(length, unread)
            count += 1
        return count

    def _expire(self, live: GenerationHandle) -> None:
        seconds = self.clock() - live.arrived
        self.fail(
            live, RequestTimeout(f"The request wasn't done within its {seconds:.3g} seconds; time waited counts.")
        )

    def fail(self, live: GenerationHandle, error: RequestError) -> None:
        """The request ends with an error; its rows are free."""
        self._fail(live, error)
        self.pump()

    def fail_all(self, error: RequestError) -> None:
        """Every request that isn't done ends with this error."""
        self._fail_where(lambda live: True, error)

    def fail_unbegun(self, error: RequestError) -> None:
        """Requests that no engine has been given yet end with this error: they lose nothing and can ask elsewhere.
        Those whose clients may have left wait on."""
        self._fail_where(lambda live: not live.background and not any(g.submitted for g in live.generations), error)

    def fail_lost(self, before: float, error: RequestError) -> None:
        """Requests of which a part has been waiting to be continued since `before` end with this error."""
        self._fail_where(
            lambda live: any(g.cause and not g.ended and g.lost <= before for g in live.generations), error
        )

    def _fail_where(self, ends: Callable[[GenerationHandle], bool], error: RequestError) -> None:
        for live in self.lives:
            if ends(live) and not all(generation.ended for generation in live.generations):
                self._fail(live, error)

    def _fail(self, live: GenerationHandle, error: RequestError) -> None:
        live.fail(error)
        for generation in live.generations:
            self._drop(generation)

    def release(self, generation: Generation) -> None:
        """Drop a generation whose client has left, wherever it is. Idempotent."""
        self._drop(generation)
        self.pump()

    def _drop(self, generation: Generation) -> None:
        if generation.ended:
            return
        self._end(generation)
        if self.running.pop(generation.seq, None) is None:
            (self._returning if generation in self._returning else self._queue).remove(generation)
        elif self._connection is not None:
            self._connection.send(messages.Cancel(self._connection.epoch, generation.seq))

    def _end(self, generation: Generation) -> None:
        generation.ended = True
        if generation is self._tried:
            self._tried = None
        now = self.clock()
        if generation.submitted:
            self._drain_rate.left(now)
        if generation.first:
            self._counts.decode_time(now - generation.first)

    def leave(self, live: GenerationHandle) -> None:
        """Its reader has gone."""
        if live not in self.lives:
            return
        self.lives.discard(live)
        open_ones = [generation for generation in live.generations if not generation.ended]
        outcome = live.outcome or _outcome(live, bool(open_ones))
        if outcome == "cancelled" and open_ones:
            self._counts.disconnected(max(open_ones, key=lambda g: (g.submitted > 0, len(g.generated))).phase)
        for generation in open_ones:
            self._drop(generation)
        self.pump()
        prompt_tokens = sum(len(sequence.prompt) for sequence in live.sequences)
        tokens = sum(len(generation.generated) for generation in live.generations)
        self._counts.finished(live.endpoint, outcome, self.clock() - live.arrived, prompt_tokens, tokens)

    def prefill_progress(self, live: GenerationHandle) -> PromptProgress | None:
        """How far the engine is with reading a request's prompt; None where it doesn't read one."""
        seqs = {g.seq for g in live.generations if g.seq in self.running and (not g.generated or g.cause)}
        reading = [prompt for prompt in self._snapshot.prompts if prompt.seq in seqs]
        return max(reading, key=lambda prompt: prompt.done, default=None)

    # ---------------------------------------------------------------- to the engine
    def feed(self, connection: EngineConnection, capacity: Capacity, loading_at: float) -> None:
        """This engine is ready for work. `loading_at`: when it had imported everything and began to load."""
        self._loading_at = loading_at
        self._connection = connection
        self._capacity = capacity
        self._feeding = True
        self._fed = self._calm_since = self.clock()
        self._snapshot = Snapshot()
        self._reclaimed = -math.inf
        self.pump()

    def hold(self) -> None:
        """Nothing more goes to this engine; what it still says is heard."""
        self._feeding = False

    def observe(self, snapshot: Snapshot) -> None:
        """A second has passed in the engine."""
        if snapshot.pressure != "calm" or self._snapshot.pressure != "calm":
            self._calm_since = self.clock()
        self._snapshot = snapshot
        if self._queue and snapshot.pressure in ("hold", "rotate"):
            self._ask_to_reclaim()
        self.pump()

    def _ask_to_reclaim(self) -> None:
        """A sequence waits for room: ask the engine to look whether it can make some. It costs it its idle prefixes."""
        now = self.clock()
        if self._feeding and self._connection is not None and now - self._reclaimed >= RECLAIM_SECONDS:
            self._reclaimed = now
            self._connection.send(messages.Reclaim(self._connection.epoch))

    def pump(self) -> None:
        """Submits whatever may start now. The only place where a sequence enters an engine."""
        if not self._feeding or not self.waiting or self._connection is None or self._connection.lost.done():
            return
        room = self._room()
        while (generation := self._next(room)) is not None:
            room.take(self._planned(generation), generation.length)
            self._submit(generation)

    def _room(self) -> Room:
        assert self._capacity is not None
        groups = self._snapshot.groups
        held = sum(g.kv_bytes for g in groups)
        needed = sum(g.real_bytes for g in groups)
        return Room(
            self._capacity,
            map(self._planned, self.running.values()),
            unread=max(map(_unread, self.running.values()), default=0),
            pressure=self._snapshot.pressure,
            calm=self.clock() - self._calm_since,
            padding=held / needed if needed else 1.0,
        )

    def _planned(self, generation: Generation) -> int:
        return self._outlook.length(generation.sequence, len(generation.generated))

    def _next(self, room: Room) -> Generation | None:
        """Those that are continued go first; while one is on probation no new one may muddle who is to blame."""
        if self._returning and not self._gives_way(self._returning[0]):
            head = self._returning[0]
            free = probation.may_start(head, self.running.values()) and self._has_settled(head)
            if free and room.holds(head.length, head.length):
                return self._returning.popleft()
            return None
        if not self._queue or self._tried is not None:
            return None
        head = self._queue[0]
        if head.cause in (None, "restart"):
            if room.admits_new(self._planned(head), head.length):
                return self._queue.popleft()
            return None
        if room.admits_preempted(head.length):
            return self._queue.popleft()
        return None

    def _gives_way(self, generation: Generation) -> bool:
        """One that runs apart lets the others go first, for as long as is fair."""
        has_others = bool(self.running or self._queue)
        return probation.runs_apart(generation.past) and has_others and self.clock() < generation.lost + TURN_SECONDS

    def _has_settled(self, generation: Generation) -> bool:
        """The engine has lived for long enough to be given this one. If not, it's looked at again when it has."""
        left = self._fed + probation.settle_seconds(generation.past) - self.clock()
        if left > 0 and self._settling is None:
            self._settling = asyncio.get_running_loop().call_later(left, self._settled)
        return left <= 0

    def _settled(self) -> None:
        self._settling = None
        self.pump()

    def _submit(self, generation: Generation) -> None:
        assert self._connection is not None
        generation.taken = False
        if not generation.submitted:
            generation.submitted = self.clock()
            self._counts.queue_time(generation.submitted - generation.live.arrived)
        if generation.cause is not None:
            self._note_waits(generation)
        if generation.past.trial:
            self._tried = generation
        if not self.running:
            self._busy_since = self.clock()
        self.running[generation.seq] = generation
        self._connection.send(
            messages.Submit(self._connection.epoch, generation.seq, generation.sequence, generation.generated)
        )

    def _note_waits(self, generation: Generation) -> None:
        """What one that comes back has waited for since it was lost."""
        generation.submitted_again = then = self.clock()
        parts = (("engine", self._loading_at), ("load", self._fed), ("admission", then))
        generation.waits.clear()
        after = generation.lost
        for part, until in parts:
            if until > after:
                generation.waits.append((part, until - after))
                after = until

    # ---------------------------------------------------------------- from the engine
    def taken(self, seq: int) -> None:
        """The engine has begun to work on one."""
        if (generation := self.running.get(seq)) is not None:
            generation.taken = True

    def steps(self, step: messages.Steps) -> None:
        """One loop iteration of the engine: beginnings, a token for each row, ends."""
        self._router.deliver(step, self.running)
        for end in step.ends:
            self._finish(end)
        self._router.save()
        if self._tried is not None or self._returning:
            self._advance()

    def _finish(self, end: messages.End) -> None:
        generation = self.running.pop(end.seq, None)
        if generation is None:
            return
        self._router.finish(generation, end.finish)
        self._end(generation)
        self._outlook.finished(len(generation.generated))
        self.pump()

    def _advance(self) -> None:
        """A sequence has delivered tokens: the one on probation may be off it, the next may have its turn."""
        if self._tried is not None and probation.has_proved_itself(self._tried):
            probation.release(self._tried)
            self._tried = None
        self.pump()

    def failed(self, failure: messages.RowFailure) -> None:
        """One row can't go on, and so its request can't."""
        if (generation := self.running.pop(failure.seq, None)) is None:
            return
        self._end(generation)
        kind = _FAILURES.get(failure.kind, GenerationError)
        self.fail(generation.live, kind(failure.message))

    def preempted(self, seq: int) -> None:
        """One row gave its memory back: it's next, once there is room."""
        if (generation := self.running.pop(seq, None)) is None:
            return
        if generation is self._tried:
            self._tried = None
        self._lost(generation, "preemption")
        self._outlook.preempted(len(generation.generated))
        self._queue.appendleft(generation)
        log.info("sequence %d gave its memory back after %d tokens and waits", seq, len(generation.generated))

    # ---------------------------------------------------------------- the engine is gone
    def take_back(self, cause: Cause, *, planned: bool) -> list[Generation]:
        """The engine is lost: all that ran in it will be continued, except those returned, which have to end."""
        lost = list(self.running.values())
        was_fed = self._connection is not None
        self.running.clear()
        self._connection = None
        self._feeding = False
        self._tried = None
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
        for generation in lost:
            self._lost(generation, cause)
        ended = []
        if was_fed and not planned:
            ended = self._judge(lost, stalled=cause == "stall")
        self._returning = deque(probation.order([*lost, *self._returning]))
        return ended

    def _judge(self, lost: Sequence[Generation], *, stalled: bool) -> list[Generation]:
        """Those that the engine hadn't begun with had no more part in its death than those that waited."""
        aboard = [generation for generation in lost if generation.taken]
        absent = [*(generation for generation in lost if not generation.taken), *self._returning]
        return probation.record_death(aboard, stalled=stalled, age=self.clock() - self._fed, absent=absent)

    def _lost(self, generation: Generation, cause: Cause) -> None:
        if generation.cause is None:
            generation.lost = self.clock()
        generation.cause = cause
        generation.survived += 1

    def fail_running(self, error: RequestError) -> None:
        """Whatever is in the engine ends with this error; those that wait go on waiting."""
        for live in {generation.live for generation in self.running.values()}:
            self._fail(live, error)


def _unread(generation: Generation) -> int:
    """Tokens that its engine may still have to read before it draws."""
    if generation.cause is not None or not generation.generated:
        return generation.length
    return 0


def _outcome(live: GenerationHandle, unfinished: bool) -> str:
    if live.error is not None:
        return "error"
    if unfinished:
        return "cancelled"
    return live.generations[0].reason or "stop"  # a choice that was cancelled alone met its stop string
