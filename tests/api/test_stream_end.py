"""A streamed answer's end: a chunk of its own, for every reason, choice and protocol, with nothing lost beside it."""

from __future__ import annotations

from typing import Any

import pytest
from serving import HELLO, MODEL, USER, engine, run_server, says

CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": USER}, TEXT: {"prompt": "Say"}}
ENDS: list[tuple[str, dict[str, Any], str]] = [  # what the model says, wishes, reason
    (HELLO, {}, "stop"),
    (HELLO, {"max_tokens": 3}, "length"),
    (HELLO, {"max_tokens": 1}, "length"),
    (HELLO, {"stop": "ow ar"}, "stop"),
    (HELLO, {"stop": HELLO[:1]}, "stop"),
    ("né 🎉", {"max_tokens": 4}, "length"),
    ("", {}, "stop"),
]


def shown(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


def by_index(events: list[Any], index: int) -> list[dict[str, Any]]:
    return [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("step_seconds", [0.0, 0.01], ids=["slow reader", "fast reader"])
async def test_a_client_that_reads_text_until_there_is_a_reason_reads_all_of_it(path: str, step_seconds: float) -> None:
    for said, wishes, reason in ENDS:
        async with run_server(engine(say=says(said), step_seconds=step_seconds)) as site:
            body = {**BODIES[path], "n": 2, **wishes}
            plain = (await site.post(path, {"model": MODEL, **body})).json()
            usage = {"stream_options": {"include_usage": True}}
            *events, last, done = await site.stream(path, {**body, **usage})
            assert (last["choices"], done) == ([], "[DONE]")
            assert last["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
            for whole in plain["choices"]:
                *chunks, end = by_index([*events, last], whole["index"])
                assert [choice["finish_reason"] for choice in chunks] == [None] * len(chunks)
                assert end["finish_reason"] == whole["finish_reason"] == reason
                assert (end["text"] == "") if path == TEXT else (end["delta"] == {})
                text = whole["text"] if path == TEXT else whole["message"]["content"]
                assert "".join(map(shown, chunks)) == text


async def test_tool_calls_end_in_a_chunk_of_their_own() -> None:
    async with run_server(engine(say=says(CALL))) as site:
        *chunks, end = by_index(await site.stream(CHAT, {"messages": USER, "tools": TOOLS}), 0)
        assert (end["delta"], end["finish_reason"]) == ({}, "tool_calls")
        assert all(choice["finish_reason"] is None for choice in chunks)


@pytest.mark.parametrize("path", BODIES)
async def test_scores_and_ids_come_with_the_text_and_the_end_repeats_none(path: str) -> None:
    scores = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    async with run_server(engine(say=says(HELLO))) as site:
        for wishes in ({}, {"max_tokens": 3}, {"stop": "ow ar"}):
            asked = {**BODIES[path], **scores, "return_token_ids": True, **wishes}
            whole = (await site.post(path, {"model": MODEL, **asked})).json()["choices"][0]
            *chunks, end = by_index(await site.stream(path, asked), 0)
            ids = [token for choice in [*chunks, end] for token in choice.get("token_ids") or []]
            assert ids == whole["token_ids"]
            key = "content" if path == CHAT else "tokens"
            reported = [entry for c in [*chunks, end] if c["logprobs"] for entry in c["logprobs"][key]]
            assert reported == whole["logprobs"][key]
            if "stop" not in wishes:
                assert not (end["logprobs"] or {}).get(key), "the text's chunks have shown them"


async def test_a_prompt_that_is_echoed_is_text_like_any_other() -> None:
    async with run_server(engine(say=says("", HELLO))) as site:
        for wishes in ({}, {"max_tokens": 2}, {"n": 2}):
            events = await site.stream(TEXT, {"prompt": "Say", "echo": True, **wishes})
            for index in range(wishes.get("n", 1)):
                *chunks, end = by_index(events, index)
                assert (end["text"], end["finish_reason"] is not None) == ("", True)
                assert "".join(map(shown, chunks)).startswith("Say")
