"""Requests of every kind, and whether each ended in one truthful way. Never imports MLX."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import httpx

AGENT = "agent"
KINDS = ("short", "short", "long", "long prompt", "disconnect", "deadline", "schema", "tools", "plain")
FOREVER = 30_000  # tokens of a request that meets its deadline first
WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["one", "two"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
FINISHES = ("stop", "length", "tool_calls")


@dataclass(slots=True)
class AnswerEnd:
    """What a client saw of one answer's end."""

    limit: int
    status: int = 0
    finishes: int = 0
    finish: str = ""
    tokens: int | None = None
    error: str = ""
    done: bool = False
    left: bool = False  # by the client
    text: str = ""
    after_end: bool = False  # something came behind the end

    @property
    def name(self) -> str:
        if self.left:
            return "left"
        return self.finish or self.error or f"status {self.status}"


def body_of(kind: str, rng: random.Random, history: Sequence[dict[str, str]] = ()) -> dict[str, Any]:
    """A chat request of the kind."""
    sizes = {"long prompt": 900, AGENT: 40}
    limits = {"long": 400, "deadline": FOREVER, "disconnect": FOREVER, "schema": 200, "tools": 200}
    content = " ".join(rng.choices(WORDS, k=sizes.get(kind, rng.randint(3, 30))))
    body: dict[str, Any] = {
        "messages": [*history, {"role": "user", "content": content}],
        "max_tokens": limits.get(kind, rng.randint(8, 48)),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "seed": rng.getrandbits(31),
        "stream": kind != "plain",
    }
    if kind == "schema":
        form = {"name": "answer", "schema": SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    if kind == "tools":
        body |= {"tools": [TOOL], "tool_choice": "required"}
    if kind in ("deadline", "disconnect", "long"):
        body["ignore_eos"] = True
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return body


async def ask(client: httpx.AsyncClient, kind: str, body: dict[str, Any], gaps: list[float]) -> AnswerEnd:
    """The end of one answer; the times between its pieces, in ms, go into `gaps`."""
    ending = AnswerEnd(body["max_tokens"])
    if not body["stream"]:
        response = await client.post("/v1/chat/completions", json=body)
        ending.status = response.status_code
        take(ending, response.json())
        ending.done = True
        return ending
    times: list[float] = []
    leaves = len(body["messages"][-1]["content"]) % 20 if kind == "disconnect" else None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        ending.status = response.status_code
        async for line in response.aiter_lines():
            read_line(ending, line)
            if line.startswith("data: {"):
                times.append(perf_counter())
            if leaves is not None and len(times) > leaves:
                ending.left = True
                break
    gaps += [1e3 * (b - a) for a, b in pairwise(times)]
    return ending


def read_line(ending: AnswerEnd, line: str) -> None:
    """Take one line of an event stream, or of the body of a refusal."""
    if line.startswith("data: [DONE]"):
        ending.done = True
    elif line.startswith(("data: {", "{")):
        ending.after_end = ending.after_end or ending.done
        take(ending, json.loads(line.removeprefix("data: ")))


def take(ending: AnswerEnd, content: dict[str, Any]) -> None:
    """What an event, or a whole answer, says of the end."""
    if error := content.get("error"):
        ending.error = str(error.get("code") or error.get("type"))
        return
    ending.tokens = (content.get("usage") or {}).get("completion_tokens", ending.tokens)
    for choice in content["choices"]:
        piece = choice.get("delta") or choice.get("message") or {}
        ending.text += piece.get("content") or ""
        if choice.get("finish_reason"):
            ending.finish = choice["finish_reason"]
            ending.finishes += 1


def is_truthful(kind: str, ending: AnswerEnd) -> str:
    """What is wrong with an ending, in words; empty for a truthful one: one reason to finish that fits the tokens, or
    one error that the request could meet."""
    if ending.left:
        return ""
    if ending.error:
        return "" if ending.error == "timeout" and not ending.finishes else f"error {ending.error}, {ending.finish}"
    if ending.finishes != 1 or ending.finish not in FINISHES or not ending.done or ending.after_end:
        return f"status {ending.status}, {ending.finishes} endings, {ending.finish!r}, whole: {ending.done}"
    if (ending.finish == "length") != (ending.tokens == ending.limit):
        return f"{ending.finish} after {ending.tokens} of {ending.limit} tokens"
    return _content_fault(kind, ending)


def _content_fault(kind: str, ending: AnswerEnd) -> str:
    if kind == "tools" and ending.finish == "stop":
        return "no tool was called, though one was required"
    if kind == "schema" and ending.finish == "stop":
        try:
            answer = json.loads(ending.text)
        except ValueError:
            return f"no JSON: {ending.text[:80]!r}"
        return "" if set(answer) == {"kind", "count"} else f"against the schema: {ending.text[:80]!r}"
    return ""
