"""The sleep assertion: when it is held, by whom, and that none is left over."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import engine, run_server, says

from server.supervision import caffeinate as module

PERIOD = 0.005


class Fake:
    """Notes what it's asked for; refuses the same request twice."""

    def __init__(self) -> None:
        self.acts: list[str] = []
        self.held = False

    def hold(self) -> None:
        assert not self.held
        self.held = True
        self.acts.append("hold")

    def release(self) -> None:
        assert self.held
        self.held = False
        self.acts.append("release")


class Watched:
    """A watch over work that a test begins and ends."""

    def __init__(self, idle: float) -> None:
        self.fake, self.busy = Fake(), False
        self.task = asyncio.create_task(module.watch(lambda: self.busy, self.fake, period=PERIOD, idle=idle))

    async def end(self) -> list[str]:
        self.task.cancel()
        await asyncio.wait([self.task])
        return self.fake.acts


async def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(PERIOD)


async def test_nothing_is_held_while_nothing_runs():
    watched = Watched(idle=0.01)
    await asyncio.sleep(0.05)
    assert await watched.end() == []


async def test_it_is_held_while_something_runs_and_for_a_while_after():
    watched = Watched(idle=0.3)
    watched.busy = True
    await until(lambda: watched.fake.held)
    await asyncio.sleep(0.4)
    assert watched.fake.held, "longer than the idle time, but never idle"
    watched.busy, ended = False, time.monotonic()
    await until(lambda: not watched.fake.held)
    assert time.monotonic() - ended > 0.1
    assert await watched.end() == ["hold", "release"]


async def test_a_short_pause_starts_no_new_one():
    watched = Watched(idle=30)
    for busy in (True, False, True, False, True):
        watched.busy = busy
        await asyncio.sleep(4 * PERIOD)
    assert await watched.end() == ["hold", "release"]


async def test_it_is_let_go_when_the_server_ends_during_a_generation():
    watched = Watched(idle=30)
    watched.busy = True
    await until(lambda: watched.fake.held)
    assert await watched.end() == ["hold", "release"]


# ---------------------------------------------------------------- caffeinate
def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def caffeinate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name in PATH that notes its pid and arguments and stays; the result is its notebook."""
    notebook, program = tmp_path / "notes", tmp_path / "caffeinate"
    program.write_text(f'#!/bin/sh\necho "$$ $*" >> {notebook}\nexec sleep 60\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return notebook


def notes(notebook: Path) -> list[list[str]]:
    return [line.split() for line in notebook.read_text().splitlines()] if notebook.exists() else []


async def test_caffeinate_is_asked_to_end_with_the_server_and_is_gone_after_the_release(caffeinate: Path):
    held = module.assertion(True, "darwin")
    assert held is not None
    for times in (1, 2):
        held.hold()
        await until(lambda times=times: len(notes(caffeinate)) == times)
        pid, *arguments = notes(caffeinate)[-1]
        assert arguments == ["-i", "-w", str(os.getpid())]
        assert not gone(int(pid))
        held.release()
        assert gone(int(pid))
    held.release()  # nothing is held: nothing happens


def test_without_caffeinate_a_line_says_so_and_work_goes_on(caplog: pytest.LogCaptureFixture):
    held = module.Caffeinate(["no-such-caffeinate"])
    held.hold()
    held.release()
    assert "no-such-caffeinate can't be started" in caplog.text


def test_elsewhere_it_does_nothing_and_one_line_says_so(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "marathon")
    assert module.assertion(False, "linux") is None
    assert module.assertion(False, "darwin") is None
    assert caplog.records == []
    assert module.assertion(True, "linux") is None
    assert len(caplog.records) == 1


# ---------------------------------------------------------------- in the server
@pytest.mark.parametrize("wanted", [True, False])
async def test_the_server_holds_it_while_it_answers_if_asked_to(wanted: bool, monkeypatch: pytest.MonkeyPatch):
    fake = Fake()
    monkeypatch.setattr(module, "assertion", lambda wanted: fake if wanted else None)
    monkeypatch.setattr(module.watch, "__kwdefaults__", {"period": PERIOD, "idle": 0.05})
    slow = engine(say=says("word", stop=False), step_seconds=0.02)
    async with run_server(slow, keep_awake=wanted) as site:
        await asyncio.sleep(0.05)
        assert fake.acts == []
        assert (await site.complete(max_tokens=10)).status_code == 200
        await site.until(lambda: not fake.held)
    assert fake.acts == (["hold", "release"] if wanted else [])


async def test_it_is_held_while_an_engine_is_replaced(monkeypatch: pytest.MonkeyPatch):
    fake = Fake()
    monkeypatch.setattr(module, "assertion", lambda wanted: fake)
    monkeypatch.setattr(module.watch, "__kwdefaults__", {"period": PERIOD, "idle": 0.05})
    slow = engine(say=says("word", stop=False), step_seconds=0.02, load_seconds=0.3)
    async with run_server(slow) as site:
        answer = asyncio.create_task(site.complete(max_tokens=10))
        await site.until(lambda: fake.held)
        await site.until(lambda: slow.alive and site.served.supervisor.running > 0)
        slow.die()
        assert (await answer).status_code == 200
        await site.until(lambda: not fake.held)
        assert fake.acts == ["hold", "release"]
