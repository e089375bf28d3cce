"""What the death of an engine costs whom, against a scripted one and in no time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fake_engine import FakeEngine, Poison
from supervising import Recorded, collect, endless, first_tokens, sequence, supervise, until
from virtual_time import played

from server.errors import FatalPrompt, GenerationError, NotReady, StartupError
from server.ipc.snapshot import Snapshot
from server.settings import load
from server.supervision import engine_lifecycle
from server.supervision.supervisor import Supervisor

FOR_EVER = 10**6


# ---------------------------------------------------------------- one death
DEATHS: dict[str, Callable[[FakeEngine], None]] = {
    "killed": lambda fake: fake.die(),
    "with news unread": lambda fake: fake.burst(5, then="die"),
    "with half a frame": lambda fake: fake.tear(),
    "garbage": lambda fake: fake.garbage(),
    "seam closed": lambda fake: fake.close(),
    "stuck": lambda fake: fake.stall(),
    "stopped": lambda fake: fake.freeze(),
}


@pytest.mark.parametrize("how", DEATHS)
@played
async def test_a_generation_survives_its_engine(fake, counts, how):
    s, others = sequence(max_tokens=300), [sequence(i, max_tokens=300) for i in range(3)]
    async with supervise(fake, counts) as supervisor:
        tasks = [asyncio.create_task(collect(supervisor.open([o], endpoint="chat"))) for o in [s, *others]]
        await until(lambda: len(fake.rows) == 4 and all(row.produced > 20 for row in fake.rows.values()))
        DEATHS[how](fake)
        assert [tokens for [tokens] in await asyncio.gather(*tasks)] == [fake.expected(o) for o in [s, *others]]
        assert supervisor.engine.restarts == 1
        assert supervisor.engine.epoch == 2
    cause = "stall" if how in ("stuck", "stopped") else "crash"
    assert counts.of("engine_restarted") == [(cause,)]
    assert [reported[0] for reported in counts.of("resumed")] == [cause] * 4
    assert [reported[0] for reported in counts.of("recomputed")] == [cause] * 4
    assert counts.sum("generated") == 1200


@played
async def test_the_resume_gap_is_what_the_client_saw(fake, counts):
    async with supervise(fake, counts) as supervisor, supervisor.open([endless()], endpoint="chat") as live:
        await first_tokens(live, 5)
        fake.load_seconds = 4
        fake.die()
        await until(lambda: counts.of("resumed"))
    [(_, seconds)] = counts.of("resumed")
    assert seconds == pytest.approx(4, abs=0.1)


@played
async def test_a_resume_says_what_it_waited_for(fake, counts):
    async with (
        supervise(fake, counts, start_seconds=60) as supervisor,
        supervisor.open([endless()], endpoint="chat") as live,
    ):
        await first_tokens(live, 5)
        fake.import_seconds, fake.load_seconds, fake.prefill_seconds = 3, 4, 2
        fake.die()
        await until(lambda: counts.of("resumed"), 20)
    waits = dict(counts.of("resume_waited"))
    assert waits == pytest.approx({"engine": 3, "load": 4, "read": 2}, abs=0.1)
    [(_, seconds)] = counts.of("resumed")
    assert sum(waits.values()) == pytest.approx(seconds, abs=0.1)


@played
async def test_one_that_gave_its_memory_back_waits_for_room_and_for_its_prompt(fake, counts):
    async with supervise(fake, counts) as supervisor, supervisor.open([endless()], endpoint="chat") as live:
        await first_tokens(live, 5)
        fake.prefill_seconds = 2
        fake.preempt()
        await until(lambda: counts.of("resumed"), 60)
    waits = dict(counts.of("resume_waited"))
    assert set(waits) <= {"admission", "read"}
    assert waits["read"] == pytest.approx(2, abs=0.1)


@played
async def test_a_dead_engine_shows_at_once_and_the_next_is_another(fake, counts):
    async with supervise(fake, counts) as supervisor:
        first = supervisor.engine.pid
        assert supervisor.is_ready
        assert supervisor.down_reason is None
        await until(lambda: supervisor.engine.snapshot)
        gone: list[Snapshot] = []
        supervisor.on_engine_gone.append(gone.append)
        fake.load_seconds = 0.1
        fake.die()
        await asyncio.sleep(0.02)
        assert not supervisor.is_ready
        assert supervisor.down_reason
        assert supervisor.engine.ready is None
        assert supervisor.engine.known is not None
        assert supervisor.engine.snapshot is None
        assert len(gone) == 1
        await until(lambda: supervisor.is_ready)
        assert supervisor.engine.pid != first


@played
async def test_requests_that_come_while_the_engine_is_replaced_wait_for_the_next(fake, counts):
    async with supervise(fake, counts) as supervisor:
        fake.load_seconds = 4
        fake.die()
        await until(lambda: not supervisor.is_ready)
        s = sequence()
        assert await collect(supervisor.open([s], endpoint="chat")) == [fake.expected(s)]


# ---------------------------------------------------------------- many deaths: a generation that gets on is never ended
async def survive(fake: FakeEngine, counts: Recorded, streams: int, max_tokens: int = 300) -> int:
    """All streams come out right, whatever `fake.starts` says. Returns how many engines it took."""
    wanted = [sequence(i, max_tokens=max_tokens) for i in range(streams)]
    fake.progress_seconds = 1.0
    async with supervise(fake, counts, start_seconds=60, outage_seconds=3600) as supervisor:
        tasks = [asyncio.create_task(collect(supervisor.open([s], endpoint="chat"), FOR_EVER)) for s in wanted]
        assert [tokens for [tokens] in await asyncio.gather(*tasks)] == [fake.expected(s) for s in wanted]
        return supervisor.engine.epoch


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("tokens", [1, 3, 10, 100])
@played
async def test_an_engine_that_is_killed_every_few_tokens_costs_nothing_but_time(fake, counts, tokens, streams):
    fake.starts = [f"die@token:{tokens}"] * FOR_EVER
    most = 300 // tokens
    assert most <= await survive(fake, counts, streams) <= (most + 10) * streams


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("place", ["ready", "submit"])
@played
async def test_a_death_before_a_generation_could_do_anything_counts_against_none(fake, counts, place, streams):
    fake.starts = ["die@token:50", *[f"die@{place}"] * 40]
    assert await survive(fake, counts, streams) == 42


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("after", [0.0, 0.01, 0.3, 0.9, 3.0])
@played
async def test_engines_that_are_killed_as_soon_as_they_are_ready_end_no_generation(fake, counts, after, streams):
    """Long before a first token could come. The killer looks at /ready, as anybody may."""
    wanted = [sequence(i, max_tokens=100) for i in range(streams)]
    async with supervise(fake, counts) as supervisor:
        tasks = [asyncio.create_task(collect(supervisor.open([s], endpoint="chat"), FOR_EVER)) for s in wanted]
        await until(lambda: counts.sum("generated") > 20)
        fake.prefill_seconds = 4.0
        for epoch in range(1, 25):
            await until(lambda e=epoch: supervisor.engine.epoch == e and supervisor.is_ready, 60)
            await asyncio.sleep(after)
            fake.die()
        assert [tokens for [tokens] in await asyncio.gather(*tasks)] == [fake.expected(s) for s in wanted]


@pytest.mark.parametrize("place", ["taken", "prefill"])
@played
async def test_a_crowd_of_which_each_dies_alike_isnt_blamed_soon(fake, counts, place):
    """Four at once that have become poisonous are less likely than an engine that is killed from outside."""
    fake.starts = ["die@token:50", *[f"die@{place}"] * 20]
    assert await survive(fake, counts, streams=4) == 22


@pytest.mark.parametrize("place", ["taken", "prefill"])
@played
async def test_one_alone_that_gets_nothing_done_is_ended_after_few_deaths(fake, counts, place):
    fake.starts = ["ok", *[f"die@{place}"] * 20]
    async with supervise(fake, counts) as supervisor, supervisor.open([endless()], endpoint="chat") as live:
        await first_tokens(live, 5)
        fake.die()
        with pytest.raises(GenerationError, match="isn't tried again"):
            await first_tokens(live, FOR_EVER)
        assert supervisor.engine.epoch <= 6


# ---------------------------------------------------------------- a request that kills
@pytest.mark.parametrize("poison", [Poison(0), Poison(0, "garbage"), Poison(0, "stall")], ids=repr)
@played
async def test_a_poison_request_ends_alone(fake, counts, poison):
    fake.poison[666] = poison
    good = [sequence(i, max_tokens=150) for i in range(6)]
    async with supervise(fake, counts) as supervisor:
        opened = [supervisor.open([s], endpoint="chat") for s in good[:3]]
        await until(lambda: len(fake.rows) == 3 and all(row.produced for row in fake.rows.values()))
        bad = supervisor.open([endless(666)], endpoint="chat")
        opened += [supervisor.open([s], endpoint="chat") for s in good[3:]]
        results = await asyncio.gather(*map(collect, [*opened, bad]), return_exceptions=True)
        assert list(results[:6]) == [[fake.expected(s)] for s in good]
        assert isinstance(results[6], GenerationError)
        assert results[6].headers() == {"x-should-retry": "false"}
        assert "quarantine" in [action.action for action in supervisor.engine.actions]
        assert supervisor.engine.epoch <= 10
    assert ("quarantine",) in counts.of("action")


@played
async def test_a_prompt_in_quarantine_is_refused_for_a_minute_and_no_other_is(fake, counts):
    fake.poison[666] = Poison(0)
    async with supervise(fake, counts) as supervisor:
        with pytest.raises(FatalPrompt, match="isn't tried again"):
            await collect(supervisor.open([endless(666)], endpoint="chat"))
        epoch = supervisor.engine.epoch
        with pytest.raises(FatalPrompt, match="60 s"):
            supervisor.open([endless(666)], endpoint="responses")
        assert supervisor.engine.epoch == epoch
        await collect(supervisor.open([sequence(max_tokens=5)], endpoint="chat"))
        await asyncio.sleep(61)
        fake.poison.clear()
        async with supervisor.open([endless(666)], endpoint="chat") as live:
            await first_tokens(live, 5)


@played
async def test_two_poison_requests_are_both_found_out(fake, counts):
    fake.poison = {666: Poison(0), 667: Poison(0)}
    good = sequence(max_tokens=150)
    async with supervise(fake, counts) as supervisor:
        opened = [supervisor.open([s], endpoint="chat") for s in (endless(666), good, endless(667))]
        results = await asyncio.gather(*(collect(live, FOR_EVER) for live in opened), return_exceptions=True)
        assert results[1] == [fake.expected(good)]
        assert [type(results[i]) for i in (0, 2)] == [FatalPrompt] * 2
        assert supervisor.engine.epoch <= 20


@pytest.mark.parametrize("after", [1, 5, 30])
@played
async def test_one_that_kills_its_engines_but_gets_on_is_served_after_the_others(fake, counts, after):
    """It ends by its own limit; what it costs the others is bounded, however much it wants."""
    fake.poison[666] = Poison(after)
    good, bad = [sequence(i, max_tokens=1500) for i in range(3)], sequence(666, max_tokens=400)
    async with supervise(fake, counts) as supervisor:
        tasks = [asyncio.create_task(collect(supervisor.open([s], endpoint="chat"))) for s in good]
        last = asyncio.create_task(collect(supervisor.open([bad], endpoint="chat"), FOR_EVER))
        assert [tokens for [tokens] in await asyncio.gather(*tasks)] == [fake.expected(s) for s in good]
        assert supervisor.engine.epoch <= 30
        for i in range(5):  # such as come while it runs apart
            s, epoch = sequence(900 + i, max_tokens=300), supervisor.engine.epoch
            assert await collect(supervisor.open([s], endpoint="chat")) == [fake.expected(s)]
            assert supervisor.engine.epoch <= epoch + 2
        assert await last == [fake.expected(bad)]
        assert "quarantine" not in [action.action for action in supervisor.engine.actions]


@played
async def test_one_that_runs_apart_has_its_turn_however_many_others_there_are(fake, counts):
    fake.poison[666] = Poison(5)
    fake.step_seconds = 0.05
    bad = sequence(666, max_tokens=150)
    async with supervise(fake, counts) as supervisor:

        async def visitors() -> None:
            while True:
                s = sequence(max_tokens=40)
                assert await collect(supervisor.open([s], endpoint="chat"), FOR_EVER) == [fake.expected(s)]

        others = [asyncio.create_task(visitors()) for _ in range(3)]
        assert await collect(supervisor.open([bad], endpoint="chat"), FOR_EVER) == [fake.expected(bad)]
        for other in others:
            other.cancel()
        await asyncio.wait(others)


@played
async def test_requests_in_the_queue_have_no_part_in_a_death(fake, counts):
    fake.poison[666] = Poison(0)
    async with supervise(fake, counts, max_rows=1) as supervisor:
        bad, s = supervisor.open([endless(666)], endpoint="chat"), sequence()
        good = supervisor.open([s], endpoint="chat")
        with pytest.raises(GenerationError):
            await collect(bad)
        assert await collect(good) == [fake.expected(s)]
        assert good.generations[0].past.deaths == 0


# ---------------------------------------------------------------- starts
FAILURES = ["die", "die@hello", "garbage", "no_spawn", "load_failed", "hang"]


@played
async def test_a_model_that_cant_be_loaded_ends_the_first_start_for_good(fake, counts):
    fake.starts = ["load_failed"]
    reported: list[str] = []
    supervisor = Supervisor(load({}), "model", counts, spawn=fake.spawn, on_load_failed=reported.append)
    await supervisor.start()
    with pytest.raises(StartupError, match=r"no config\.json"):
        await supervisor.wait_known()
    with pytest.raises(NotReady):
        supervisor.open([sequence()], endpoint="chat")
    await asyncio.sleep(60)
    assert len(fake.lives) == 1
    assert reported == ["the model folder has no config.json"]
    await supervisor.stop(0)


@played
async def test_requests_before_the_first_engine_are_asked_to_come_back(fake, counts):
    fake.load_seconds = 60
    async with supervise(fake, counts, ready=False) as supervisor:
        with pytest.raises(NotReady, match="starting") as caught:
            supervisor.open([sequence()], endpoint="chat")
        assert caught.value.headers()["Retry-After"]
        assert not supervisor.is_ready


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("how", FAILURES)
@played
async def test_failed_starts_cost_answers_under_way_nothing_but_time(fake, counts, how, streams):
    fake.starts = ["die@token:50", *[how] * 10]
    assert await survive(fake, counts, streams) == 12


@pytest.mark.parametrize("how", FAILURES)
@played
async def test_new_work_is_refused_at_once_while_no_engine_can_be_started(fake, counts, how):
    fake.starts = ["ok", *[how] * 20]
    s = sequence(max_tokens=200)
    async with supervise(fake, counts, max_rows=1) as supervisor:
        task = asyncio.create_task(collect(supervisor.open([s], endpoint="chat"), FOR_EVER))
        queued = supervisor.open([sequence()], endpoint="chat")
        await until(lambda: counts.of("first_token"))
        fake.die()
        with pytest.raises(NotReady, match="3 times in a row"):
            await collect(queued)  # it has lost nothing, and may ask elsewhere
        with pytest.raises(NotReady) as caught:
            supervisor.open([sequence()], endpoint="chat")
        assert 1 <= caught.value.retry_after <= 5
        assert "3 times in a row" in (supervisor.down_reason or "")
        assert not supervisor.is_ready
        assert await task == [fake.expected(s)]
        assert await collect(supervisor.open([s], endpoint="chat")) == [fake.expected(s)]


@pytest.mark.parametrize("how", ["no_spawn", "die", "die@ready", "die@submit"])
@played
async def test_answers_under_way_are_kept_for_as_long_as_the_setting_says(fake, counts, how):
    fake.starts = ["ok", *[how] * FOR_EVER]
    loop = asyncio.get_running_loop()
    async with supervise(fake, counts, outage_seconds=120) as supervisor:
        async with supervisor.open([endless()], endpoint="chat") as live:
            await first_tokens(live, 5)
            fake.die()
            lost = loop.time()
            with pytest.raises(NotReady):
                await first_tokens(live, FOR_EVER)
        assert 120 <= loop.time() - lost < 130
        fake.starts = []
        await until(lambda: supervisor.is_ready, 60)
        s = sequence()
        assert await collect(supervisor.open([s], endpoint="chat")) == [fake.expected(s)]


@played
async def test_an_outage_begins_anew_with_each_engine_that_got_something_done(fake, counts):
    fake.starts = ["die@token:50", *(["die"] * 8 + ["die@token:1"]) * 20]
    wanted = sequence(max_tokens=65)
    async with supervise(fake, counts, outage_seconds=60) as supervisor:
        assert await collect(supervisor.open([wanted], endpoint="chat"), FOR_EVER) == [fake.expected(wanted)]


@played
async def test_while_answers_wait_the_next_start_is_soon(fake, counts):
    fake.starts = ["die@token:50", *["no_spawn"] * 30]
    loop = asyncio.get_running_loop()
    began = loop.time()
    await survive(fake, counts, streams=1)
    assert loop.time() - began < 30 * engine_lifecycle.AWAITED_SECONDS


@played
async def test_an_engine_that_never_starts_is_known_to_be_missing(fake, counts):
    fake.starts = ["die"] * 50
    async with supervise(fake, counts, ready=False) as supervisor:
        with pytest.raises(NotReady, match="3 times in a row: it was ended by SIGSEGV"):
            await supervisor.wait_known()


@played
async def test_a_fault_of_the_supervisor_itself_leaves_no_server_without_an_engine(fake, counts, caplog):
    async with supervise(fake, counts) as supervisor:
        supervisor.on_engine_gone.append(lambda snapshot: 1 / 0)
        await until(lambda: supervisor.engine.snapshot)
        fake.die()
        await until(lambda: supervisor.engine.epoch == 2 and supervisor.is_ready)
    assert "supervising the engine failed" in caplog.text
