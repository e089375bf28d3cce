"""`marathon status` and `marathon top`: a running server's state, for people."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from commanding import COMMAND, in_thread, terminal
from serving import engine, run_server, says

Capture = pytest.CaptureFixture[str]

LONG = {"model": "tiny", "prompt": "a secret of mine", "max_tokens": 100_000, "stream": True}


async def test_a_healthy_server_is_shown_with_its_generations_and_exit_code_0(capsys: Capture) -> None:
    async with (
        run_server(engine(say=says("word", stop=False), step_seconds=0.05)) as site,
        site.client.stream("POST", "/v1/completions", json=LONG) as answer,
    ):
        pieces = answer.aiter_bytes()
        await anext(pieces)
        reported = await in_thread(capsys, "status", "--url", site.url)
        as_json = await in_thread(capsys, "status", "--json", "--url", f"{site.url}/v1")
    assert (reported.code, reported.err) == (0, "")
    first, *others = reported.out.splitlines()
    assert re.fullmatch(r"\w+: tiny, marathon [\d.]+, up for .*", first)
    assert any(re.search(r"sequences +1 of 32 running, 0 of 256 waiting", line) for line in others)
    assert re.fullmatch(r"  \d+ +\S*completions +decoding +\d+ s +\d+ +[\d,]+/[\d,]+ +\S+ +0", others[-1])
    assert "secret" not in reported.out
    assert "\033" not in reported.out
    assert json.loads(as_json.out)["verdict"]["level"] == "ok"


async def test_a_server_in_trouble_gives_exit_code_1_and_names_the_trouble(capsys: Capture) -> None:
    async with run_server(engine(pressure="hold")) as site:
        await site.until(lambda: site.served.feed.report().status.pressure == "hold")
        reported = await in_thread(capsys, "status", "--url", site.url)
    assert reported.code == 1
    assert "No new work starts until memory or buffers are free again." in reported.out


async def test_no_server_gives_exit_code_2_and_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARATHON_PORT", "1")
    reported = await in_thread(capsys, "status")
    assert (reported.code, reported.out) == (2, "")
    assert reported.err == "marathon: no server answers at http://127.0.0.1:1; `marathon serve` starts one\n"


@pytest.mark.parametrize("command", ["status", "top"])
@pytest.mark.parametrize("url", ["http://[", "http://", "http://host:port", "localhost:8080"])
async def test_an_address_that_is_none_is_one_line(command: str, url: str, capsys: Capture) -> None:
    reported = await in_thread(capsys, command, "--url", url)
    assert (reported.code, len(reported.err.splitlines())) == (2, 1)


async def test_a_key_is_taken_from_the_environment_and_its_lack_is_one_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(api_key=["sesame", "ключ"]) as site:
        without = await in_thread(capsys, "status", "--url", site.url)
        given = await in_thread(capsys, "status", "--url", site.url, "--api-key", "sesame")
        cyrillic = await in_thread(capsys, "status", "--url", site.url, "--api-key", "ключ")
        monkeypatch.setenv("MARATHON_API_KEY", "sesame")
        of_environment = await in_thread(capsys, "status", "--url", site.url)
    assert (given.code, cyrillic.code, of_environment.code) == (0, 0, 0)
    assert (without.code, len(without.err.splitlines())) == (2, 1)
    assert " answers 401: " in without.err


@pytest.mark.parametrize("command", ["status", "top"])
async def test_another_program_at_the_address_is_named_in_one_line(command: str, capsys: Capture) -> None:
    async with await asyncio.start_server(_other_program, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        reported = await in_thread(capsys, command, "--url", f"http://127.0.0.1:{port}")
    assert (reported.code, reported.out, len(reported.err.splitlines())) == (2, "", 1)
    assert "is no Marathon of this version" in reported.err


async def _other_program(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nevent: report\ndata: {}\n\n")
    await writer.drain()
    writer.close()


async def test_top_in_a_pipe_is_a_line_a_second_until_it_is_interrupted() -> None:
    async with run_server() as site:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "top", "--url", site.url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        lines = [(await asyncio.wait_for(process.stdout.readline(), 20)).decode() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, err) == (0, b"")
    for line in lines:
        assert re.match(r"\d\d:\d\d:\d\d (Loading|Healthy); speed 0\.0 tokens/s; sequences 0 of 32 running", line)


async def test_top_in_a_terminal_draws_over_its_last_picture_and_waits_for_a_server_that_is_away() -> None:
    async with run_server() as site, door(site.url) as url, terminal("top", "--url", url) as screen:
        await screen.until(f"No server answers at {url}")
        await screen.until("Ready; nothing is running.")
        assert screen.text.count("\x1b[H") >= 2
        site.server.handle_exit(2, None)
        await screen.until("it is asked again each second.\x1b[K\r\n\x1b[J")
        assert await screen.ctrl_c() == 0
    assert "Traceback" not in screen.text


@asynccontextmanager
async def door(url: str) -> AsyncIterator[str]:
    """Let every connection but the first through to the server."""
    turned_away: list[asyncio.StreamWriter] = []

    async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not turned_away:
            turned_away.append(writer)
            writer.close()
            return
        inner, onwards = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        onwards.write(await reader.readuntil(b"\r\n\r\n"))
        while piece := await inner.read(1 << 16):
            writer.write(piece)
        writer.close()
        onwards.close()

    async with await asyncio.start_server(enter, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_top_waits_for_a_server_whose_model_is_being_fetched() -> None:
    body = json.dumps({"error": {"message": "12 of 93 MB."}}).encode()
    answer = b"HTTP/1.1 503 No\r\nconnection: close\r\n\r\n" + body

    async def fetching(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(fetching, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with terminal("top", "--url", url) as screen:
            await screen.until("12 of 93 MB. It is asked again each second.")
            before = len(screen.text)
            await asyncio.sleep(1.5)
            await screen.until("12 of 93 MB.")
            assert await screen.ctrl_c() == 0
            assert len(screen.text) > before, "it was asked again"
