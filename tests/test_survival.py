"""Generations outlive their engine: a real server, real engines, a tiny model.

Short versions of what `loadtests.chaos` does at length. One server plays most of them, because an engine takes seconds
to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from loadtests import harness, process_tree
from loadtests.chaos.clients import bodies
from loadtests.chaos.comparison import Verdicts
from loadtests.chaos.sse_client import Account, ask, completion
from server import app, serve
from server.ipc import messages
from server.serving.listening import listen
from server.settings import load
from server.supervision.supervisor import Supervisor

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

TOKENS = 250
POISON = 77
STALL = 2.0


@dataclass(slots=True)
class Site:
    """A server that runs, and what it should say."""

    port: int
    supervisor: Supervisor
    expected: list[Account]

    async def until_moving(self, accounts: list[Account]) -> None:
        """Every stream among them has shown something from now on."""
        now = time.monotonic()
        async with asyncio.timeout(60):
            while not all(account.moved_since(now) for account in accounts if account.body.get("stream")):
                await asyncio.sleep(0.005)

    async def until_ready(self, epoch: int) -> None:
        async with asyncio.timeout(60):
            while self.supervisor.engine.epoch < epoch or not self.supervisor.is_ready:
                await asyncio.sleep(0.005)

    @property
    def engine(self) -> int:
        assert self.supervisor.engine.pid is not None
        return self.supervisor.engine.pid


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tiny: Any) -> AsyncIterator[Site]:
    """A server over real engines; a prompt that begins with POISON kills them."""
    folder: Path = tiny("llama")
    settings = load(
        {
            "model": str(folder),
            "port": 0,
            "faults": f"poison@prefill:{POISON}",
            "stall_seconds": STALL,
            "log_level": "error",
        }
    )
    served = app.serving(settings)
    server = serve.Server(app.create_app(served), served.supervisor, settings, lambda ready: None)
    (sock,) = listen(settings.host, 0)
    task = asyncio.create_task(server.serve_on([sock]))
    site = Site(sock.getsockname()[1], served.supervisor, [])
    try:
        await site.until_ready(1)
        site.expected = list(await asyncio.gather(*(ask(site.port, body) for body in bodies(TOKENS))))
        yield site
    finally:
        server.handle_exit(2, None)
        server.handle_exit(2, None)
        await asyncio.wait_for(task, 30)


@contextlib.asynccontextmanager
async def under_way(site: Site) -> AsyncIterator[list[Account]]:
    """The same requests again, all of which must come out the same."""
    accounts = [Account(expected.body) for expected in site.expected]
    tasks = [asyncio.create_task(ask(site.port, account.body, account)) for account in accounts]
    try:
        await site.until_moving(accounts)
        yield accounts
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
    finally:
        for task in tasks:
            task.cancel()
    verdicts = Verdicts()
    for i, (expected, account) in enumerate(zip(site.expected, accounts, strict=True)):
        verdicts.judge(f"request {i}", expected, account)
    assert not verdicts.problems()


# ---------------------------------------------------------------- the engine goes
async def test_streams_and_plain_answers_go_on_after_a_kill_without_loss_or_repeat(site: Site) -> None:
    restarts = site.supervisor.engine.restarts
    async with under_way(site):
        os.kill(site.engine, signal.SIGKILL)
    assert site.supervisor.engine.restarts == restarts + 1


async def test_a_kill_while_it_resumes_costs_nothing_but_time(site: Site) -> None:
    async with under_way(site):
        epoch = site.supervisor.engine.epoch
        os.kill(site.engine, signal.SIGKILL)
        await site.until_ready(epoch + 1)
        os.kill(site.engine, signal.SIGKILL)
    assert site.supervisor.engine.epoch == epoch + 2


async def test_an_engine_that_stands_still_is_replaced(site: Site) -> None:
    async with under_way(site):
        stopped, pid = time.monotonic(), site.engine
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(90):
            while site.supervisor.engine.ready is not None:
                await asyncio.sleep(0.01)
        took = time.monotonic() - stopped
    limit = next(act.threshold for act in site.supervisor.engine.actions if act.action == "kill_stalled")
    assert limit - 0.5 < took < limit + 0.5
    assert not Path(f"/proc/{pid}").exists() or sys.platform != "linux"


async def test_a_rotation_is_invisible(site: Site) -> None:
    epoch, restarts = site.supervisor.engine.epoch, site.supervisor.engine.restarts
    async with under_way(site):
        # What an engine says that is about to run out of buffers.
        site.supervisor._engines._rotate(messages.Rotate(epoch, 95, 92, "live buffers"))
    assert (site.supervisor.engine.epoch, site.supervisor.engine.restarts) == (epoch + 1, restarts + 1)


async def test_a_poison_request_ends_alone(site: Site) -> None:
    async with under_way(site):
        poison = await ask(site.port, completion([POISON, 5, 6, 7], 50))
        assert poison.error is not None
        assert poison.error["code"] == "invalid_prompt"
        assert "isn't tried again" in poison.error["message"]
    fresh = await ask(site.port, site.expected[0].body)
    assert fresh.tokens == site.expected[0].tokens


async def test_a_stream_waits_for_its_model_where_another_was_put_in_its_place(tiny: Any, tmp_path: Path) -> None:
    """And no other model goes on with it."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    body = completion([100, 101], 400)
    options = {"access_log": "off", "log_level": "error", "spare_engine": False}
    with harness.marathon(folder, tmp_path / "log", **options) as server:
        expected, account = await ask(server.port, body), Account(body)
        stream = asyncio.create_task(ask(server.port, body, account))
        async with asyncio.timeout(60):
            while not account.arrivals:
                await asyncio.sleep(0.005)
        engine = server.engine_pid()
        assert engine is not None
        weights.write_bytes(content[: -len(content) // 2] + bytes(reversed(content[-len(content) // 2 :])))
        os.kill(engine, signal.SIGKILL)
        async with httpx.AsyncClient(trust_env=False, verify=False) as client, asyncio.timeout(60):
            while "model.safetensors" not in (await client.get(f"http://127.0.0.1:{server.port}/ready")).text:
                await asyncio.sleep(0.05)
        weights.write_bytes(content)
        assert (await asyncio.wait_for(stream, 60)).tokens == expected.tokens
    assert "its files have changed since the server loaded it: model.safetensors" in (tmp_path / "log").read_text()


# ---------------------------------------------------------------- the clients go
async def test_nothing_is_left_of_clients_that_left(site: Site) -> None:
    rng = random.Random(3)
    await site.until_ready(1)
    await ask(site.port, completion([100], 3))

    def held() -> tuple[int, int]:
        return len(os.listdir("/dev/fd")), len(asyncio.all_tasks())

    async def visit() -> None:
        body = completion([rng.randrange(100, 900) for _ in range(rng.choice((3, 200)))], 100)
        if rng.random() < 0.3:
            body = {**body, "stream": False, "stream_options": None}
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ask(site.port, body), rng.random() * 0.2)

    before = held()
    for _ in range(8):
        await asyncio.gather(*(visit() for _ in range(15)))
    async with asyncio.timeout(10):
        while site.supervisor.running or site.supervisor.waiting or held() > before:
            await asyncio.sleep(0.05)
    async with asyncio.timeout(10):  # the engine's own view comes once a second
        while (
            site.supervisor.engine.snapshot is None
            or site.supervisor.engine.snapshot.rows
            or site.supervisor.engine.snapshot.prefilling
        ):
            await asyncio.sleep(0.05)


# ---------------------------------------------------------------- the server goes
@pytest.fixture
def server(tiny: Any, tmp_path: Path) -> Iterator[harness.Server]:
    """As a user starts it, in processes of its own."""
    options = {"drain_seconds": 2, "access_log": "off", "log_level": "warning"}
    with harness.marathon(tiny("llama"), tmp_path / "log", **options) as server:
        yield server


async def test_a_server_that_is_killed_leaves_no_engine(server: harness.Server) -> None:
    engine = server.engine_pid()
    assert engine is not None
    stream = asyncio.create_task(ask(server.port, completion([100, 101], 30_000)))
    await asyncio.sleep(0.3)
    server.process.kill()
    server.process.wait()
    async with asyncio.timeout(5):
        while any(process.pid == engine for process in process_tree.processes() if not _is_zombie(process.pid)):
            await asyncio.sleep(0.05)
    assert not (await stream).done


def _is_zombie(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True).stdout
    return state.strip().startswith("Z")


async def test_sigterm_lets_the_short_one_end_and_leaves_no_process(server: harness.Server) -> None:
    family = process_tree.descendants(server.pid)
    short, endless = Account({}), Account({})
    streams = [
        asyncio.create_task(ask(server.port, completion([100, 101], 30), short)),
        asyncio.create_task(ask(server.port, completion([102, 103], 30_000), endless)),
    ]
    async with asyncio.timeout(90):
        while not (short.arrivals and endless.arrivals):
            await asyncio.sleep(0.005)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.1)
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        refused = await client.post(f"http://127.0.0.1:{server.port}/v1/completions", json=completion([1], 1))
    assert refused.status_code == 503
    await asyncio.gather(*streams)
    assert short.ok
    assert (endless.error or {}).get("code") == "draining"
    assert await asyncio.to_thread(server.process.wait, 20) == 0
    left = {process.pid for process in process_tree.processes()}
    assert not left & {process.pid for process in family}
