"""What a service manager hears of a server."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import build, engine, tokenizer

from server import serve
from server.app import create_app
from server.serving.listening import listen
from server.serving.notify import ServiceManager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


def heard(manager: socket.socket) -> list[str]:
    news = []
    while True:
        try:
            news.append(manager.recv(100).decode())
        except BlockingIOError:
            return news


async def test_a_server_says_that_it_is_ready_that_it_lives_and_that_it_ends(manager: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "100000", "WATCHDOG_PID": str(os.getpid())}
    served = build(engine(load_seconds=0.3), tokenizer())
    server = serve.Server(
        create_app(served), served.supervisor, served.settings, lambda ready: None, ServiceManager(environment)
    )
    task = asyncio.create_task(server.serve_on(listen("127.0.0.1", 0)))
    news: list[str] = []
    async with asyncio.timeout(20):
        while "READY=1" not in news:
            news += heard(manager)
            await asyncio.sleep(0.01)
        while news[-2:] != ["WATCHDOG=1"] * 2:
            news += heard(manager)
            await asyncio.sleep(0.01)
        server.handle_exit(15, None)
        await task
    news += heard(manager)
    assert served.supervisor.engine.known is not None
    assert [word for word in news if word != "WATCHDOG=1"] == ["READY=1", "STOPPING=1"]
    assert news.index("READY=1") > 0, "the watchdog is heard while the engine loads"


async def test_a_manager_in_the_abstract_namespace_is_heard() -> None:
    if not Path("/proc/net/unix").exists():
        pytest.skip("only Linux has it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0marathon-{os.getpid()}")
        ServiceManager({"NOTIFY_SOCKET": f"@marathon-{os.getpid()}"}).ready()
        assert listener.recv(100) == b"READY=1"


@pytest.mark.parametrize(
    "environment",
    [{}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "10", "WATCHDOG_PID": "1"}],
    ids=["nobody", "nonsense", "another process"],
)
async def test_without_a_manager_nothing_is_said(environment: dict[str, str]) -> None:
    manager = ServiceManager(environment)
    manager.ready()
    manager.stopping()
    await asyncio.wait_for(manager.watch(), 1)


async def test_a_manager_that_does_not_listen_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready()
    assert "can't be sent READY=1" in caplog.text
