"""HTTP by hand: bytes to a server's socket, and the answers that come back."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop
from serving import USER, Site

from server.api.output.schema import Error, ErrorBody

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as it came. `body`: without the framing of chunks."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Error:
        assert self.headers["content-type"] == "application/json"
        return ErrorBody.model_validate_json(self.body).error


@dataclass(slots=True)
class Wire:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self, seconds: float = 10, *, method: str = "POST") -> Answer:
        """The next answer that isn't an interim one."""
        async with asyncio.timeout(seconds):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
            pairs = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
            headers, status = dict(pairs), int(first.split(" ")[1])
            assert first.startswith("HTTP/1.1 ")
            assert len(headers) == len(pairs), "a header comes once"
            if status < 200:
                return await self.answer(seconds, method=method)
            return Answer(status, headers, b"" if method == "HEAD" else await self._body(headers))

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self.reader.read()
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        assert await self.reader.readline() == b"\r\n"
        return body

    async def end(self, seconds: float = 3) -> bytes:
        """What comes until the server ends the connection, which it should do soon."""
        return await asyncio.wait_for(self.reader.read(), seconds)


@asynccontextmanager
async def connected(site: Site, *pieces: bytes, eof: bool = False) -> AsyncIterator[Wire]:
    """A connection on which `pieces` are sent, each by itself, and after which, with `eof`, no more is sent."""
    port = int(site.url.rpartition(":")[2])
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        for number, piece in enumerate(pieces):
            if number:
                await asyncio.sleep(0.03)
            writer.write(piece)
        if eof:
            writer.write_eof()
        yield Wire(reader, writer)
    finally:
        writer.close()


def head(method: str, target: str, *lines: str, version: str = "1.1", host: bool = True) -> bytes:
    every = [f"{method} {target} HTTP/{version}", *["Host: localhost"] * host, *lines]
    return "\r\n".join([*every, "", ""]).encode("latin-1")


def post(target: str, body: Any, *lines: str, version: str = "1.1") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", target, f"Content-Length: {len(content)}", *lines, version=version) + content


def asks(path: str, **fields: Any) -> dict[str, Any]:
    """A body for the path."""
    return ({"messages": USER} if path == CHAT else {"prompt": "Say"}) | fields


def chunked(*parts: bytes, trailer: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailer + b"\r\n"


def shown(answer: Answer) -> str:
    """The text of an answer, streamed or not."""
    streamed = answer.headers["content-type"].startswith("text/event-stream")
    if not streamed:
        return _text(answer.json["choices"])
    events = [line[6:] for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    return "".join(_text(json.loads(event)["choices"]) for event in events[:-1])


def _text(choices: list[Any]) -> str:
    reported = [
        choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") for choice in choices
    ]
    return "".join(text or "" for text in reported)


# ---------------------------------------------------------------- event loops
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def on_every_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test, once on asyncio's loop and once on uvloop's: they treat the ends of connections each in its own way."""

    def run(loop: str, **arguments: Any) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(test(**arguments))

    taken = inspect.signature(test)
    loop = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = taken.replace(parameters=[*taken.parameters.values(), loop])  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.pytestmark = [*getattr(test, "pytestmark", []), pytest.mark.parametrize("loop", LOOPS).mark]  # type: ignore[attr-defined]
    return run
