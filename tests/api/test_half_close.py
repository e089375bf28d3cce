"""A client that sends no more is distinguished from one that has left; each in every protocol and at every moment."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest
from serving import HELLO, Site, engine, run_server, says
from wire import CHAT, TEXT, asks, connected, on_every_loop, post, shown

ENDLESS = says("word ", stop=False)
EVERY = [(path, stream, version) for path in (CHAT, TEXT) for stream in (False, True) for version in ("1.0", "1.1")]


@on_every_loop
@pytest.mark.parametrize("moment", ["at once", "while the prompt is read", "in the answer"])
async def test_a_client_that_only_stops_sending_gets_its_whole_answer_and_the_end(moment: str) -> None:
    seconds = {"at once": 0.0, "while the prompt is read": 0.1, "in the answer": 0.35}[moment]

    async def ask(site: Site, path: str, stream: bool, version: str) -> None:
        body = asks(path, stream=stream, max_tokens=30)
        async with connected(site, post(path, body, version=version), eof=not seconds) as wire:
            if seconds:
                await asyncio.sleep(seconds)
                wire.writer.write_eof()
            answer = await wire.answer()
            assert answer.status == 200
            assert shown(answer) == HELLO
            assert await wire.end() == b""

    async with run_server(engine(prefill_seconds=0.2, step_seconds=0.03)) as site:
        await asyncio.gather(*[ask(site, *case) for case in EVERY])


@on_every_loop
async def test_a_client_that_leaves_frees_its_row_within_a_step() -> None:
    fake = engine(say=ENDLESS, step_seconds=0.05, context=10**6)
    async with run_server(fake) as site:
        for path, stream, version in EVERY:
            async with connected(site, post(path, asks(path, stream=stream, max_tokens=10**5), version=version)):
                await site.until(lambda: bool(fake.rows))
                await asyncio.sleep(0.1)
            left = time.monotonic()
            await site.until(lambda: not fake.rows)
            assert time.monotonic() - left < 1, (path, stream, version)


@on_every_loop
async def test_a_client_that_stops_sending_and_leaves_later_frees_its_row() -> None:
    fake = engine(say=ENDLESS, step_seconds=0.05, context=10**6)
    async with run_server(fake) as site, contextlib.AsyncExitStack() as clients:
        for path, stream, version in EVERY:
            request = post(path, asks(path, stream=stream, max_tokens=10**5), version=version)
            await clients.enter_async_context(connected(site, request, eof=True))
        await site.until(lambda: len(fake.rows) == len(EVERY))
        await asyncio.sleep(0.5)
        assert len(fake.rows) == len(EVERY)
        await clients.aclose()
        await site.until(lambda: not fake.rows)


@on_every_loop
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_resets_the_connection_frees_its_row_at_once(stream: bool) -> None:
    fake = engine(say=ENDLESS, step_seconds=0.05, context=10**6)
    request = post(CHAT, asks(CHAT, stream=stream, max_tokens=10**5))
    async with run_server(fake) as site, connected(site, request) as wire:
        await site.until(lambda: bool(fake.rows))
        wire.writer.transport.abort()
        await site.until(lambda: not fake.rows, seconds=1)


@on_every_loop
async def test_what_waits_in_the_queue_is_left_as_well() -> None:
    fake = engine(say=ENDLESS, step_seconds=0.05, context=10**6)
    async with run_server(fake, max_rows=1) as site:
        body = asks(CHAT, max_tokens=10**5)
        async with connected(site, post(CHAT, body)):
            await site.until(lambda: bool(fake.rows))
            async with connected(site, post(CHAT, body)):
                await site.until(lambda: site.served.supervisor.waiting == 1)
            await site.until(lambda: site.served.supervisor.waiting == 0)
            assert fake.rows


@on_every_loop
@pytest.mark.parametrize("local", [True, False])
async def test_a_client_elsewhere_is_asked_by_an_interim_answer(local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.api.middleware.presence.Presence.is_local", local)
    fake = engine(prefill_seconds=0.4)
    async with run_server(fake) as site:
        async with connected(site, post(TEXT, asks(TEXT)), eof=True) as wire:
            raw = await wire.end(10)
            *interim, last = raw.split(b"HTTP/1.1 ")[1:]
            assert last.startswith(b"200 OK")
            assert set(interim) == (set() if local else {b"100 Continue\r\n\r\n"})
        fake.prefill_seconds = 30
        async with connected(site, post(TEXT, asks(TEXT))):
            await site.until(lambda: bool(fake.rows))
        await site.until(lambda: not fake.rows, seconds=1)


@on_every_loop
async def test_an_answer_is_followed_by_those_that_were_asked_for_before_the_end() -> None:
    async with run_server(engine(step_seconds=0.01)) as site:
        several = post(CHAT, asks(CHAT)) + post(TEXT, asks(TEXT, stream=True)) + post(CHAT, asks(CHAT))
        async with connected(site, several, eof=True) as wire:
            assert [shown(await wire.answer()) for _ in range(3)] == [HELLO] * 3
            assert await wire.end() == b""


@on_every_loop
async def test_a_request_that_ends_too_soon_is_400() -> None:
    line = b"POST /v1/completions HTTP/1.1\r\n"
    head = line + b"Host: localhost\r\n"
    counted, chunked = head + b"Content-Length: 50\r\n\r\n", head + b"Transfer-Encoding: chunked\r\n\r\n"
    cut = [line[:24], line, head, counted, counted + b"{", chunked + b"5\r\n{", chunked + b"1\r\n{\r\n"]
    async with run_server() as site:
        for request in [*cut, *(part.replace(b"1.1", b"1.0") for part in cut)]:
            for pieces in ([request], [request[:20], request[20:]]):
                async with connected(site, *pieces, eof=True) as wire:
                    answer = await wire.answer()
                    assert (answer.status, answer.error.code) == (400, "invalid_value")
                    assert "before it was whole" in answer.error.message
                    assert await wire.end() == b""
            async with connected(site, post(CHAT, asks(CHAT)) + request, eof=True) as wire:
                assert shown(await wire.answer()) == HELLO
                end = await wire.end()
                assert not end or end.startswith(b"HTTP/1.1 400 ")


@on_every_loop
async def test_an_idle_connection_ends_with_its_client() -> None:
    async with run_server() as site:
        for pieces in ([], [post(CHAT, asks(CHAT))]):
            async with connected(site, *pieces) as wire:
                for _ in pieces:
                    await wire.answer()
                wire.writer.write_eof()
                assert await wire.end(1) == b""


# ---------------------------------------------------------------- slow readers
@on_every_loop
async def test_a_reader_that_takes_a_little_at_a_time_is_not_dropped() -> None:
    fake = engine(say=says("a long word " * 50, stop=False), step_seconds=0.0, context=10**9)
    async with run_server(fake, send_timeout_seconds=1) as site:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # a large one is acknowledged in large steps
        sock.connect(("127.0.0.1", int(site.url.rpartition(":")[2])))
        sock.setblocking(False)
        body = asks(CHAT, stream=True, n=8, logprobs=True, top_logprobs=2)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, post(CHAT, body))
        began = time.monotonic()
        while time.monotonic() - began < 2.5:
            assert await asyncio.wait_for(loop.sock_recv(sock, 8192), 3)
            await asyncio.sleep(0.25)
        assert len(fake.rows) == 8
        await site.until(lambda: not fake.rows, seconds=5)  # it takes no more
        sock.close()
