"""pydantic-ai over each of the three routes: plain, streamed, tools, thoughts, typed output."""

from __future__ import annotations

import asyncio
import os
from importlib.metadata import version
from typing import Literal

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ThinkingPart, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL, KEY = (os.environ[f"MARATHON_CLIENT_{name}"] for name in ("URL", "MODEL", "KEY"))
openai = OpenAIProvider(base_url=URL, api_key=KEY)
anthropic = AnthropicProvider(
    anthropic_client=AsyncAnthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
)
MODELS = [
    OpenAIChatModel(MODEL, provider=openai),
    OpenAIResponsesModel(MODEL, provider=openai),
    AnthropicModel(MODEL, provider=anthropic),
]


class City(BaseModel, extra="forbid"):
    name: Literal["Oslo"]


async def check(model) -> None:
    agent, asked = Agent(model), []

    @agent.tool_plain
    def look_up(key: str) -> str:
        asked.append(key)
        return f"{key} is far"

    whole = await agent.run("SCRIPT:ab Where?")
    assert whole.output == "It is Oslo.", whole.output
    assert asked == ["oslo"], asked
    thoughts = [thought(part) for message in whole.new_messages() for part in message.parts if is_thought(part)]
    assert thoughts == ["I look it up.", "I have it now."], thoughts
    assert whole.usage.input_tokens > 0 and whole.usage.output_tokens > 0

    async with agent.run_stream("SCRIPT:ab Where?") as streamed:
        pieces = [piece async for piece in streamed.stream_text(delta=True)]
    assert "".join(pieces) in {"One moment.", "It is Oslo."}, pieces

    later = await agent.run("SCRIPT:dd Thanks.", message_history=whole.all_messages())
    assert later.output == "Hello there, friend.", later.output

    short = {"max_tokens": 200}
    made = await Agent(model, output_type=ToolOutput(City), model_settings=short).run("SCRIPT:fi A city.")
    assert made.output == City(name="Oslo"), made.output
    if not isinstance(model, AnthropicModel):  # of a model that it doesn't know it supposes that it takes no schema
        formed = await Agent(model, output_type=NativeOutput(City), model_settings=short).run("SCRIPT:js A city.")
        assert formed.output == City(name="Oslo"), formed.output
    try:
        await Agent(model, model_settings={"temperature": 3}).run("Hello")
    except ModelHTTPError as error:
        assert error.status_code == 400, error
    else:
        raise AssertionError("ModelHTTPError wasn't raised")


def is_thought(part: object) -> bool:
    return isinstance(part, ThinkingPart)


def thought(part: ThinkingPart) -> str:
    """Of the Responses API it takes summaries for the content, and keeps the thought itself beside."""
    raw = (part.provider_details or {}).get("raw_content", [])
    return part.content or "".join(raw)


async def main() -> None:
    for model in MODELS:
        await check(model)
        print(type(model).__name__)


asyncio.run(main())
print("pydantic-ai", version("pydantic-ai-slim"))
