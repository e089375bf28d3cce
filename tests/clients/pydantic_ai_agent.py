"""pydantic-ai: text, stream, tools and typed output. Runs in an environment of its own."""

import asyncio
import os
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL, KEY = (os.environ[f"MARATHON_CLIENT_{name}"] for name in ("URL", "MODEL", "KEY"))
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))


class City(BaseModel, extra="forbid"):
    name: str = Field(max_length=8)
    size: Literal["small", "large"]


async def main() -> None:
    agent = Agent(model, model_settings={"max_tokens": 8, "temperature": 0})
    whole = await agent.run("Say hello.")
    assert whole.usage.output_tokens
    async with agent.run_stream("Say hello.") as streamed:
        assert await streamed.get_output() == whole.output
    for output in (NativeOutput(City), ToolOutput(City)):
        settings = {"max_tokens": 400, "temperature": 1, "parallel_tool_calls": False}
        typed = await Agent(model, output_type=output, model_settings=settings, retries=0).run("A city.")
        assert isinstance(typed.output, City), output
    try:
        await Agent(model, model_settings={"temperature": 3}).run("Hello")
    except ModelHTTPError as error:
        assert error.status_code == 400 and error.body["param"] == "temperature", error
    else:
        raise AssertionError("ModelHTTPError wasn't raised")


asyncio.run(main())
print("pydantic-ai", version("pydantic-ai-slim"))
