"""The requests of coding agents in their own shapes: accepted, streamed, answered in the order that they rely on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import agent_requests as agents
import httpx
import messaging
import pytest
import responding
from serving import Site, engine, run_server, says

from loadtests.zoo import scripted
from server.api import messages as messages_route
from server.api import responses as responses_route
from server.api.input.messages_schema import MessagesRequest
from server.api.input.responses_schema import ResponsesRequest
from server.api.prepare import render
from server.settings import load
from server.text.tokenizer import Tokenizer

HEADERS = {
    "codex": {"accept": "text/event-stream", "accept-encoding": "zstd,gzip", "session-id": "a", "originator": "codex"},
    "claude": {
        "authorization": "Bearer none",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "one,another",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-stainless-timeout": "600",
    },
}
SHELL = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>'
BASH = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'
CLOSE = '<tool_call>\n{"name": "multi_agent_v1__close_agent", "arguments": {"target": "b"}}\n</tool_call>'


def patching() -> str:
    text = agents.PATCH.replace("\n", "\\n")
    return f'<tool_call>\n{{"name": "apply_patch", "arguments": {{"input": "{text}"}}}}\n</tool_call>'


async def sent(site: Site, path: str, body: dict[str, Any], agent: str) -> httpx.Response:
    answer = await site.post(path, body, **HEADERS[agent])
    assert answer.status_code == 200, answer.text
    return answer


# ---------------------------------------------------------------- Codex
CODEX = {
    "first": agents.codex,
    "with a call and its result": lambda: agents.codex(1),
    "with a custom tool and a namespace": lambda: agents.codex(2, reasoning={"effort": "medium"}),
    "compaction": agents.codex_compaction,
    "after compaction": agents.codex_after_compaction,
}
ITEMS = {  # events of an item, between those of its beginning and end
    "reasoning": ["content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"],
    "message": ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
    "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
    "custom_tool_call": ["custom_tool_call_input.delta", "custom_tool_call_input.done"],
}
ANSWERS = {
    "I will look. " + SHELL: ["message", "function_call"],
    patching(): ["custom_tool_call"],
    CLOSE + SHELL: ["function_call", "function_call"],
}


@pytest.mark.parametrize("make", CODEX.values(), ids=CODEX)
@pytest.mark.parametrize("answer", ANSWERS, ids=["text and call", "patch", "two calls"])
async def test_codex_is_answered_item_by_item(make: Callable[[], dict[str, Any]], answer: str) -> None:
    body = make()
    kinds = ANSWERS[answer]
    if not body["tools"]:
        kinds = ["message"]
    async with run_server(engine(say=says(answer))) as site:
        events = responding.events_of((await sent(site, responding.PATH, body, "codex")).text)
    expected = ["created", "in_progress"]
    for kind in kinds:
        expected += ["output_item.added", *ITEMS[kind], "output_item.done"]
    assert responding.kinds(events) == [*expected, "completed"]
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == kinds
    assert last["output"] == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert {"input_tokens", "output_tokens", "total_tokens"} <= last["usage"].keys()


async def test_codex_finds_its_tools_under_its_own_names() -> None:
    async with run_server(engine(say=says(CLOSE + patching()))) as site:
        answer = await sent(site, responding.PATH, agents.codex(2), "codex")
        close, patch = responding.events_of(answer.text)[-1]["response"]["output"]
    assert (close["namespace"], close["name"]) == ("multi_agent_v1", "close_agent")
    assert (patch["name"], patch["input"]) == ("apply_patch", agents.PATCH)


async def test_the_schema_of_codexs_output_reaches_the_engine() -> None:
    async with run_server() as site:
        await sent(site, responding.PATH, agents.codex_with_a_schema() | {"tools": []}, "codex")
        [submitted] = site.fake.submits[-1:]
    assert "enum" in str(submitted)


# ---------------------------------------------------------------- Claude Code
CLAUDE = {
    "first": agents.claude,
    "with a call and its result": lambda: agents.claude(1),
    "with a tool that was searched for": lambda: agents.claude(2),
    "with that tool's result": lambda: agents.claude(3),
    "continued": agents.claude_continued,
    "without betas": lambda: agents.claude(1, thinking={"type": "adaptive"}),
}


@pytest.mark.parametrize("make", CLAUDE.values(), ids=CLAUDE)
async def test_claude_code_is_answered_block_by_block(make: Callable[[], dict[str, Any]]) -> None:
    async with run_server(engine(say=says("I will look. " + BASH))) as site:
        answer = await sent(site, "/v1/messages?beta=true", make(), "claude")
    events = messaging.events_of(answer.text)
    blocks = [(event["index"], event["content_block"]["type"]) for event in events if "content_block" in event]
    assert blocks == [(0, "text"), (1, "tool_use")]
    assert messaging.kinds(events)[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_claude_codes_counts_are_answered_whatever_the_query_is() -> None:
    async with run_server() as site:
        answer = await sent(site, "/v1/messages/count_tokens?beta=true", agents.claude_count(), "claude")
        assert answer.json()["input_tokens"] > 0


# ---------------------------------------------------------------- as the model reads it
@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its template refuses a system message that isn't the first."""
    folder: Path = tmp_path_factory.mktemp("strict")
    return Tokenizer.load(
        scripted.write(folder, {"dd": [["Hello", " there."]], "ab": [["Hello", " you."]]}), trust_remote_code=False
    )


def of_codex(tokenizer: Tokenizer, body: dict[str, Any]) -> Sequence[int]:
    talk, _ = responses_route.conversation(ResponsesRequest.model_validate(body), load({}))
    return render(tokenizer, talk).ids


def of_claude(tokenizer: Tokenizer, body: dict[str, Any]) -> Sequence[int]:
    request = MessagesRequest.model_validate(body)
    return render(tokenizer, messages_route.conversation(request, load({}), messages_route.sampling(request))).ids


@pytest.mark.parametrize(
    ("prompt", "requests"),
    [
        (of_codex, [agents.codex(turns) for turns in range(3)]),
        (of_claude, [agents.claude(turns) for turns in range(4)]),
    ],
    ids=["Codex", "Claude Code"],
)
def test_each_prompt_begins_with_the_one_before_it(
    prompt: Callable[[Tokenizer, dict[str, Any]], Sequence[int]], requests: list[dict[str, Any]], strict: Tokenizer
) -> None:
    prompts = [prompt(strict, body) for body in requests]
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before
