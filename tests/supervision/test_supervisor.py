"""Requests, the queue, planned ends and the seam, against a scripted engine. Deaths are in test_deaths."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import pytest
from fake_engine import FakeEngine, Poison, process_spawn
from supervising import Recorded, collect, endless, first_tokens, sequence, supervise, until
from virtual_time import played

from server.errors import (
    ContextLengthError,
    Draining,
    ExceedsMemory,
    GenerationError,
    QueueFull,
    RequestError,
    RequestTimeout,
)
from server.ipc import framing, messages
from server.ipc.probe import LayerCost
from server.supervision import admission, engine_lifecycle
from server.supervision.engine_process import EngineConnection
from server.supervision.supervisor import Supervisor


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def counts() -> Recorded:
    return Recorded()


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


async def test_a_slow_reader_gets_fewer_and_larger_news_and_holds_nobody(fake, counts):
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
            fake.load_seconds = 0.1
            fake.die()
            await until(lambda: not supervisor.is_ready)
            assert supervisor.waiting == 1
        assert supervisor.waiting == 0
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
    assert sorted(told[1] for told in counts.of("finished")) == ["error", "length"]


async def test_a_row_that_cant_go_on_for_memory_says_so(fake, counts):
    async with supervise(fake, counts) as supervisor, supervisor.open([endless()], endpoint="chat") as live:
        await until(lambda: fake.rows)
        fake.fail_row(live.generations[0].seq, "memory", "needs 12 bytes, the limit is 11")
        await until(lambda: live.error)
        with pytest.raises(ExceedsMemory, match=r"12 .* 11"):
            await first_tokens(live, 10**6)


# ---------------------------------------------------------------- rotation
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


async def test_rotations_put_nobody_on_probation(fake, counts):
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
        assert supervisor.waiting == 2  # calm, but not for long; nobody overtakes
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


async def test_a_deadline_frees_the_row_even_when_nobody_reads(fake, counts):
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


# ---------------------------------------------------------------- the end
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


# ---------------------------------------------------------------- real processes
def gone(pid: int) -> bool:
    """Ended; a zombie that its own parent hasn't reaped counts."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_a_killed_process_is_noticed_at_once_and_replaced(counts):
    before = len(os.listdir("/dev/fd"))
    s, fake = sequence(max_tokens=400), FakeEngine()
    async with supervise(None, counts, spawn=process_spawn()) as supervisor:
        task = asyncio.create_task(collect(supervisor.open([s], endpoint="chat")))
        await until(lambda: counts.of("first_token"))
        pid = supervisor.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        await until(lambda: not supervisor.is_ready)
        assert time.monotonic() - began < 0.2
        assert await task == [fake.expected(s)]
        assert gone(pid)
        last = supervisor.engine.pid
        assert last != pid
    assert gone(last)
    assert len(os.listdir("/dev/fd")) == before


async def test_an_engine_that_ends_itself_between_frames_loses_no_token(counts):
    s, fake = sequence(max_tokens=2000), FakeEngine()
    spawn = process_spawn("--exit-after", "600", "--step-seconds", "0")
    async with supervise(None, counts, spawn=spawn) as supervisor:
        assert await collect(supervisor.open([s], endpoint="chat")) == [fake.expected(s)]
        assert supervisor.engine.restarts >= 1


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for children in /proc")
async def test_the_engines_own_children_go_with_it(counts):
    async with supervise(None, counts, spawn=process_spawn("--child")) as supervisor:
        children: list[int] = []
        await until(lambda: children.extend(children_of(supervisor.engine.pid)) or children)
        os.kill(supervisor.engine.pid, signal.SIGKILL)
        await until(lambda: gone(children[0]))


def children_of(pid: int | None) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


async def test_settings_reach_the_engine_without_the_keys_and_not_by_its_environment(fake, counts, monkeypatch):
    from server.supervision.engine_process import without_settings

    async with supervise(fake, counts, api_key="secret-one", max_rows=5) as supervisor:
        assert supervisor.batch_limit == 5
    start = fake.commands[0]
    assert isinstance(start, messages.Start)
    assert '"max_rows":5' in start.settings
    assert "secret" not in start.settings
    assert without_settings({"MARATHON_API_KEY": "x", "PATH": "y"}) == {"PATH": "y"}


# ---------------------------------------------------------------- many at once
async def test_nobody_is_left_behind_after_many_disconnects(fake, counts):
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


# ---------------------------------------------------------------- the seam
async def test_a_command_larger_than_the_socket_waits_here_and_arrives_whole(fake, counts):
    fake.context = 10**7
    long = sequence(*range(700_000), max_tokens=3)
    async with supervise(fake, counts, stall_seconds=60.0) as supervisor:
        await collect(supervisor.open([long], endpoint="chat"))
        assert fake.submits[0].sequence.prompt == long.prompt


async def test_news_of_another_epoch_are_not_heard(fake, counts):
    async with supervise(fake, counts) as supervisor, supervisor.open([endless()], endpoint="chat") as live:
        await first_tokens(live)
        seq = live.generations[0].seq
        fake.life.tell(messages.Steps(99, [seq], [999_999]))
        fake.life.tell(messages.RowFailure(99, seq, "row", "not yours"))
        await first_tokens(live, 5)
        assert 999_999 not in live.generations[0].generated


async def test_a_step_that_contradicts_itself_is_garbage(fake, counts):
    s = sequence(max_tokens=200)
    async with supervise(fake, counts) as supervisor:
        task = asyncio.create_task(collect(supervisor.open([s], endpoint="chat")))
        await until(lambda: counts.of("first_token"))
        fake.life.tell(messages.Steps(1, [1, 2], [5]))
        assert await task == [fake.expected(s)]
        assert supervisor.engine.restarts == 1


async def test_32_rows_at_300_steps_a_second_take_well_below_a_fifth_of_a_core(fake, counts):
    fake.step_seconds = 60
    async with supervise(fake, Recorded()) as supervisor:
        lives = [supervisor.open([endless(i)], endpoint="chat") for i in range(32)]
        await until(lambda: len(fake.rows) == 32 and all(live.generations[0].generated for live in lives))
        connection, seqs = supervisor._engines.connection, sorted(fake.rows)
        assert isinstance(connection, EngineConnection)
        frames = [framing.pack(messages.Steps(1, seqs, [n] * 32)) for n in range(300)]
        began = time.process_time()
        for frame in frames:
            connection._take(frame)
        seconds = time.process_time() - began
        assert all(len(live.generations[0].generated) >= 301 for live in lives)
        for live in lives:
            live.close()
    assert seconds < 0.1
