"""Start, signals, drain and end; and HTTP down at the socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import MODEL, USER, Site, engine, payloads, run_server, says

from server import serve
from server.errors import StartupError

READS_NOTHING = json.dumps({"messages": USER, "stream": True, "n": 8, "logprobs": True, "top_logprobs": 2}).encode()
LONG = says("word", stop=False)


async def begun(site: Site, **fields: Any) -> tuple[asyncio.Task[list[Any]], asyncio.Event]:
    """A stream that has shown something."""
    started = asyncio.Event()

    async def read() -> list[Any]:
        events = []
        body = {"model": MODEL, "messages": USER, "stream": True, **fields}
        async with site.client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for event in payloads(response):
                events.append(event)
                started.set()
        return events

    task = asyncio.create_task(read())
    await asyncio.wait_for(started.wait(), 5)
    return task, started


# ---------------------------------------------------------------- the end
async def test_the_first_signal_lets_running_generations_end_and_takes_nothing_new() -> None:
    fake = engine(say=LONG, step_seconds=0.02)
    async with run_server(fake, drain_seconds=20) as site:
        task, _ = await begun(site, max_tokens=40)
        site.server.handle_exit(signal.SIGTERM, None)
        await site.until(lambda: site.served.supervisor.draining)
        for answer in (await site.chat(), await site.client.get("/ready")):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "draining"
        assert (await site.client.get("/live")).status_code == 200
        assert (await site.client.get("/health")).json()["draining"] is True
        events = await asyncio.wait_for(task, 10)
        assert events[-1] == "[DONE]"
        assert len(events) >= 40
        await site.until(lambda: site.server.should_exit)
        assert not fake.alive


async def test_what_is_left_at_the_deadline_ends_with_an_error_event() -> None:
    fake = engine(say=LONG, step_seconds=0.01)
    async with run_server(fake, drain_seconds=0.3) as site:
        task, _ = await begun(site)
        began = time.monotonic()
        site.server.handle_exit(signal.SIGTERM, None)
        events = await asyncio.wait_for(task, 5)
        assert 0.2 < time.monotonic() - began < 3
        assert events[-1]["error"]["code"] == "draining"


async def test_who_neither_sends_nor_reads_to_the_end_does_not_hold_up_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = engine(say=says("a long word " * 50, stop=False), step_seconds=0.0, context=10**9)
    answers = []
    async with run_server(fake, drain_seconds=1) as site:
        for body, whole in ((b"{", 500), (READS_NOTHING, len(READS_NOTHING))):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(site.url.rpartition(":")[2]), limit=1024)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {whole}\r\n\r\n"
            writer.write(head.encode() + body)
            answers.append((reader, writer))
        await site.until(lambda: bool(fake.rows))
        await asyncio.sleep(1)  # its buffers fill up
        began = time.monotonic()
    assert time.monotonic() - began < 1 + serve.CLOSE_SECONDS + 1
    refused = await answers[0][0].read()
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"draining"' in refused
    for _, writer in answers:
        writer.transport.abort()
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_second_signal_ends_at_once() -> None:
    fake = engine(say=LONG, step_seconds=0.01)
    async with run_server(fake, drain_seconds=60) as site:
        task, _ = await begun(site)
        site.server.handle_exit(signal.SIGINT, None)
        await site.until(lambda: site.served.supervisor.draining)
        assert not task.done()
        site.server.handle_exit(signal.SIGINT, None)
        events = await asyncio.wait_for(task, 5)
        assert "error" in events[-1]
        await site.until(lambda: site.server.should_exit and not fake.alive)


# ---------------------------------------------------------------- the start
async def test_the_engine_is_announced_once_it_is_ready() -> None:
    async with run_server() as site:
        await site.until(lambda: len(site.announced) == 1)
        assert site.announced[0].context == 4096


async def test_a_model_that_cannot_be_loaded_ends_the_server_with_a_reason() -> None:
    async with run_server(engine(starts=["load_failed"]), ready=False) as site:
        await site.until(lambda: site.server.should_exit)
        assert isinstance(site.server.failure, StartupError)
        assert "config.json" in str(site.server.failure)


async def test_a_server_can_be_ended_while_its_model_loads() -> None:
    fake = engine(load_seconds=60)
    async with run_server(fake, ready=False) as site:
        site.server.handle_exit(signal.SIGTERM, None)
        await site.until(lambda: site.server.should_exit)
        assert site.server.failure is None
        assert not fake.alive


# ---------------------------------------------------------------- as a process
def marathon(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "server.cli", *arguments]
    home = Path(__file__).parent.parent
    scrubbed = {name: value for name, value in os.environ.items() if not name.startswith("MARATHON_")}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=home,
        env={**scrubbed, "PYTHONPATH": ".", **environment},
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def refused(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    for word in words:
        assert word in ended.stderr


def test_what_cannot_start_ends_with_one_line_and_exit_code_2(taken_port: int, tmp_path: Path) -> None:
    free = "--port=0"
    refused(marathon("serve", "--nonsense"), "--nonsense")
    refused(marathon("serve", "--port", "x"), "--port", "'x'")
    refused(marathon("serve", f"--port={taken_port}"), str(taken_port), "in use")
    refused(marathon("serve", "--host=0.0.0.0"), "--api-key")
    refused(marathon("serve", free, f"--model={tmp_path}"), "config.json")
    refused(marathon("serve", free, f"--model={tmp_path / 'nothing'}"), "nothing")
    refused(marathon("serve", free, MARATHON_NONSENSE="1"), "MARATHON_NONSENSE")
    refused(marathon("nonsense"), "nonsense")


def test_help_names_every_setting_and_the_bare_command_is_help() -> None:
    from server.settings import Settings, option

    shown = marathon("serve", "--help")
    assert shown.returncode == 0
    for name in Settings.model_fields:
        assert option(name) in shown.stdout
    bare = marathon()
    assert (bare.returncode, bare.stderr) == (0, "")
    assert "serve" in bare.stdout
    assert marathon("--version").stdout.startswith("marathon ")


# ---------------------------------------------------------------- HTTP at the socket
async def raw(site: Site, version: str, body: dict[str, Any]) -> tuple[str, bytes]:
    """A request over a bare socket, read until the server closes."""
    content = json.dumps({"messages": USER, **body}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(site.url.rsplit(":", 1)[1]))
    writer.write(
        f"POST /v1/chat/completions HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        f"Connection: close\r\n\r\n".encode()
        + content
    )
    head, _, rest = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head.decode(), rest


async def test_http_1_0_clients_get_no_chunks_and_the_end_of_the_connection() -> None:
    async with run_server() as site:
        head, rest = await raw(site, "1.0", {"stream": True})
        assert " 200 " in head
        assert "transfer-encoding" not in head.lower()
        assert head.lower().count("connection:") == 1
        assert rest.startswith(b"data: {")
        assert rest.endswith(b"data: [DONE]\n\n")
        head, rest = await raw(site, "1.0", {})
        assert json.loads(rest)["object"] == "chat.completion"
        head, rest = await raw(site, "1.1", {"stream": True})
        assert "transfer-encoding: chunked" in head.lower()


async def test_a_crash_is_survived_by_a_stream() -> None:
    fake = engine(step_seconds=0.02)
    async with run_server(fake) as site:
        task, _ = await begun(site)
        fake.die()
        events = await asyncio.wait_for(task, 10)
        assert events[-1] == "[DONE]"
        assert "".join(c["delta"].get("content") or "" for e in events[:-1] for c in e["choices"]) == (
            "Hello there, how are you?"
        )
        assert (await site.client.get("/health")).json()["engine"]["restarts"] == 1


async def test_a_client_that_leaves_before_its_request_is_whole_is_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    async with run_server() as site:
        _, writer = await asyncio.open_connection("127.0.0.1", int(site.url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        await site.until(lambda: bool(site.server.server_state.tasks))
        writer.close()
        await writer.wait_closed()
        await site.until(lambda: not site.server.server_state.tasks)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
