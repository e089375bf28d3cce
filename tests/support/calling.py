"""Models of every tool format, as far as the server sees them: a small tokenizer, and an engine that says a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import small_tokenizers as small
from fake_engine import FakeEngine
from serving import Site, run_server, says
from tokenizers import AddedToken

from server.text.tokenizer import Tokenizer

SPECIAL = {
    "kimi_k2": [
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
}


def tokenizer_of(parser: str, folder: Path) -> Tokenizer:
    """A tokenizer whose model writes calls in the format of this parser of mlx-lm's."""
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL.get(parser, [])]
    small.write(folder, lambda: small.byte_level(*special), tool_parser_type=parser)
    return Tokenizer.load(folder, trust_remote_code=False)


@asynccontextmanager
async def serving(parser: str, script: str, folder: Path, **options: Any) -> AsyncIterator[Site]:
    """A server of a model that says the script."""
    tokens = await asyncio.to_thread(tokenizer_of, parser, folder)
    fake = FakeEngine(vocab_size=tokens.vocab_size, say=says(script, tokens=tokens))
    async with run_server(fake, tokens=tokens, **options) as site:
        yield site


def function(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name} | ({"parameters": parameters} if parameters is not None else {})
    return {"type": "function", "function": made}


async def answers(site: Site, **fields: Any) -> dict[str, Any]:
    """The message of an answer, after holding the streamed one against the plain one. Random ids may differ."""
    plain = (await site.chat(**fields)).json()["choices"][0]
    streamed = folded(await site.stream_chat(**fields))
    assert without_random_ids(streamed) == without_random_ids(
        {"finish_reason": plain["finish_reason"], "message": shown(plain["message"])}
    )
    return plain["message"] | {"finish_reason": plain["finish_reason"]}


def shown(message: dict[str, Any]) -> dict[str, Any]:
    return {"content": message["content"] or "", "tool_calls": message.get("tool_calls") or []}


def without_random_ids(choice: dict[str, Any]) -> dict[str, Any]:
    calls = choice["message"]["tool_calls"]
    kept = [call if ":" in call["id"] else call | {"id": ""} for call in calls]
    return choice | {"message": choice["message"] | {"tool_calls": kept}}


def folded(events: list[Any]) -> dict[str, Any]:
    """A stream put together as a client does it."""
    content, calls, finish = "", [], None
    for choice in (c for event in events if event != "[DONE]" for c in event["choices"]):
        content += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls") or []:
            if piece["index"] == len(calls):
                calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    return {"finish_reason": finish, "message": {"content": content, "tool_calls": calls}}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or []]
