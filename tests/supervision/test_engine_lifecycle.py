"""Planned ends of an engine, against a scripted one. Deaths are in test_deaths."""

from __future__ import annotations

import asyncio

import pytest
from supervising import Recorded, collect, endless, sequence, supervise, until
from virtual_time import played

from server.errors import (
    GenerationError,
)
from server.ipc import messages
from server.supervision import engine_lifecycle


async def test_a_rotation_is_a_planned_seam_and_never_two_engines(fake, counts):
    s = [sequence(i, max_tokens=400) for i in range(4)]
    async with supervise(fake, counts) as supervisor:
        spawn, alive = fake.spawn, []
        supervisor._engines._spawn = lambda epoch: (alive.append(fake.alive), spawn(epoch))[1]
        tasks = [asyncio.create_task(collect(supervisor.open([x], endpoint="chat"))) for x in s]
        for epoch in (1, 2, 3, 4):
            await until(lambda e=epoch: fake.life.epoch == e and len(fake.rows) == 4)
            await until(lambda: all(row.produced > 5 for row in fake.rows.values()))
            fake.rotate()
        assert [t for [t] in await asyncio.gather(*tasks)] == [fake.expected(x) for x in s]
        assert alive == [0, 0, 0, 0]
        assert [a.action for a in supervisor.engine.actions] == ["rotate"] * 4
        assert (supervisor.engine.actions[0].reading, supervisor.engine.actions[0].threshold) == (490_000, 480_000)
    assert set(counts.of("engine_restarted")) == {("rotation",)}
    assert counts.of("action") == [("rotate",)] * 4
    assert len(counts.of("resumed")) == 16


async def test_rotations_put_no_generation_on_probation(fake, counts):
    async with supervise(fake, counts) as supervisor:
        lives = [supervisor.open([endless(i)], endpoint="chat") for i in range(3)]
        for epoch in range(2, 14):
            fake.rotate()  # before anybody may have moved
            await until(lambda e=epoch: supervisor.engine.epoch == e and supervisor.is_ready)
        pasts = [live.generations[0].past for live in lives]
        assert all(past.deaths == past.blamed == past.trial == 0 for past in pasts)
        for live in lives:
            live.close()


async def test_three_rotations_too_soon_end_with_an_error_that_names_the_leak(fake, counts, caplog):
    async with supervise(fake, counts, rotate_min_seconds=60.0, max_rows=1) as supervisor:
        leaking = supervisor.open([endless()], endpoint="chat")
        s = sequence()
        waiting = asyncio.create_task(collect(supervisor.open([s], endpoint="chat")))
        for epoch in (1, 2, 3):
            await until(lambda e=epoch: fake.life.epoch == e and fake.rows and supervisor.is_ready)
            fake.rotate()
        with pytest.raises(GenerationError, match=r"leak: live buffers at 490000, threshold 480000"):
            await collect(leaking)
        assert await waiting == [fake.expected(s)]


async def test_what_is_no_leak_may_replace_engines_as_often_as_it_likes(fake, counts):
    async with supervise(fake, counts, rotate_min_seconds=60.0) as supervisor:
        s = sequence(max_tokens=300)
        task = asyncio.create_task(collect(supervisor.open([s], endpoint="chat")))
        for epoch in (1, 2, 3, 4):
            await until(lambda e=epoch: fake.life.epoch == e and fake.rows and supervisor.is_ready)
            fake.rotate(is_leak=False)
        assert await task == [fake.expected(s)]


@played
async def test_an_engine_that_doesnt_leave_is_made_to(fake, counts):
    fake.drain_hangs, fake.step_seconds = True, 0.05
    s = sequence(max_tokens=300)
    async with supervise(fake, counts) as supervisor:
        task = asyncio.create_task(collect(supervisor.open([s], endpoint="chat")))
        await until(lambda: fake.rows)
        fake.rotate()
        assert await task == [fake.expected(s)]
        assert supervisor.engine.restarts == 1
    assert counts.of("engine_restarted") == [("rotation",)]


# ---------------------------------------------------------------- faults of the server's own
@played
async def test_engines_are_watched_whatever_a_look_at_something_else_raises(fake, counts, caplog):
    def spawn(epoch):
        if epoch == messages.NO_EPOCH:
            raise MemoryError
        return fake.spawn(epoch)

    s = sequence(max_tokens=2000)
    async with supervise(None, counts, spawn=spawn, spare_engine=True) as supervisor:
        await asyncio.sleep(engine_lifecycle.SETTLED_SECONDS + 2.0)
        task = asyncio.create_task(collect(supervisor.open([s], endpoint="chat"), 60))
        await until(lambda: fake.rows)
        fake.stall()
        assert await task == [fake.expected(s)]
    assert counts.of("engine_restarted") == [("stall",)]
    assert caplog.text.count("looking at the spare engine failed") == 1


async def test_a_fault_after_a_death_leaves_no_second_engine(fake, counts):
    def fail(snapshot):
        raise ValueError("no such metric")

    s = sequence(max_tokens=400)
    async with supervise(fake, counts) as supervisor:
        supervisor.on_engine_gone.append(fail)
        task = asyncio.create_task(collect(supervisor.open([s], endpoint="chat"), 30))
        await until(lambda: fake.rows and supervisor.engine.snapshot)
        first = fake.life
        killed = []
        first.kill = lambda: killed.append(len(fake.lives))
        fake.close()
        await until(lambda: len(fake.lives) == 2, 10)
        assert killed == [1]
        assert await task == [fake.expected(s)]


async def test_a_fault_in_handling_a_message_loses_no_token(fake):
    class Failing(Recorded):
        def first_token(self, *reported):
            self.calls.append(("first_token", reported))
            if len(self.of("first_token")) == 3:
                raise ValueError("no such metric")

    failing = Failing()
    s = [sequence(i, max_tokens=60) for i in range(8)]
    async with supervise(fake, failing) as supervisor:
        tasks = [asyncio.create_task(collect(supervisor.open([x], endpoint="chat"))) for x in s]
        assert [t for [t] in await asyncio.gather(*tasks)] == [fake.expected(x) for x in s]
    assert failing.of("engine_restarted") == [("crash",)]
