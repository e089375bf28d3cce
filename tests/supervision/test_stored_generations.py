"""Generations whose ids are saved before they are read, and that go on after a restart of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from fake_engine import Poison
from supervising import collect, endless, first_tokens, sequence, supervise, until

from server.errors import Draining, GenerationError, NotReady, QueueFull
from server.ipc.sequence import Finish, TokenLogprobs
from server.journal.record import NewTokens


@dataclass
class HeldLog:
    """A log that is as slow as a test wants: `let_go` says that everything so far is saved."""

    prompt: bool = False
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    ends: dict[int, Finish] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def append(self, news: NewTokens, then: Callable[[], None]) -> None:
        index = news.choice
        assert index not in self.ends, "nothing comes after the end"
        self.tokens.setdefault(index, []).extend(news.tokens)
        self.logprobs.setdefault(index, []).extend(news.logprobs)
        if news.finish is not None:
            self.ends[index] = news.finish
        if news.cached is not None:
            assert index not in self.cached
            self.cached[index] = news.cached
        self.waiting.append(then)
        if self.prompt:
            asyncio.get_running_loop().call_soon(self.let_go)

    def let_go(self) -> None:
        waiting = self.waiting
        self.waiting = []
        for then in waiting:
            then()


async def test_nothing_is_read_before_it_is_saved(fake, counts):
    log = HeldLog()
    s = sequence(max_tokens=20, logprobs=1)
    async with supervise(fake, counts) as supervisor, supervisor.open([s], endpoint="chat", log=log) as live:
        await until(lambda: log.ends)
        assert await live.read(0.05) == []
        assert not live.done
        log.let_go()
        [(index, delta)] = await live.read(1)
        assert live.done
    assert (index, delta.tokens, delta.finish, delta.cached) == (0, fake.expected(s), "length", 0)
    assert [entry.top[0][0] for entry in delta.logprobs] == delta.tokens
    assert log.tokens[0] == delta.tokens
    assert log.logprobs[0] == delta.logprobs
    assert (log.ends, log.cached) == ({0: "length"}, {0: 0})


async def test_a_reader_gets_what_is_saved_and_no_more(fake, counts):
    log = HeldLog()
    s = sequence(max_tokens=400, logprobs=1)
    read: list[int] = []
    async with supervise(fake, counts) as supervisor, supervisor.open([s], endpoint="chat", log=log) as live:
        while not live.done:
            await until(lambda: log.waiting)
            known = len(log.tokens[0])
            log.let_go()
            for _, delta in await live.read(1):
                assert [entry.top[0][0] for entry in delta.logprobs] == delta.tokens
                read += delta.tokens
            assert len(read) == known
    assert read == fake.expected(s)


async def test_logged_choices_survive_deaths_like_any(fake, counts):
    log = HeldLog(prompt=True)
    choices = [sequence(max_tokens=300, choice=i) for i in range(3)]
    async with supervise(fake, counts) as supervisor:
        task = asyncio.create_task(collect(supervisor.open(choices, endpoint="chat", log=log)))
        for _ in range(3):
            await until(lambda: len(fake.rows) == 3 and all(row.produced > 20 for row in fake.rows.values()))
            fake.die()
        assert await task == [fake.expected(s) for s in choices]
    assert [log.tokens[i] for i in range(3)] == [fake.expected(s) for s in choices]


async def test_what_came_before_an_error_is_saved_and_read_before_it(fake, counts):
    log = HeldLog()
    fake.poison[1] = Poison(after=5, how="fail")
    async with supervise(fake, counts) as supervisor, supervisor.open([endless()], endpoint="chat", log=log) as live:
        await until(lambda: live.error)
        assert await live.read(0.02) == []
        log.let_go()
        assert await first_tokens(live, 5) == log.tokens[0]
        with pytest.raises(GenerationError):
            await live.read(1)


async def test_a_cancelled_choice_is_silent_though_its_end_is_saved_later(fake, counts):
    log = HeldLog()
    choices = [sequence(max_tokens=5), sequence(9, max_tokens=60)]
    async with supervise(fake, counts) as supervisor, supervisor.open(choices, endpoint="chat", log=log) as live:
        await until(lambda: log.ends)
        live.cancel(0)
        log.prompt = True
        log.let_go()
        while not live.done:
            assert all(index == 1 for index, _ in await live.read(1))


# ---------------------------------------------------------------- after a restart
@pytest.mark.parametrize("known", [0, 1, 17, 39])
async def test_a_generation_goes_on_after_the_ids_it_has(fake, counts, known):
    s = sequence(logprobs=1)
    whole = fake.expected(s)
    log = HeldLog(prompt=True)
    async with supervise(fake, counts) as supervisor:
        live = supervisor.open([s], endpoint="responses", log=log, generated=[whole[:known]], background=True)
        assert await collect(live) == [whole[known:]]
    assert log.tokens[0] == whole[known:]
    assert fake.submits[0].generated == whole[:known]
    assert [reported[0] for reported in counts.of("resumed")] == ["restart"]
    assert counts.of("recomputed") == ([("restart", 2 + known)] if known else [])
    assert counts.sum("generated") == 40 - known
    assert len(counts.of("first_token")) == (not known)


async def test_the_queue_limit_is_for_new_requests(fake, counts):
    async with supervise(fake, counts, max_rows=1, queue_limit=0) as supervisor:
        lives = [supervisor.open([endless()], endpoint="responses", generated=[[5]]) for _ in range(4)]
        with pytest.raises(QueueFull):
            supervisor.open([sequence()], endpoint="chat")
        assert (supervisor.running, supervisor.waiting) == (1, 3)
        for live in lives:
            live.close()
        await collect(supervisor.open([sequence()], endpoint="chat"))


async def test_restored_generations_start_in_the_order_in_which_they_are_opened(fake, counts):
    async with supervise(fake, counts, max_rows=1) as supervisor:
        s = [sequence(n, max_tokens=20) for n in range(4)]
        lives = [supervisor.open([one], endpoint="responses", generated=[[]]) for one in s]
        await asyncio.gather(*map(collect, lives))
    assert [submit.sequence for submit in fake.submits] == s


async def test_a_drain_leaves_background_work_for_the_next_start(fake, counts):
    log = HeldLog(prompt=True)
    s = sequence(max_tokens=60)
    async with supervise(fake, counts) as supervisor:
        live = supervisor.open([endless()], endpoint="responses", log=log, background=True)
        task = asyncio.create_task(collect(supervisor.open([s], endpoint="chat")))
        await until(lambda: len(fake.rows) == 2)
        await asyncio.wait_for(supervisor.stop(supervisor.clock() + 60), 5)
        assert await task == [fake.expected(s)]
        with pytest.raises(Draining):
            await collect(live)
    assert log.tokens[0]


async def test_background_work_waits_for_an_engine_however_many_starts_fail(fake, counts):
    fake.step_seconds = 0.01
    async with supervise(fake, counts, max_rows=1, outage_seconds=60) as supervisor:
        first = supervisor.open([endless()], endpoint="chat")
        await first_tokens(first)
        waiting = supervisor.open([sequence()], endpoint="chat")
        background = supervisor.open([sequence(5)], endpoint="responses", background=True)
        fake.starts = ["die"] * 4
        fake.die()
        await until(lambda: supervisor.hopeless)
        with pytest.raises(NotReady):
            await waiting.read(1)
        waiting.close()
        first.close()
        assert await collect(background, 10) == [fake.expected(sequence(5))]
