"""Engines that are real processes, and the channel to them."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from fake_engine import FakeEngine, process_spawn
from supervising import Recorded, collect, endless, first_tokens, sequence, supervise, until

from server.ipc import framing, messages
from server.supervision.engine_process import EngineConnection


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


# ---------------------------------------------------------------- the channel
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
        fake.life.emit(messages.Steps(99, [seq], [999_999]))
        fake.life.emit(messages.RowFailure(99, seq, "row", "not yours"))
        await first_tokens(live, 5)
        assert 999_999 not in live.generations[0].generated


async def test_a_step_that_contradicts_itself_is_garbage(fake, counts):
    s = sequence(max_tokens=200)
    async with supervise(fake, counts) as supervisor:
        task = asyncio.create_task(collect(supervisor.open([s], endpoint="chat")))
        await until(lambda: counts.of("first_token"))
        fake.life.emit(messages.Steps(1, [1, 2], [5]))
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
