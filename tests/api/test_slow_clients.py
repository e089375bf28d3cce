"""Clients that stop in the middle of a request lose their connection; those that are slow don't."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from serving import HELLO, Site, engine, run_server
from wire import CHAT, TEXT, asks, connected, head, post, shown

from server.serving import http_connection

SECONDS = 0.4
BODY = post(TEXT, asks(TEXT)).partition(b"\r\n\r\n")[2]
COUNTED, CHUNKED = f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked"


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(http_connection, "HEAD_SECONDS", SECONDS)
    monkeypatch.setattr(http_connection, "BODY_SECONDS", SECONDS)
    async with run_server(engine()) as site:
        yield site


async def test_half_a_request_is_answered_408_and_its_connection_ends(site: Site) -> None:
    whole = post(TEXT, BODY)
    for pieces in (
        [b"G"],
        [whole[:40]],
        [head("POST", TEXT, COUNTED)[:-2]],
        [whole[:-1]],
        [head("POST", TEXT, COUNTED)],
        [head("POST", TEXT, CHUNKED) + b"5\r\nab"],
        [head("POST", TEXT, CHUNKED) + b"2\r\n{}\r\n"],
        [head("POST", TEXT, CHUNKED) + b"2\r\n{}\r\n0\r\n"],
        [head("GET", "/live"), whole[:-1]],
        [head("GET", "/live"), b"POST "],
        [post(TEXT, BODY), whole[:50]],
    ):
        async with connected(site, *pieces) as wire:
            for _ in pieces[1:]:
                assert (await wire.answer()).status == 200
            answer = await wire.answer()
            assert (answer.status, answer.error.code) == (408, "timeout"), pieces
            assert await wire.end() == b""


async def test_a_head_that_comes_byte_by_byte_has_no_more_time_than_another(site: Site) -> None:
    async with connected(site, *[bytes([byte]) for byte in head("GET", "/live")[:20]]) as wire:
        assert (await wire.answer()).status == 408


async def test_a_body_that_comes_slowly_is_taken(site: Site) -> None:
    step = len(BODY) // 4
    async with connected(site, head("POST", TEXT, COUNTED)) as wire:
        for start in range(0, len(BODY), step):
            await asyncio.sleep(SECONDS * 0.6)
            wire.writer.write(BODY[start : start + step])
        assert shown(await wire.answer()) == HELLO


async def test_an_answer_may_take_longer_than_a_client_may(site: Site) -> None:
    site.fake.step_seconds = SECONDS / 5
    async with connected(site, post(CHAT, asks(CHAT, stream=True)), b"GET /live HT") as wire:
        assert shown(await wire.answer()) == HELLO
        assert not (await wire.end()).startswith(b"HTTP/1.1 200")


async def test_a_client_that_waits_to_be_asked_for_its_body_has_time_until_then(site: Site) -> None:
    asked = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asked.wait()
        read = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(read))]})
        await send({"type": "http.response.body", "body": read})

    site.server.config.loaded_app = app
    async with connected(site, head("POST", TEXT, COUNTED, "Expect: 100-continue")) as wire:
        await asyncio.sleep(SECONDS * 2.5)
        asked.set()
        assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.writer.write(BODY)
        assert (await wire.answer()).body == BODY


async def test_a_client_whose_body_isnt_read_has_time_until_it_is(site: Site) -> None:
    """While a model loads, nothing reads bodies, and the system takes no more of a long one."""
    read, body = asyncio.Event(), b"x" * 20_000_000

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read.wait()
        length, more = 0, True
        while more:
            message = await receive()
            length += len(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
        await send({"type": "http.response.body", "body": b"%8d" % length})

    site.server.config.loaded_app = app
    async with connected(site, post(TEXT, body)) as wire:
        await asyncio.sleep(SECONDS * 2.5)
        read.set()
        assert int((await wire.answer()).body) == len(body)


async def test_the_rest_of_a_body_that_was_refused_is_not_waited_for_for_ever(site: Site) -> None:
    async with connected(site, head("POST", "/nowhere", "Content-Length: 1000") + b"x") as wire:
        assert (await wire.answer()).status == 404
        assert await wire.end() == b""


async def test_a_connection_on_which_nothing_is_asked_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.server.config, "timeout_keep_alive", SECONDS)
    for pieces in ([], [b"\r\n"], [head("GET", "/live"), b"\r\n"]):
        async with connected(site, *pieces) as wire:
            for _ in pieces[1:]:
                assert (await wire.answer()).status == 200
            assert await wire.end() == b""
    await site.until(lambda: not site.server.server_state.connections)
