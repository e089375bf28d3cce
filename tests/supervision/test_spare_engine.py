"""The spare engine: when there is one, who takes it, and that nothing else notices it. Against scripted engines."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from fake_engine import FakeEngine, process_spawn
from supervising import collect, endless, first_tokens, sequence, supervise, until
from virtual_time import played

from server.ipc import messages
from server.supervision import engine_lifecycle, liveness, spare_engine
from server.supervision.engine_lifecycle import SETTLED_SECONDS, UNSETTLED_SECONDS

SOON = SETTLED_SECONDS + 2.0


async def spare_of(fake: FakeEngine, supervisor, seconds: float = SOON):
    await until(lambda: supervisor.engine.spare, seconds)
    [spare] = fake.spares
    return spare


@played
async def test_a_death_is_followed_by_the_engine_that_waited(fake, counts):
    s = sequence(max_tokens=400)
    async with supervise(fake, counts, spare_engine=True) as supervisor:
        spare = await spare_of(fake, supervisor)
        task = asyncio.create_task(collect(supervisor.open([s], endpoint="chat")))
        await until(lambda: counts.of("first_token"))
        fake.die()
        assert await task == [fake.expected(s)]
        assert fake.life is spare
        assert (supervisor.engine.epoch, supervisor.engine.restarts, supervisor.engine.pid) == (2, 1, spare.pid)
        assert counts.of("engine_restarted") == [("crash",)]
        assert await spare_of(fake, supervisor) is not spare


@played
async def test_a_rotation_takes_it_as_well(fake, counts):
    async with supervise(fake, counts, spare_engine=True) as supervisor:
        spare = await spare_of(fake, supervisor)
        fake.rotate()
        await until(lambda: supervisor.is_ready and supervisor.engine.epoch == 2)
        assert fake.life is spare
    assert counts.of("engine_restarted") == [("rotation",)]


@played
async def test_a_death_in_drain_takes_it_as_well(fake, counts):
    s = sequence(max_tokens=400)
    async with supervise(fake, counts, spare_engine=True) as supervisor:
        spare = await spare_of(fake, supervisor)
        task = asyncio.create_task(collect(supervisor.open([s], endpoint="chat")))
        await until(lambda: counts.of("first_token"))
        drain = asyncio.create_task(supervisor.stop(supervisor.clock() + 60))
        fake.die()
        assert await task == [fake.expected(s)]
        assert fake.life is spare
        await drain


@played
async def test_it_isnt_started_while_an_engine_loads_or_has_just_been_ready(fake, counts):
    fake.load_seconds = 4.0
    async with supervise(fake, counts, ready=False, spare_engine=True) as supervisor:
        await supervisor.wait_known()
        ready = supervisor.clock()
        await until(lambda: fake.spares, 60)
        assert SETTLED_SECONDS < supervisor.clock() - ready < SETTLED_SECONDS + 1


@played
async def test_it_waits_for_prompts_to_be_read_but_not_for_ever(fake, counts):
    fake.prefill_seconds = UNSETTLED_SECONDS + 10
    fake.prefill_chunks = 100
    async with supervise(fake, counts, spare_engine=True) as supervisor:
        ready = supervisor.clock()
        live = supervisor.open([endless()], endpoint="chat")
        await until(lambda: fake.spares, 2 * UNSETTLED_SECONDS)
        assert UNSETTLED_SECONDS < supervisor.clock() - ready < UNSETTLED_SECONDS + 1
        live.close()


@played
async def test_switched_off_there_is_none(fake, counts):
    async with supervise(fake, counts, spare_engine=False) as supervisor:
        await asyncio.sleep(10 * SOON)
        assert not fake.spares
        assert not supervisor.engine.spare


@played
async def test_one_that_isnt_prepared_yet_isnt_waited_for(fake, counts):
    fake.prepare_seconds = 60
    async with supervise(fake, counts, spare_engine=True) as supervisor:
        await until(lambda: fake.spares, SOON)
        [unready] = fake.spares
        fake.die()
        await until(lambda: supervisor.is_ready and supervisor.engine.epoch == 2, 1.0)
        assert fake.life is not unready
        assert unready.poll() is not None


@pytest.mark.parametrize("how", ["die", "garbage", "no_spawn", "hang"])
@played
async def test_one_that_cant_be_had_is_tried_again_later_and_nothing_else_notices(fake, counts, how, monkeypatch):
    monkeypatch.setattr(spare_engine, "PREPARE_SECONDS", 20.0)
    fake.spare_starts = [how] * 4
    async with (
        supervise(fake, counts, spare_engine=True) as supervisor,
        supervisor.open([endless()], endpoint="chat") as live,
    ):
        fake.step_seconds = 0.2
        await until(lambda: supervisor.engine.spare, SOON + 4 * 20 + 1 + 2 + 4 + 8 + 5)
        assert not fake.spare_starts
        await first_tokens(live, 5)
        assert (supervisor.engine.epoch, supervisor.engine.restarts, supervisor.is_ready) == (1, 0, True)
    assert not counts.of("engine_restarted")


@played
async def test_without_a_usable_one_the_next_engine_starts_from_nothing(fake, counts):
    fake.spare_starts = ["die"] * 100
    async with supervise(fake, counts, spare_engine=True) as supervisor:
        for epoch in (2, 3, 4):
            await asyncio.sleep(SOON)
            fake.die()
            await until(lambda e=epoch: supervisor.is_ready and supervisor.engine.epoch == e)
        assert [life.pid % 10 for life in fake.lives] == [1, 2, 3, 4]


@pytest.mark.parametrize("how", ["stopped", "dead"])
@played
async def test_one_that_no_longer_answers_costs_a_moment_and_no_more(fake, counts, how):
    async with supervise(fake, counts, spare_engine=True) as supervisor:
        spare = await spare_of(fake, supervisor)
        if how == "stopped":
            spare.moves.clear()
        else:
            spare.end(-9)
        fake.die()
        await until(lambda: supervisor.is_ready and supervisor.engine.epoch == 2, spare_engine.ANSWER_SECONDS + 0.5)
        assert fake.life is not spare
        assert spare.poll() is not None
        assert supervisor.engine.restarts == 1


@played
async def test_a_spare_that_dies_as_it_loads_is_a_death_like_any_other(fake, counts):
    s = sequence(max_tokens=100)
    async with supervise(fake, counts, spare_engine=True) as supervisor:
        await spare_of(fake, supervisor)
        fake.starts = ["die"]
        fake.die()
        assert await collect(supervisor.open([s], endpoint="chat")) == [fake.expected(s)]
        assert supervisor.engine.epoch == 3


@played
async def test_one_that_is_stopped_as_it_becomes_the_engine_is_given_up_soon(fake, counts, monkeypatch):
    take = spare_engine.SpareEngine.take

    async def taken_and_stopped(spares):
        process: Any = await take(spares)
        if process is not None:
            process.moves.clear()
        return process

    monkeypatch.setattr(spare_engine.SpareEngine, "take", taken_and_stopped)
    s = sequence(max_tokens=100)
    async with supervise(fake, counts, spare_engine=True, stall_seconds=60, start_seconds=600) as supervisor:
        spare = await spare_of(fake, supervisor)
        fake.die()
        began = supervisor.clock()
        assert await collect(supervisor.open([s], endpoint="chat")) == [fake.expected(s)]
        assert supervisor.clock() - began < liveness.FIRST_WORD_SECONDS + 2
        assert spare.poll() is not None


@played
async def test_the_end_of_the_server_doesnt_wait_for_a_spare_and_takes_none_with_it(fake, counts):
    async with supervise(fake, counts, spare_engine=True) as supervisor:
        spare = await spare_of(fake, supervisor)
        spare.moves.clear()
        fake.die()  # the spare is asked whether it answers, and then the server ends
        await until(lambda: not supervisor.is_ready)
        await supervisor.stop(0)
        assert spare.poll() is not None
        assert fake.alive == 0


async def test_a_spare_that_is_a_process_ends_with_the_server_and_is_taken_with_its_pid(counts, monkeypatch):
    monkeypatch.setattr(engine_lifecycle, "SETTLED_SECONDS", 0.0)
    descriptors = len(os.listdir("/dev/fd"))
    s, fake = sequence(max_tokens=400), FakeEngine()
    started: list[int] = []

    def spawn(epoch: int):
        process: Any = process_spawn()(epoch)
        if epoch == messages.NO_EPOCH:
            started.append(process.pid)
        return process

    async with supervise(None, counts, spawn=spawn, spare_engine=True) as supervisor:
        await until(lambda: supervisor.engine.spare)
        assert supervisor.engine.pid not in started
        task = asyncio.create_task(collect(supervisor.open([s], endpoint="chat")))
        await until(lambda: counts.of("first_token"))
        os.kill(supervisor.engine.pid, signal.SIGKILL)
        assert await task == [fake.expected(s)]
        assert supervisor.engine.pid == started[0]
        await until(lambda: supervisor.engine.spare)
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(os.listdir("/dev/fd")) == descriptors
