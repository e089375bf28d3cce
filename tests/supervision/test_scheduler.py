"""Cancelling, the queue, room, preemption, deadlines and the failure of one row, against a scripted engine."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import Poison
from supervising import collect, endless, first_tokens, sequence, supervise, until
from virtual_time import played

from server.errors import (
    ContextLengthError,
    ExceedsMemory,
    GenerationError,
    QueueFull,
    RequestTimeout,
)
from server.ipc import messages
from server.ipc.probe import LayerCost
from server.supervision import admission


# ---------------------------------------------------------------- cancelling
async def test_a_cancelled_choice_is_silent_and_the_others_go_on(fake, counts):
    choices = [endless(), sequence(9, max_tokens=60)]
    async with supervise(fake, counts) as supervisor, supervisor.open(choices, endpoint="chat") as live:
        await first_tokens(live)
        live.cancel(0)
        live.cancel(0)
        tokens: list[int] = []
        while not live.done:
            for index, delta in await live.read(5):
                assert index == 1
                tokens += delta.tokens
        assert fake.cancels == [live.generations[0].seq]
    assert counts.of("finished")[0][1] == "stop"
    assert not counts.of("disconnected")


async def test_a_disconnect_frees_the_row(fake, counts):
    async with supervise(fake, counts) as supervisor:
        async with supervisor.open([endless()], endpoint="chat") as live:
            await first_tokens(live)
        await until(lambda: not fake.rows)
    assert counts.of("disconnected") == [("decode",)]
    assert counts.of("finished")[0][1] == "cancelled"


async def test_a_disconnect_during_prefill_frees_the_row(fake, counts):
    fake.prefill_seconds = 0.05
    async with supervise(fake, counts) as supervisor:
        async with supervisor.open([endless()], endpoint="chat"):
            await until(lambda: fake.rows)
        await until(lambda: not fake.rows)
    assert counts.of("disconnected") == [("prefill",)]


async def test_a_disconnect_in_the_queue_leaves_it(fake, counts):
    async with supervise(fake, counts, max_rows=1) as supervisor, supervisor.open([endless()], endpoint="chat"):
        async with supervisor.open([endless()], endpoint="chat"):
            assert supervisor.waiting == 1
        assert supervisor.waiting == 0
        assert len(fake.submits) <= 1
    assert ("queued",) in counts.of("disconnected")


async def test_a_disconnect_during_a_resume_ends_it(fake, counts):
    async with supervise(fake, counts) as supervisor:
        async with supervisor.open([endless()], endpoint="chat") as live:
            await first_tokens(live)
            fake.loads.clear()
            fake.die()
            await until(lambda: not supervisor.is_ready)
            assert supervisor.waiting == 1
        assert supervisor.waiting == 0
        fake.loads.set()
        await until(lambda: supervisor.is_ready)
        assert len(fake.submits) == 1


async def test_a_cancelled_reader_cancels_its_request(fake, counts):
    async with supervise(fake, counts) as supervisor:
        task = asyncio.create_task(collect(supervisor.open([endless()], endpoint="chat")))
        await until(lambda: fake.rows)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: not fake.rows)
    assert counts.of("finished")[0][1] == "cancelled"


async def test_a_fault_in_the_reader_is_an_error_and_no_disconnect(fake, counts):
    async with supervise(fake, counts) as supervisor:
        with pytest.raises(ZeroDivisionError):
            async with supervisor.open([endless()], endpoint="chat"):
                raise ZeroDivisionError
        await until(lambda: not fake.rows)
    assert counts.of("finished")[0][1] == "error"
    assert not counts.of("disconnected")


# ---------------------------------------------------------------- one row's failure
async def test_news_before_an_error_are_read_before_it(fake, counts):
    async with supervise(fake, counts) as supervisor, supervisor.open([endless()], endpoint="chat") as live:
        await until(lambda: live.generations[0].generated)
        fake.fail_row(live.generations[0].seq)
        await until(lambda: live.error)
        assert (await live.read(5))[0][1].tokens
        with pytest.raises(GenerationError, match="the row broke"):
            await live.read(5)


async def test_one_rows_failure_is_that_rows(fake, counts):
    fake.poison[666] = Poison(2, "fail")
    s = sequence()
    async with supervise(fake, counts) as supervisor:
        bad = supervisor.open([endless(666), endless(8)], endpoint="chat")
        good = supervisor.open([s], endpoint="chat")
        results = await asyncio.gather(collect(bad), collect(good), return_exceptions=True)
        assert isinstance(results[0], GenerationError)
        assert results[1] == [fake.expected(s)]
        await until(lambda: not fake.rows)
        assert supervisor.engine.restarts == 0
    assert sorted(reported[1] for reported in counts.of("finished")) == ["error", "length"]


async def test_a_row_that_cant_go_on_for_memory_says_so(fake, counts):
    async with supervise(fake, counts) as supervisor, supervisor.open([endless()], endpoint="chat") as live:
        await until(lambda: fake.rows)
        fake.fail_row(live.generations[0].seq, "memory", "needs 12 bytes, the limit is 11")
        await until(lambda: live.error)
        with pytest.raises(ExceedsMemory, match=r"12 .* 11"):
            await first_tokens(live, 10**6)


# ---------------------------------------------------------------- admission, queue, preemption
@played
async def test_a_preempted_row_goes_on_when_there_is_room_and_calm(fake, counts):
    fake.step_seconds = 0.1
    a, b, c = (sequence(i, max_tokens=3000) for i in range(3))
    async with supervise(fake, counts) as supervisor:
        tasks = [asyncio.create_task(collect(supervisor.open([s], endpoint="chat"))) for s in (a, b)]
        await until(lambda: len(fake.rows) == 2 and all(row.produced > 3 for row in fake.rows.values()))
        seq = fake.preempt()
        await until(lambda: supervisor.waiting == 1)
        tasks.append(asyncio.create_task(collect(supervisor.open([c], endpoint="chat"))))
        fake.pressure = "reclaim"
        await asyncio.sleep(30)
        assert seq not in fake.rows
        fake.pressure = "calm"
        await asyncio.sleep(admission.CALM_SECONDS - 0.1)
        assert supervisor.waiting == 2  # calm, but not for long; none overtakes
        await until(lambda: len(fake.rows) == 3 and counts.of("resumed"))
        assert [s.seq for s in fake.submits[-2:]] == [seq, 3]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert counts.of("resumed")[0][0] == "preemption"
    assert not counts.of("action")


async def test_a_preempted_row_needs_no_calm_when_nothing_else_runs(fake, counts):
    a, b = sequence(1, max_tokens=60), sequence(2, max_tokens=600)
    async with supervise(fake, counts) as supervisor:
        tasks = [asyncio.create_task(collect(supervisor.open([s], endpoint="chat"))) for s in (a, b)]
        await until(lambda: len(fake.rows) == 2 and all(row.produced for row in fake.rows.values()))
        fake.preempt()
        assert [t for [t] in await asyncio.gather(*tasks)] == [fake.expected(a), fake.expected(b)]


async def test_pressure_holds_new_rows_and_asks_the_engine_to_free_what_it_can(fake, counts):
    s = sequence()
    async with supervise(fake, counts) as supervisor, supervisor.open([endless()], endpoint="chat") as live:
        await first_tokens(live)
        fake.pressure = "hold"
        await until(lambda: supervisor.engine.snapshot and supervisor.engine.snapshot.pressure == "hold")
        waiting = asyncio.create_task(collect(supervisor.open([s], endpoint="chat")))
        await until(lambda: any(isinstance(c, messages.Reclaim) for c in fake.commands))
        assert supervisor.waiting == 1
        fake.pressure = "calm"
        assert await waiting == [fake.expected(s)]


async def test_rows_wait_for_memory_in_the_order_they_came(fake, counts):
    fake.row_cost, fake.ready = [LayerCost(100, 0)], {"memory_limit": 1000 + 400}
    many = [sequence(i, max_tokens=30) for i in range(8)]
    async with supervise(fake, counts) as supervisor:
        lives = [supervisor.open([s], endpoint="chat") for s in many]
        assert (supervisor.running, supervisor.waiting) == (2, 6)
        assert [t for [t] in await asyncio.gather(*map(collect, lives))] == [fake.expected(s) for s in many]
        assert [s.seq for s in fake.submits] == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_a_full_queue_is_refused_and_says_when_to_come_back(fake, counts):
    async with supervise(fake, counts, max_rows=1, queue_limit=2) as supervisor:
        lives = [supervisor.open([endless()], endpoint="chat") for _ in range(3)]
        with pytest.raises(QueueFull, match="2 waiting") as caught:
            supervisor.open([sequence()], endpoint="chat")
        assert 1 <= int(caught.value.headers()["Retry-After"]) <= 60
        lives.pop().close()
        lives.append(supervisor.open([sequence()], endpoint="chat"))
        for live in lives:
            live.close()


async def test_without_a_queue_only_what_can_start_is_taken(fake, counts):
    async with supervise(fake, counts, max_rows=2, queue_limit=0) as supervisor:
        with pytest.raises(QueueFull):
            supervisor.open([endless(choice=i) for i in range(3)], endpoint="chat")
        live = supervisor.open([endless(choice=i) for i in range(2)], endpoint="chat")
        with pytest.raises(QueueFull):
            supervisor.open([sequence()], endpoint="chat")
        live.close()
        s = sequence()
        assert await collect(supervisor.open([s], endpoint="chat")) == [fake.expected(s)]


async def test_what_can_never_run_is_refused_before_any_work(fake, counts):
    fake.context = 50
    fake.row_cost, fake.ready = [LayerCost(0, 10)], {"memory_limit": 3000}
    async with supervise(fake, counts) as supervisor:
        with pytest.raises(ContextLengthError, match=r"\b50 tokens"):
            supervisor.open([sequence(*range(50))], endpoint="chat")
        with pytest.raises(ExceedsMemory, match=r"6120 .* 3000"):
            supervisor.open([sequence()], endpoint="chat")
        assert not fake.submits


# ---------------------------------------------------------------- deadlines
async def test_a_deadline_counts_the_time_in_the_queue(fake, counts):
    async with supervise(fake, counts, max_rows=1) as supervisor, supervisor.open([endless()], endpoint="chat"):
        live = supervisor.open([sequence()], endpoint="chat", deadline=supervisor.clock() + 0.05)
        with pytest.raises(RequestTimeout):
            await collect(live)
        assert supervisor.waiting == 0


async def test_a_deadline_frees_the_row_even_without_a_reader(fake, counts):
    async with supervise(fake, counts, request_timeout_seconds=0.05) as supervisor:
        live = supervisor.open([endless()], endpoint="chat")
        await until(lambda: fake.rows)
        await until(lambda: not fake.rows)
        with pytest.raises(RequestTimeout):
            await collect(live)


async def test_a_request_done_in_time_leaves_no_timer(fake, counts):
    async with supervise(fake, counts, request_timeout_seconds=60.0) as supervisor:
        live = supervisor.open([sequence()], endpoint="chat")
        await collect(live)
        assert live.expiry is not None
        assert live.expiry.cancelled()
