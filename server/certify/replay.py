"""A replay: one plan of rows that come and go, played in Marathon's own loop or in mlx-lm's BatchGenerator.

Owns the plan, the readings taken while it is played, and the two stages. Runs in the main thread of a process of its
own (`marathon certify`, load tests, tests), never in a server or in a serving engine. The loop is the engine's, whole:
only the other end of its channel is replaced, by a script that speaks when the long row has come to the next line.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.generate import BatchGenerator

from server.cache_guard import cache_arrays, census, pending_leaves
from server.certify.certificate import GRAPHS
from server.engine.channel import Channel, Heartbeat
from server.engine.loop import Loop
from server.engine.model import LoadedModel
from server.errors import one_line
from server.faults import Faults, parse
from server.ipc.messages import Command, Drain, Event, RowFailure, Start, Steps, Submit
from server.ipc.sequence import Sampling, TokenSequence
from server.ipc.snapshot import Finding, Snapshot
from server.memory.pressure import Fit, Slope
from server.memory.residency import CountSource, NoCount, Residency
from server.settings import Settings, from_json

EVERY = 40  # steps between two arrivals
STAY = 44  # tokens of the first short row of an arrival; the others stay longer, so that each leaves alone
APART = 2
FIRST = 20  # the step of the first arrival
PHASE = 15  # readings are taken so many steps after a multiple of EVERY, when no row comes or goes
LONG_PROMPT = 12
SHORT_PROMPT = 8
_FOREVER = 1 << 30


@dataclass(frozen=True, slots=True)
class Arrival:
    """A row that joins; `number` 0 is the long one, which stays to the end."""

    number: int
    prompt: list[int]
    tokens: int

    @property
    def sequence(self) -> TokenSequence:
        return TokenSequence(self.prompt, Sampling(seed=self.number, temperature=0), self.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """One long row, and `rows` - 1 short ones that join together every 40 steps and leave one by one.

    At every reading the same number of rows is there, so whatever grows from reading to reading has no owner.
    """

    steps: int
    rows: int = 3
    vocabulary: int = 512

    def prompt(self, number: int) -> list[int]:
        """Token ids, none of them a control token; no neighbour begins alike."""
        length = LONG_PROMPT
        if number:
            length = SHORT_PROMPT
        ids = self.vocabulary - 8
        return [(7 * number + 3 * i) % ids + 8 for i in range(length)]

    def arrivals(self) -> Iterator[tuple[int, list[Arrival]]]:
        """(step, rows that join then), without end."""
        yield 0, [Arrival(0, self.prompt(0), _FOREVER)]
        step = FIRST
        number = 1
        while True:
            rows = range(number, number + self.rows - 1)
            yield step, [Arrival(n, self.prompt(n), STAY + APART * (n - number)) for n in rows]
            step += EVERY
            number += self.rows - 1


@dataclass(frozen=True, slots=True)
class BufferSample:
    """What was held at a step of the long row: live buffers, and bytes beyond those of the caches."""

    step: int
    buffers: int
    unexplained: int


@dataclass(slots=True)
class Run:
    """What playing a plan gave."""

    readings: list[BufferSample] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)  # token ids by row number
    growing: list[Finding] = field(default_factory=list)  # fields whose graphs grew, with their newest count
    failed: str = ""  # why it couldn't be played to the end
    snapshot: Snapshot = field(default_factory=Snapshot)  # the loop's own figures

    @property
    def step(self) -> int:
        return len(self.texts.get(0, []))

    def fit(self, upto: int | None = None) -> Fit | None:
        """Buffers a step over the last two thirds of the readings, or of those up to a step."""
        return _fit([(r.step, r.buffers) for r in self._kept(upto)])

    def fit_bytes(self, upto: int | None = None) -> Fit | None:
        """Bytes a step that the caches' own growth doesn't explain."""
        return _fit([(r.step, r.unexplained) for r in self._kept(upto)])

    def baseline(self, upto: int | None = None) -> float:
        """Buffers at step 0, on the fitted line."""
        kept = self._kept(upto)
        fit = self.fit(upto)
        assert fit is not None
        return sum(r.buffers - fit.slope * r.step for r in kept) / len(kept)

    def reached(self, limit: int) -> float | None:
        """The step at which the count came to `limit`, by a straight line between readings."""
        for before, after in zip(self.readings, self.readings[1:], strict=False):
            if before.buffers < limit <= after.buffers:
                share = (limit - before.buffers) / (after.buffers - before.buffers)
                return before.step + share * (after.step - before.step)
        return None

    def _kept(self, upto: int | None) -> list[BufferSample]:
        readings = [r for r in self.readings if upto is None or r.step <= upto]
        return readings[len(readings) // 3 :]


def _fit(points: list[tuple[int, int]]) -> Fit | None:
    slope = Slope(points=len(points) + 1, spacing=0)
    for step, value in points:
        slope.add(step, value, step)
    return slope.fit


class Gauge:
    """Reads what a run holds: settled live buffers, or where there is no count the leaves of the graphs behind the
    caches. Takes its readings into `run` and says which fields' graphs grow."""

    def __init__(self, source: CountSource, on_reading: Callable[[Run], None] = lambda run: None) -> None:
        self._source = source
        self._on_reading = on_reading

    @property
    def name(self) -> str:
        if self._source.limit is None:
            return GRAPHS
        return self._source.name

    def read(self, run: Run, caches: list[Any]) -> None:
        mx.synchronize()
        mx.clear_cache()
        arrays = cache_arrays(caches)
        count = self._source.settled()
        held = mx.get_active_memory() - sum(array.nbytes for array in arrays)
        run.readings.append(BufferSample(run.step, pending_leaves(arrays) if count is None else count, held))
        if len(run.readings) in (2, 4):  # early, while the graphs are small enough to be counted quickly
            self.compare(run, census(caches))
        self._on_reading(run)

    @staticmethod
    def compare(run: Run, found: list[Finding]) -> None:
        """What is pending at the first census may be a step behind and no more; what then has grown is a chain."""
        if len(run.readings) == 2:
            run.growing = found
            return
        before = {(f.layer, f.cache, f.field): f.count for f in run.growing}
        run.growing = [f for f in found if f.count > before.get((f.layer, f.cache, f.field), 0)]


