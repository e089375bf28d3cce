"""When an engine counts as stuck, stopped or late, and when the server only didn't listen. In no time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fake_engine import FakeEngine
from supervising import collect, endless, first_tokens, sequence, supervise, until
from virtual_time import Loop, played

from server.engine.durations import KEPT, Durations
from server.ipc.snapshot import Snapshot
from server.supervision import liveness
from server.supervision.timeouts import LONGEST_STALL, StallLimit


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine(progress_seconds=1.0)


def thresholds(supervisor) -> list[float]:
    return [act.threshold for act in supervisor.engine.actions if act.action == "kill_stalled"]


# ---------------------------------------------------------------- the stall limit
@pytest.mark.parametrize(
    ("typical", "first", "limit"),
    [(0.0, False, 10), (0.3, False, 10), (2.0, False, 40), (100.0, False, 600), (2.0, True, 200), (100.0, True, 600)],
)
def test_the_stall_limit_follows_what_steps_usually_take_and_is_capped(typical, first, limit):
    snapshot = Snapshot(typical_step_seconds=typical, first_shape=first)
    assert StallLimit(10).seconds(snapshot) == limit
    assert StallLimit(10).seconds(None) == 10


def test_a_limit_that_is_set_above_the_cap_holds():
    assert StallLimit(2 * LONGEST_STALL).seconds(Snapshot(typical_step_seconds=100)) == 2 * LONGEST_STALL


def test_a_stall_limit_doubles_from_the_second_stall_in_a_row_on():
    stall = StallLimit(10)
    assert [stall.killed() for _ in range(3)] == [False, True, True]
    assert stall.seconds(None) == 40
    stall.worked(21, None)
    assert stall.seconds(None) == 10


def test_one_pause_is_no_typical_step():
    durations = Durations()
    for seconds in [0.01] * KEPT + [3.0]:
        durations.enter("step", 4)
        durations.leave(seconds)
    durations.enter("step", 4)
    assert durations.usual == 0.01


def test_what_is_slow_as_a_rule_is_usual():
    durations = Durations()
    for seconds in [0.01] * 100 + [3.0] * KEPT:
        durations.enter("step", 4)
        durations.leave(seconds)
    durations.enter("step", 4)
    assert durations.usual == 3.0


def test_chunks_and_steps_and_their_sizes_are_kept_apart():
    durations = Durations()
    for kind, size, seconds in [("step", 1, 0.01), ("chunk", 2048, 5.0), ("chunk", 64, 0.2)] * 3:
        durations.enter(kind, size)
        durations.leave(seconds)
    usual = {}
    for kind, size in [("step", 1), ("step", 2), ("chunk", 2048), ("chunk", 64), ("chunk", 512)]:
        durations.enter(kind, size)
        usual[kind, size] = durations.usual, durations.is_first
    assert usual["step", 1] == (0.01, False)
    assert usual["step", 2] == (0.01, True)
    assert usual["chunk", 2048] == (5.0, False)
    assert usual["chunk", 64] == (0.2, False)
    assert usual["chunk", 512] == (0.2, True)


def test_a_first_run_that_was_slow_is_forgotten_with_the_second():
    durations = Durations()
    for seconds in (8.0, 0.1):
        durations.enter("chunk", 2048)
        durations.leave(seconds)
    durations.enter("chunk", 2048)
    assert durations.usual == 0.1


@pytest.mark.parametrize(("typical", "first", "limit"), [(0.0, False, 5), (1.0, False, 20), (0.0, True, 25)])
@played
async def test_a_stuck_engine_is_replaced_at_its_limit(fake, counts, typical, first, limit):
    fake.typical_step, fake.first_shape = typical, first
    async with supervise(fake, counts) as supervisor:
        async with supervisor.open([endless()], endpoint="chat") as live:
            await first_tokens(live)
            await asyncio.sleep(1.5)  # a report has said so
            fake.stall()
            await asyncio.sleep(limit - 0.5)
            assert supervisor.engine.restarts == 0
            await until(lambda: supervisor.engine.restarts == 1, 1)
        assert thresholds(supervisor) == [limit]


@played
async def test_the_time_that_an_engine_is_stuck_for_isnt_time_that_it_worked(fake, counts):
    """After two stalls the limit is twice as long until an engine has worked well; standing still isn't work."""
    async with supervise(fake, counts) as supervisor:
        async with supervisor.open([endless()], endpoint="chat") as live:
            for count in (1, 2, 3):
                await first_tokens(live)
                await asyncio.sleep(5)  # of work: not twice the limit
                fake.stall()
                await until(lambda count=count: supervisor.engine.restarts == count and supervisor.is_ready, 30)
        assert thresholds(supervisor) == [5, 5, 10]


