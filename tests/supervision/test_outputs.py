"""What a reader gets of an engine's news, also when many are at once."""

from __future__ import annotations

import asyncio
import os
import random
import time

import pytest
from supervising import collect, endless, sequence, supervise, until

from server.errors import (
    QueueFull,
    RequestError,
)
from server.supervision.supervisor import Supervisor


# ---------------------------------------------------------------- what a reader gets
async def test_tokens_come_in_order_and_end_with_a_reason(fake, counts):
    async with supervise(fake, counts) as supervisor:
        s = sequence()
        assert await collect(supervisor.open([s], endpoint="chat")) == [fake.expected(s)]
    assert counts.of("finished")[0][:2] == ("chat", "length")
    assert counts.of("finished")[0][3:] == (3, 40)
    assert counts.sum("generated") == 40
    assert counts.sum("inter_token") == 39
    assert len(counts.of("first_token")) == len(counts.of("queue_time")) == len(counts.of("decode_time")) == 1
    assert counts.of("prompt") == [(3, 0)]


async def test_a_drawn_stop_id_is_delivered_with_the_reason_stop(fake, counts):
    s = sequence()
    stop = fake.expected(s)[5]
    async with supervise(fake, counts) as supervisor:
        [tokens] = await collect(supervisor.open([sequence(stop_ids=[stop])], endpoint="chat"))
    assert tokens == fake.expected(s)[:6]
    assert counts.of("finished")[0][1] == "stop"


async def test_choices_are_read_under_their_index_and_count_as_one_request(fake, counts):
    choices = [sequence(choice=i, max_tokens=20 + i) for i in range(3)]
    async with supervise(fake, counts) as supervisor:
        assert await collect(supervisor.open(choices, endpoint="chat")) == [fake.expected(s) for s in choices]
    assert len(counts.of("finished")) == len(counts.of("first_token")) == 1
    assert len(counts.of("queue_time")) == 3


async def test_logprobs_stay_aligned_with_their_tokens(fake, counts):
    async with supervise(fake, counts) as supervisor, supervisor.open([sequence(logprobs=1)], endpoint="chat") as live:
        while not live.done:
            for _, delta in await live.read(5):
                assert [entry.top[0][0] for entry in delta.logprobs] == delta.tokens
                await asyncio.sleep(0.003)


async def test_cached_tokens_come_with_the_first_news_only(fake, counts):
    async with supervise(fake, counts) as supervisor, supervisor.open([sequence()], endpoint="chat") as live:
        cached = []
        while not live.done:
            cached += [delta.cached for _, delta in await live.read(5)]
            if len(cached) == 2:
                fake.die()
    assert cached[0] == 0
    assert set(cached[1:]) == {None}


async def test_a_slow_reader_gets_fewer_and_larger_news_and_holds_no_other(fake, counts):
    fake.step_seconds = 0
    async with supervise(fake, counts) as supervisor:
        slow = supervisor.open([sequence(max_tokens=500)], endpoint="chat")
        quick = sequence(9, max_tokens=500)
        assert await collect(supervisor.open([quick], endpoint="chat")) == [fake.expected(quick)]
        async with slow:
            [(_, delta)] = await slow.read(5)
        assert delta.tokens == fake.expected(slow.sequences[0])
        assert delta.finish == "length"


async def test_news_of_one_message_wake_a_reader_once(fake, counts):
    fake.step_seconds = 60
    choices = [endless(choice=i) for i in range(4)]
    async with supervise(fake, counts) as supervisor, supervisor.open(choices, endpoint="chat") as live:
        await until(lambda: len(fake.rows) == 4 and all(row.produced for row in fake.rows.values()))
        await live.read(5)
        fake.burst(3)
        news = await live.read(5)
        assert [index for index, _ in news] == [0, 1, 2, 3]
        assert [len(delta.tokens) for _, delta in news] == [3, 3, 3, 3]


async def test_silence_is_an_empty_read_each_time(fake, counts):
    fake.prefill_seconds = 60
    async with supervise(fake, counts) as supervisor, supervisor.open([sequence()], endpoint="chat") as live:
        for seconds in (0.05, 0.01, 0.03):
            began = time.monotonic()
            assert await live.read(seconds) == []
            assert seconds <= time.monotonic() - began < seconds + 0.5


async def test_reading_past_the_end_is_a_mistake_that_shows(fake, counts):
    async with supervise(fake, counts) as supervisor, supervisor.open([sequence()], endpoint="chat") as live:
        while not live.done:
            await live.read(5)
        with pytest.raises(RuntimeError, match="read to their end"):
            await live.read(5)


# ---------------------------------------------------------------- many at once
async def test_no_generation_is_left_after_many_disconnects(fake, counts):
    chance = random.Random(5)
    before, tasks_before = len(os.listdir("/dev/fd")), len(asyncio.all_tasks())

    async def visit(supervisor: Supervisor) -> None:
        try:
            async with supervisor.open([sequence(max_tokens=20)], endpoint="chat") as live:
                for _ in range(chance.randrange(4)):
                    if not live.done:
                        await live.read(chance.random() * 0.01)
        except RequestError as error:
            assert isinstance(error, QueueFull)  # noqa: PT017

    async with supervise(fake, counts, max_rows=4, queue_limit=64) as supervisor:
        for _ in range(10):
            await asyncio.gather(*[visit(supervisor) for _ in range(50)])
        await until(lambda: not fake.rows)
        assert supervisor.running == supervisor.waiting == 0
        assert not supervisor._scheduler.lives
    await asyncio.sleep(0.01)
    assert len(os.listdir("/dev/fd")) == before
    assert len(asyncio.all_tasks()) == tasks_before
    assert len(counts.of("finished")) <= 500