def _ended(plan: Plan) -> Callable[[Run], bool]:
    return lambda run: run.step >= plan.steps


class _Script(Channel):
    """The loop's channel without a socket: its commands come from the plan, its events go into the run."""

    def __init__(self, plan: Plan, run: Run, on_reading: Callable[[], None], ended: Callable[[Run], bool]) -> None:
        self._run = run
        self._on_due = on_reading
        self._ended = ended
        self._arrivals = plan.arrivals()
        _, (long,) = next(self._arrivals)
        self._first: Command | None = Submit(1, long.number, long.sequence)
        self._next = next(self._arrivals)
        self._due = PHASE

    def receive(self, timeout: float | None) -> Command | None:
        """Asked for while no row is there: at the beginning, which is the long row's, and when that row has failed."""
        command = self._first
        self._first = None
        return command or Drain(1)

    def received(self) -> Iterator[Command]:
        return iter(self._commands())

    def _commands(self) -> list[Command]:
        step = self._run.step
        if step >= self._due:
            self._on_due()
            self._due += EVERY
        if self._ended(self._run):
            return [Drain(1)]
        commands: list[Command] = []
        while step >= self._next[0]:
            commands += [Submit(1, row.number, row.sequence) for row in self._next[1]]
            self._next = next(self._arrivals)
        return commands

    def send(self, event: Event) -> None:
        if isinstance(event, Steps):
            for number, token in zip(event.seqs, event.tokens, strict=True):
                self._run.texts.setdefault(number, []).append(token)
        elif isinstance(event, RowFailure):
            self._run.failed = self._run.failed or event.message


def play(plan: Plan, loaded: LoadedModel, gauge: Gauge, **values: Any) -> Run:
    """The plan in Marathon's own loop, with other settings if given; the user's environment has no say.

    Prefixes aren't kept, so that all that is held is held by rows. Prefill isn't held up and rows stay in one group,
    so that a slow machine plays no other run than a quick one: each way of grouping holds another number of buffers.
    """
    run = Run()
    fixed = {"prefix_cache": 0, "live_buffers": "off", "prefill_stall_ms": 60_000}
    probe = msgspec.structs.replace(loaded.probe, group_bytes=_FOREVER << 30)  # a second group never pays
    _perform(plan, replace(loaded, probe=probe), gauge, from_json(json.dumps(fixed | values)), run)
    _drop_garbage()
    return run


def _perform(plan: Plan, loaded: LoadedModel, gauge: Gauge, settings: Settings, run: Run) -> None:
    """The loop isn't closed but dropped: after `close` no MLX call works in this thread."""
    snapshot = run.snapshot
    channel = _Script(plan, run, lambda: gauge.read(run, loop.engine_state.caches()), _ended(plan))
    loop = Loop(
        channel,
        Heartbeat(channel, 1, snapshot),
        snapshot,
        Start(1, "", ""),
        settings,
        loaded,
        Residency(NoCount("read from outside"), settings, snapshot),  # it mustn't act on what is watched here
        Faults(parse(""), epoch=1, write_garbage=channel.send_garbage),
    )
    loop.run()


def play_mlx_lm(plan: Plan, loaded: LoadedModel, gauge: Gauge, ended: Callable[[Run], bool] | None = None) -> Run:
    """The same plan in mlx-lm's BatchGenerator, which may not be able to; on until `ended` if given."""
    run = Run()
    stream = mx.default_stream(mx.default_device())
    generator = BatchGenerator(loaded.model, completion_batch_size=_FOREVER, stream=stream)
    try:
        _generate(generator, plan, run, gauge, ended or _ended(plan))
    except Exception as error:  # whatever a cache or a model raises that can't be batched
        run.failed = one_line(error)
    generator.close()
    del generator
    _drop_garbage()
    return run


def _generate(generator: BatchGenerator, plan: Plan, run: Run, gauge: Gauge, ended: Callable[[Run], bool]) -> None:
    arrivals = plan.arrivals()
    due = PHASE
    at, rows = next(arrivals)
    while not ended(run):
        if run.step >= at:
            generator.insert([row.prompt for row in rows], [row.tokens for row in rows])
            at, rows = next(arrivals)
        _, responses = generator.next()
        for response in responses:
            run.texts.setdefault(response.uid, []).append(response.token)
        responses = response = None  # each holds a row of logprobs, and so the whole batch's
        if run.step >= due:
            gauge.read(run, [*generator._generation_batch.prompt_cache, *generator._prompt_batch.prompt_cache])
            due += EVERY


def _drop_garbage() -> None:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()


def caches_in_words(caches: Sequence[Any]) -> str:
    """`3 ArraysCache, 1 KVCache`."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(type(cache).__name__ for cache in caches).items())