@played
async def test_an_engine_that_has_worked_well_brings_the_usual_stall_limit_back(fake, counts):
    """However long the raised one was."""
    async with supervise(fake, counts) as supervisor:
        async with supervisor.open([endless()], endpoint="chat") as live:
            for count in (1, 2, 3, 4):
                await first_tokens(live)
                fake.stall()
                await until(lambda count=count: supervisor.engine.restarts == count and supervisor.is_ready, 60)
            await first_tokens(live)
            await asyncio.sleep(12)
            fake.stall()
            await until(lambda: supervisor.engine.restarts == 5, 10)
        assert thresholds(supervisor) == [5, 5, 10, 20, 5]


@played
async def test_an_idle_engine_is_never_stuck(fake, counts):
    async with supervise(fake, counts) as supervisor:
        await asyncio.sleep(100)
        assert supervisor.engine.restarts == 0


# ---------------------------------------------------------------- heartbeats
@played
async def test_an_idle_engine_that_is_stopped_isnt_called_ready_and_is_replaced(fake, counts):
    async with supervise(fake, counts, stall_seconds=60) as supervisor:
        await asyncio.sleep(3)
        fake.freeze()
        await asyncio.sleep(liveness.SILENT_SECONDS + 0.3)
        assert not supervisor.is_ready
        assert not supervisor.engine.is_up
        assert supervisor.down_reason == "the engine gives no sign of life"
        await until(lambda: supervisor.engine.epoch == 2 and supervisor.is_ready, liveness.IDLE_SECONDS)
        assert supervisor.down_reason is None
        assert thresholds(supervisor) == [liveness.IDLE_SECONDS]


@played
async def test_an_engine_that_took_long_to_load_is_given_more_time_before_it_is_replaced(fake, counts):
    fake.load_seconds = 100
    async with supervise(fake, counts, stall_seconds=60, start_seconds=300) as supervisor:
        fake.freeze()
        await until(lambda: not supervisor.is_ready)
        await asyncio.sleep(20)
        assert supervisor.engine.restarts == 0
        await until(lambda: supervisor.engine.restarts == 1)
        assert thresholds(supervisor) == [25]


@pytest.mark.parametrize("since", [0.1, 1.0, 3.0])
@played
async def test_a_request_to_a_stopped_engine_doesnt_pay_the_stall_limit(fake, counts, since):
    loop, s = asyncio.get_running_loop(), sequence()
    async with supervise(fake, counts, stall_seconds=60) as supervisor:
        await asyncio.sleep(3)
        fake.freeze()
        await asyncio.sleep(since)
        began = loop.time()
        assert await collect(supervisor.open([s], endpoint="chat"), 100) == [fake.expected(s)]
        assert loop.time() - began < liveness.IDLE_SECONDS + 1
        assert supervisor.engine.restarts == 1


@played
async def test_an_engine_that_stopped_for_a_moment_is_ready_again_at_its_next_sign_of_life(fake, counts):
    async with supervise(fake, counts) as supervisor:
        fake.freeze()
        await until(lambda: not supervisor.is_ready)
        fake.thaw()
        await until(lambda: supervisor.is_ready, 1.5)
        s = sequence()
        assert await collect(supervisor.open([s], endpoint="chat")) == [fake.expected(s)]
        assert supervisor.engine.restarts == 0


