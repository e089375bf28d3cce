"""Whatever ends an answer, the next turn of its conversation reads only what that turn adds: real engines over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from serving import payloads

from server import app, serve
from server.serving.listening import listen
from server.settings import load

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURNS = 5
SYSTEM = "You answer in a word or two, and never explain at length what you were not asked to explain. " * 3
CALL = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
ENDS: dict[str, dict[str, Any]] = {
    "stop string": {"stop": ["e", "a", "o", "i"], "ignore_eos": True, "max_tokens": 100},
    "stop token": {"stop_token_ids": list(range(3, 400)), "min_tokens": 20, "max_tokens": 100},
    "length": {"ignore_eos": True, "max_tokens": 20},
    "one token": {"ignore_eos": True, "max_tokens": 1},
    "tool call": {"tools": [CALL], "tool_choice": "required", "max_tokens": 100},
    "disconnect": {"ignore_eos": True, "stream": True},
}
PROMPT, CACHED = "marathon_prompt_tokens_total", "marathon_cached_prompt_tokens_total"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["llama", "gemma3_text", "qwen3_5"])
async def client(request: pytest.FixtureRequest, tiny: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Of a server over a real engine: caches that can be trimmed, windows of 32 positions, recurrent states."""
    settings = load({"model": str(tiny(request.param)), "port": 0, "log_level": "error", "spare_engine": False})
    served = app.serving(settings)
    server = serve.Server(app.create_app(served), served.supervisor, settings, lambda ready: None)
    (sock,) = listen(settings.host, 0)
    task = asyncio.create_task(server.serve_on([sock]))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        async with asyncio.timeout(120):
            while not served.supervisor.is_ready:
                await asyncio.sleep(0.02)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            yield client
    finally:
        server.handle_exit(2, None)
        server.handle_exit(2, None)
        await asyncio.wait_for(task, 30)


async def say(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """(the assistant's message, tokens of the prompt, of which were cached); a stream is left after ten chunks."""
    if not body.get("stream"):
        answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"], usage["prompt_tokens"], cached
    before, text = await counts(client), ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        chunks = payloads(response)
        for _ in range(10):
            text += (await anext(chunks))["choices"][0]["delta"].get("content") or ""
    async with asyncio.timeout(20):
        while (after := await counts(client))["marathon_requests_running"]:
            await asyncio.sleep(0.01)
    prompt, cached = (after[name] - before[name] for name in (PROMPT, CACHED))
    return {"role": "assistant", "content": text}, int(prompt), int(cached)


async def counts(client: httpx.AsyncClient) -> dict[str, float]:
    lines = [line.split() for line in (await client.get("/metrics")).text.splitlines() if "{" not in line]
    return {name: float(value) for name, value in (line for line in lines if len(line) == 2)}


@pytest.mark.parametrize("end", ENDS)
async def test_each_turn_finds_what_the_turn_before_has_read(client: httpx.AsyncClient, end: str) -> None:
    history: list[dict[str, Any]] = [{"role": "system", "content": f"{end}. {SYSTEM}"}]
    before = 0
    for turn in range(TURNS):
        history.append({"role": "user", "content": f"Question {turn}: which colour has the {'very ' * turn}tall door?"})
        answer, prompt, cached = await say(client, {"messages": history, "temperature": 0.7, **ENDS[end]})
        assert cached >= 0.9 * before, f"turn {turn}"
        before = prompt
        history.append(answer)
        history += [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in answer.get("tool_calls") or ()]
