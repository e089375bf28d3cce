"""A real uvicorn on port 0 over a scripted engine, and small tools to talk to it."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fake_engine import FakeEngine
from prometheus_client import CollectorRegistry

from server import serve
from server.api.context import AppContext
from server.api.input import generic_tools
from server.app import create_app
from server.ipc import messages
from server.ipc.sequence import TokenSequence
from server.metrics import Metrics
from server.serving.listening import listen
from server.settings import Settings, load
from server.supervision.supervisor import Supervisor
from server.text.tokenizer import Tokenizer

TOKENIZER = Path(__file__).parents[1] / "data" / "tokenizer"
MODEL = "tiny"
HELLO = "Hello there, how are you?"
USER = [{"role": "user", "content": "Say hello."}]


@functools.cache
def tokenizer() -> Tokenizer:
    return generic_tools.with_format(Tokenizer.load(TOKENIZER, trust_remote_code=False))


def says(
    text: str, *more: str, stop: bool = True, tokens: Tokenizer | None = None
) -> Callable[[TokenSequence, int], int]:
    """A script: choice n says the n-th text (the last one if there are fewer), then an end token or, unless `stop`, its
    last token for ever."""
    tokens = tokens or tokenizer()
    scripts = [tokens.encode(one, special=True, bos=False) for one in (text, *more)]
    end = min(tokens.eos_ids)

    def say(sequence: TokenSequence, position: int) -> int:
        script = scripts[min(sequence.choice, len(scripts) - 1)]
        if position < len(script):
            return script[position]
        return end if stop else script[-1]

    return say


def engine(**options: Any) -> FakeEngine:
    options.setdefault("say", says(HELLO))
    return FakeEngine(vocab_size=tokenizer().vocab_size, **options)


@dataclass(slots=True)
class Site:
    """A server that runs."""

    served: AppContext
    fake: FakeEngine
    server: serve.Server
    url: str
    client: httpx.AsyncClient
    announced: list[messages.Ready] = field(default_factory=list)

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"model": MODEL, "messages": USER, **fields})

    async def complete(self, prompt: Any = "Say", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The payloads of a stream, "[DONE]" included."""
        async with self.client.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as response:
            assert response.status_code == 200, await response.aread()
            return [payload async for payload in payloads(response)]

    async def stream_chat(self, **fields: Any) -> list[Any]:
        return await self.stream("/v1/chat/completions", {"messages": USER, **fields})

    async def stream_text(self, prompt: Any = "Say", **fields: Any) -> list[Any]:
        return await self.stream("/v1/completions", {"prompt": prompt, **fields})

    async def until(self, condition: Callable[[], bool], seconds: float = 5) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)


async def payloads(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def named_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream that names each by its type, in order; comments are left out."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
    return found


def settings(**values: Any) -> Settings:
    return load({"port": 0, "keepalive_seconds": 5, "drain_seconds": 2, "journal": "off", **values})


def build(fake: FakeEngine, tokens: Tokenizer, **values: Any) -> AppContext:
    chosen, metrics = settings(**values), Metrics(CollectorRegistry())
    supervisor = Supervisor(chosen, MODEL, metrics, spawn=fake.spawn)
    return AppContext(chosen, MODEL, 1_700_000_000, tokens, supervisor, metrics)


class PromptServer(serve.Server):
    """Notices its end within 10 ms, where uvicorn looks ten times a second."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def run_server(
    fake: FakeEngine | None = None, *, ready: bool = True, tokens: Tokenizer | None = None, **values: Any
) -> AsyncIterator[Site]:
    """Serves until the block is left; then it drains as after a signal."""
    fake = fake or engine()
    served = build(fake, tokens or tokenizer(), **values)
    announced: list[messages.Ready] = []
    server = PromptServer(create_app(served), served.supervisor, served.settings, announced.append)
    (sock,) = listen(served.settings.host, values.get("port", 0))
    task = asyncio.create_task(server.serve_on([sock]))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    # Without certificates, which plain HTTP doesn't need: they take longer to load than most tests.
    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=20) as client:
        site = Site(served, fake, server, url, client, announced)
        try:
            await site.until(lambda: server.started or task.done())
            if ready:
                await site.until(lambda: served.supervisor.is_ready)
            yield site
        finally:
            server.handle_exit(2, None)
            server.handle_exit(2, None)
            await asyncio.wait_for(task, 20)
