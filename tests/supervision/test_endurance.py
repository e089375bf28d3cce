"""Any sequence of deaths, pauses and drain_rate, at any boundary: every stream ends with exactly its tokens.

A story is a list of acts that hypothesis draws: requests that come and leave, engines that die now or will die at some
stage of their next lives, engines and servers that are stopped for a while, rotations, preemptions, pressure. It is
played against a scripted engine in virtual time, then everything is well again and all that is left must end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import virtual_time
from fake_engine import FakeEngine, Life
from hypothesis import given, settings
from hypothesis import strategies as st
from supervising import Recorded, sequence, supervise

from server.errors import GenerationError, NotReady, RequestError
from server.ipc import messages
from server.supervision.generation import GenerationHandle
from server.supervision.probation import MAX_BLAMED
from server.supervision.supervisor import Supervisor

HOUR = 3600.0
OUTAGE = 10 * HOUR  # no answer under way is given up in these stories
STALL = 30.0


@dataclass(eq=False)
class Stream:
    """One request and what its client got."""

    live: GenerationHandle
    got: list[list[int]]
    finished: list[bool]
    error: RequestError | None = None
    has_left: bool = False

    async def read(self) -> None:
        async with self.live as live:
            while not live.done and not self.has_left:
                try:
                    news = await live.read(1.0)
                except RequestError as error:
                    self.error = error
                    return
                for index, delta in news:
                    assert not self.finished[index], "something came after the end"
                    self.got[index] += delta.tokens
                    self.finished[index] = delta.finish is not None


@dataclass
class World:
    """What acts are played on."""

    fake: FakeEngine
    supervisor: Supervisor
    streams: list[Stream] = field(default_factory=list)
    readers: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def engine(self) -> Life | None:
        """The living one."""
        return self.fake.life if self.fake.lives and self.fake.alive else None

    def open(self, max_tokens: int, choices: int) -> None:
        number = len(self.streams)
        wanted = [sequence(number, choice, max_tokens=max_tokens, choice=choice) for choice in range(choices)]
        try:
            live = self.supervisor.open(wanted, endpoint="chat")
        except NotReady:
            return  # refused before any work: that costs nothing
        stream = Stream(live, [[] for _ in wanted], [False] * choices)
        self.streams.append(stream)
        self.readers.append(asyncio.create_task(stream.read()))


# ---------------------------------------------------------------- acts
Act = tuple[str, Any]
PLACES = ["hello", "ready", "submit", "taken", "prefill", *(f"token:{n}" for n in (1, 2, 3, 7, 30))]
STARTS = ["ok", "die", "hang", "garbage", "no_spawn", "load_failed", *(f"die@{place}" for place in PLACES)]
READY = ["ok", *(f"die@{place}" for place in PLACES[1:])]  # of a first engine: requests want one to have been there
DEATHS: dict[str, Callable[[FakeEngine], object]] = {
    "die": FakeEngine.die,
    "burst": lambda fake: fake.burst(3, then="die"),
    "tear": FakeEngine.tear,
    "garbage": FakeEngine.garbage,
    "close": FakeEngine.close,
    "stall": FakeEngine.stall,
    "freeze": FakeEngine.freeze,
    "thaw": FakeEngine.thaw,
    "rotate": FakeEngine.rotate,
    "preempt": lambda fake: fake.preempt() if len(fake.rows) > 1 else None,
}
# The same fate several times in a row, then another one: a shuffle would hardly ever hold four alike.
run = st.builds(lambda fate, times: [fate] * times, st.sampled_from(STARTS), st.integers(1, 9))
lives = (
    st.integers(2, 8)
    .flatmap(lambda count: st.lists(run, min_size=count, max_size=count))
    .map(lambda runs: list(itertools.chain.from_iterable(runs)))
)
seconds = st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 20.0])
act = st.one_of(
    st.tuples(st.just("open"), st.tuples(st.integers(1, 60), st.integers(1, 2))),
    st.tuples(st.just("wait"), seconds),
    st.tuples(st.just("next lives"), lives),
    st.tuples(st.just("engine"), st.sampled_from(sorted(DEATHS))),
    st.tuples(st.just("pressure"), st.sampled_from(["calm", "reclaim", "hold"])),
    st.tuples(st.just("server stands still"), seconds),
    st.tuples(st.just("leave"), st.integers(0, 20)),
)
pace = st.fixed_dictionaries(
    {
        "step_seconds": st.sampled_from([0.001, 0.05]),
        "load_seconds": st.sampled_from([0.0, 2.0]),
        "prefill_seconds": st.sampled_from([0.0, 0.5, 3.0]),
        "progress_seconds": st.just(1.0),
    }
)


async def play(world: World, what: str, how: Any) -> None:
    match what:
        case "open":
            world.open(*how)
        case "wait":
            await asyncio.sleep(how)
        case "next lives":
            world.fake.starts += how
        case "engine" if world.engine is not None and world.engine.is_ready:
            DEATHS[how](world.fake)
        case "pressure":
            world.fake.pressure = how
        case "server stands still":
            loop = asyncio.get_running_loop()
            assert isinstance(loop, virtual_time.Loop)
            loop.clock.now += how
        case "leave" if how < len(world.streams):
            world.streams[how].has_left = True
    await asyncio.sleep(0)


async def end(world: World) -> None:
    """Everything is well again, and all that is left comes to its end."""
    world.fake.starts, world.fake.pressure = [], "calm"
    if world.engine is not None:
        world.fake.thaw()
    if world.readers:
        _, left = await asyncio.wait(world.readers, timeout=HOUR)
        assert not left, f"{len(left)} streams wait for ever"
        for reader in world.readers:
            reader.result()
    assert world.supervisor.running == world.supervisor.waiting == 0


# ---------------------------------------------------------------- what must hold
def lives_without_a_token(world: World, generation: Any) -> int:
    """In how many engines in a row it was at the end without getting anything."""
    given = [c for c in world.fake.commands if isinstance(c, messages.Submit) and c.seq == generation.seq]
    lengths = [*(len(submit.generated) for submit in given), len(generation.generated)]
    grown = [after > before for before, after in itertools.pairwise(lengths)]
    return next((i for i, has_grown in enumerate(reversed(grown)) if has_grown), len(grown))


def check(world: World) -> None:
    for stream in world.streams:
        for generation, got, finished in zip(stream.live.generations, stream.got, stream.finished, strict=True):
            right = world.fake.expected(generation.sequence)
            assert got == right[: len(got)], "a token is lost, or there twice"
            if stream.error is None and not stream.has_left:
                assert finished
                assert got == right
        if isinstance(stream.error, GenerationError):
            assert max(lives_without_a_token(world, g) for g in stream.live.generations) > MAX_BLAMED
        elif isinstance(stream.error, NotReady):
            assert not any(generation.submitted for generation in stream.live.generations), "it was under way"
        else:
            assert stream.error is None


async def run_story(
    begin: list[tuple[int, int]], starts: list[str], spares: list[str], story: list[Act], speed: dict[str, float]
) -> None:
    fake = FakeEngine(**speed, starts=starts, spare_starts=spares)
    limits = {"stall_seconds": STALL, "start_seconds": 100.0, "outage_seconds": OUTAGE, "spare_engine": True}

    def spawn(epoch: int) -> Life:
        assert epoch == messages.NO_EPOCH or not fake.alive, "two engines at once"
        return fake.spawn(epoch)

    async with supervise(fake, Recorded(), spawn=spawn, **limits) as supervisor:
        world = World(fake, supervisor)
        for stream in begin:
            world.open(*stream)
        for what, how in story:
            await play(world, what, how)
        await end(world)
        check(world)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 2)), min_size=1, max_size=4),
    st.builds(lambda first, then: [first, *then], st.sampled_from(READY), lives),
    st.lists(st.sampled_from(["ok", "die", "hang", "garbage", "no_spawn"]), max_size=4),
    st.lists(act, min_size=5, max_size=40),
    pace,
)
def test_whatever_happens_no_token_is_lost_or_repeated_and_no_stream_waits_for_ever(
    begin, starts, spares, story, speed
):
    virtual_time.run(run_story(begin, starts, spares, story, speed))
