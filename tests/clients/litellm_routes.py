"""LiteLLM over Responses and Messages: as SDK, and as a proxy that other SDKs ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a price list

import anthropic
import litellm
import openai

URL, MODEL, KEY = (os.environ[f"MARATHON_CLIENT_{name}"] for name in ("URL", "MODEL", "KEY"))
BASE = URL.removesuffix("/v1")
PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
TOOL = {"type": "function", "name": "look_up", "parameters": PARAMETERS}
CLAUDE_TOOL = {"name": "look_up", "input_schema": PARAMETERS}
ASKED = [{"role": "user", "content": "SCRIPT:ab Where?"}]


def responses() -> None:
    given = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "tools": [TOOL], "max_retries": 0}
    whole = litellm.responses(input="SCRIPT:ab Where?", **given)
    [call] = [item for item in whole.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("look_up", {"key": "oslo"}), call
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "oslo is far"}
    said = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in whole.output]
    events = list(litellm.responses(input=[*ASKED, *said, result], stream=True, **given))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "It is Oslo.", texts
    assert events[-1].type == "response.completed", events[-1]


async def messages() -> None:
    given = {"model": f"anthropic/{MODEL}", "api_base": BASE, "api_key": KEY, "max_tokens": 200}
    whole = await litellm.anthropic.messages.acreate(messages=ASKED, tools=[CLAUDE_TOOL], **given)
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use"], kinds
    stream = await litellm.anthropic.messages.acreate(messages=ASKED, tools=[CLAUDE_TOOL], stream=True, **given)
    lines = b"".join([piece async for piece in stream]).decode()
    assert "event: message_stop" in lines, lines
    chat = await litellm.acompletion(messages=[{"role": "user", "content": "SCRIPT:dd Hello."}], **given)
    assert chat.choices[0].message.content == "Hello there, friend.", chat


# ---------------------------------------------------------------- the proxy
def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def proxy():
    """A running proxy's address."""
    route = {"api_base": URL, "api_key": KEY}
    models = [
        {"model_name": "through-responses", "litellm_params": {"model": f"openai/{MODEL}", **route}},
        {
            "model_name": "through-messages",
            "litellm_params": {"model": f"anthropic/{MODEL}", **route, "api_base": BASE},
        },
    ]
    Path("proxy.yaml").write_text(json.dumps({"model_list": models}), encoding="utf-8")
    port = free_port()
    command = [str(Path(sys.executable).parent / "litellm"), "--config", "proxy.yaml", "--port", str(port)]
    no_key = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
    environment = os.environ | no_key | {"NO_DOCS": "True", "LITELLM_TELEMETRY": "False"}
    with Path("proxy.log").open("wb") as log:
        process = subprocess.Popen([*command, "--host", "127.0.0.1"], stdout=log, stderr=log, env=environment)
    try:
        wait(f"http://127.0.0.1:{port}/health/liveliness", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def wait(url: str, process: subprocess.Popen) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        assert process.poll() is None, Path("proxy.log").read_text(encoding="utf-8")[-2000:]
        time.sleep(0.2)
    raise AssertionError("the proxy didn't start")


def through_the_proxy(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    with client.responses.stream(model="through-responses", input="SCRIPT:ab Where?", tools=[TOOL]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"], final.output
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    given = {"model": "through-messages", "max_tokens": 200, "messages": ASKED, "tools": [CLAUDE_TOOL]}
    with claude.messages.stream(**given) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"], message.content
    assert message.content[-1].input == {"key": "oslo"}


responses()
asyncio.run(messages())
with proxy() as running:
    through_the_proxy(running)
print("litellm", version("litellm"))
