"""The server's own end: drain, and what becomes of answers under way."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from supervising import collect, endless, sequence, supervise, until

from server.errors import (
    Draining,
)
from server.ipc import messages
from server.supervision import engine_lifecycle


async def test_a_drain_takes_nothing_new_and_lets_the_rest_end(fake, counts):
    s = sequence(max_tokens=60)
    async with supervise(fake, counts, max_rows=1) as supervisor:
        tasks = [asyncio.create_task(collect(supervisor.open([s], endpoint="chat"))) for _ in range(2)]
        stop = asyncio.create_task(supervisor.stop(supervisor.clock() + 10))
        await asyncio.sleep(0)
        assert not supervisor.is_ready
        assert supervisor.down_reason == "the server is shutting down"
        with pytest.raises(Draining) as caught:
            supervisor.open([sequence()], endpoint="chat")
        assert caught.value.retry_after
        assert await asyncio.gather(*tasks) == [[fake.expected(s)]] * 2
        await stop
        assert fake.alive == 0


async def test_what_is_left_at_the_deadline_ends_with_an_error(fake, counts):
    async with supervise(fake, counts) as supervisor:
        task = asyncio.create_task(collect(supervisor.open([endless()], endpoint="chat")))
        await until(lambda: fake.rows)
        began = time.monotonic()
        await supervisor.stop(supervisor.clock() + 0.1)
        assert 0.1 <= time.monotonic() - began < 1
        with pytest.raises(Draining):
            await task
        assert [type(c) for c in fake.commands[-2:]] == [messages.Cancel, messages.Drain]


async def test_a_second_stop_brings_the_deadline_forward(fake, counts):
    async with supervise(fake, counts) as supervisor:
        task = asyncio.create_task(collect(supervisor.open([endless()], endpoint="chat")))
        first = asyncio.create_task(supervisor.stop(supervisor.clock() + 60))
        await asyncio.sleep(0.05)
        await supervisor.stop(supervisor.clock())
        await asyncio.wait_for(first, 1)
        with pytest.raises(Draining):
            await task


async def test_generations_survive_a_death_during_the_drain(fake, counts):
    s = sequence(max_tokens=300)
    async with supervise(fake, counts) as supervisor:
        task = asyncio.create_task(collect(supervisor.open([s], endpoint="chat")))
        await until(lambda: fake.rows)
        stop = asyncio.create_task(supervisor.stop(supervisor.clock() + 10))
        await asyncio.sleep(0.01)
        fake.die()
        assert await task == [fake.expected(s)]
        await stop


@pytest.mark.parametrize("moment", ["loading", "pausing", "stuck"])
async def test_a_stop_leaves_nothing_at_any_moment(fake, counts, moment, monkeypatch):
    monkeypatch.setattr(engine_lifecycle, "LEAVE_SECONDS", 0.05)
    before = len(os.listdir("/dev/fd"))
    if moment == "loading":
        fake.load_seconds = 60
    if moment == "pausing":
        fake.starts = ["die"] * 99
    fake.drain_hangs = moment == "stuck"
    async with supervise(fake, counts, ready=moment == "stuck") as supervisor:
        await asyncio.sleep(0.05)
        began = time.monotonic()
        await supervisor.stop(0)
        assert time.monotonic() - began < 1
        assert fake.alive == 0
    await asyncio.sleep(0.01)
    assert len(os.listdir("/dev/fd")) == before