@played
async def test_a_working_engine_that_is_stopped_has_the_stall_limit_and_shows_at_once(fake, counts):
    async with supervise(fake, counts, stall_seconds=60) as supervisor:
        async with supervisor.open([endless()], endpoint="chat") as live:
            await first_tokens(live, 5)
            fake.freeze()
            await asyncio.sleep(4)
            assert not supervisor.is_ready
            await asyncio.sleep(50)
            assert supervisor.engine.restarts == 0
            fake.thaw()
            await first_tokens(live, 500)
            assert supervisor.is_ready
            fake.freeze()
            await until(lambda: supervisor.engine.restarts == 1, 61)
        assert thresholds(supervisor) == [60]


@played
async def test_a_busy_engine_that_says_it_is_there_is_ready(fake, counts):
    """A long step is no silence."""
    fake.prefill_seconds = 4
    async with supervise(fake, counts) as supervisor, supervisor.open([endless()], endpoint="chat") as live:
        for _ in range(39):
            await asyncio.sleep(0.1)
            assert supervisor.is_ready
        await first_tokens(live)


# ---------------------------------------------------------------- starts
@pytest.mark.parametrize("stopped", [False, True])
@played
async def test_an_engine_that_isnt_ready_in_time_is_replaced(fake, counts, stopped):
    fake.starts = ["hang"]
    async with supervise(fake, counts, ready=False, start_seconds=100, stall_seconds=10) as supervisor:
        await asyncio.sleep(1)
        if stopped:
            fake.freeze()
        await asyncio.sleep(28)
        assert supervisor.engine.restarts == 0
        await until(lambda: supervisor.is_ready, 4 if stopped else 73)
        assert thresholds(supervisor) == [liveness.LOADING_SECONDS if stopped else 100]


# ---------------------------------------------------------------- the server itself stood still
@played
async def test_a_start_is_late_only_if_the_engine_is(fake, counts):
    """The server is stopped while the engine loads; when it goes on, the engine is long ready."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    fake.load_seconds = 6
    async with supervise(fake, counts, ready=False, start_seconds=10) as supervisor:
        await asyncio.sleep(5.9)
        loop.clock.now += 120
        await until(lambda: supervisor.is_ready, 1)
        assert supervisor.engine.restarts == 0


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("news", [False, True])
@played
async def test_a_server_that_stood_still_doesnt_blame_the_engine(fake, counts, busy, news):
    """Whether the engine went on meanwhile or the whole machine slept."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    fake.step_seconds = 0.1
    async with supervise(fake, counts) as supervisor:
        lives = [supervisor.open([endless()], endpoint="chat")] if busy else []
        for live in lives:
            await first_tokens(live)
        await asyncio.sleep(3.05)
        if news and busy:
            fake.burst(3)
        loop.clock.now += 3600
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert supervisor.is_ready
        for live in lives:
            await first_tokens(live, 5)
            live.close()
        assert supervisor.engine.restarts == 0


@pytest.mark.parametrize("how", ["ok", "die", "no_spawn"])
@pytest.mark.parametrize("pauses", [1, 3])
@played
async def test_answers_under_way_outlive_a_pause_of_the_server_in_an_outage(fake, counts, how, pauses):
    """In that time no engine could be started, whatever happened to the one that had just been lost."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    fake.load_seconds = 2
    wanted = sequence(max_tokens=60)
    async with supervise(fake, counts, outage_seconds=60) as supervisor:
        fake.starts = ["die@token:20", *[how] * 8, "ok"]
        fake.die()
        await until(lambda: supervisor.is_ready)
        collecting = asyncio.ensure_future(collect(supervisor.open([wanted], endpoint="chat"), 4000 * pauses))
        await until(lambda: supervisor.engine.restarts > 1)
        for _ in range(pauses):
            await asyncio.sleep(0.5)
            loop.clock.now += 3600
        assert await collecting == [fake.expected(wanted)]


def test_what_is_overdue_is_said_in_words():
    late = liveness.Overdue("start", 12.04, 10)
    assert late.words == "isn't ready after 12.0 s (start limit 10.0 s)"
    assert replace(late, what="silence").words == "hasn't been heard of for 12.0 s (limit 10.0 s)"
    assert replace(late, what="stall").words == "hasn't moved for 12.0 s (stall limit 10.0 s)"
