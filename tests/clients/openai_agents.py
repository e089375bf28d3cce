"""openai-agents over its default, the Responses API: plain, streamed, tools, a handoff, typed output."""

from __future__ import annotations

import asyncio
import os
from importlib.metadata import version
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    RunConfig,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

URL, MODEL, KEY = (os.environ[f"MARATHON_CLIENT_{name}"] for name in ("URL", "MODEL", "KEY"))
set_default_openai_client(AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
set_tracing_disabled(disabled=True)
asked: list[str] = []


@function_tool
def look_up(key: str) -> str:
    """Look something up."""
    asked.append(key)
    return f"{key} is far"


class City(BaseModel):
    name: Literal["Oslo"]


async def main() -> None:
    helper = Agent(name="helper", model=MODEL, tools=[look_up])
    whole = await Runner.run(helper, "SCRIPT:ab Where?")
    assert whole.final_output == "It is Oslo.", whole.final_output
    assert asked == ["oslo"], asked
    kinds = [item.type for item in whole.new_items]
    assert kinds == [
        "reasoning_item", "message_output_item", "tool_call_item", "tool_call_output_item",
        "reasoning_item", "message_output_item",
    ], kinds  # fmt: skip
    assert whole.context_wrapper.usage.input_tokens_details.cached_tokens > 0

    streamed = Runner.run_streamed(helper, "SCRIPT:ab Where?")
    pieces = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(pieces) == "One moment.It is Oslo.", pieces
    assert streamed.final_output == "It is Oslo."
    assert asked == ["oslo", "oslo"]

    again = await Runner.run(helper, [*streamed.to_input_list(), {"role": "user", "content": "SCRIPT:dd Thanks."}])
    assert again.final_output == "Hello there, friend.", again.final_output

    expert = Agent(name="expert", model=MODEL, handoff_description="knows more")
    front = Agent(name="front", model=MODEL, handoffs=[expert])
    for run in (await Runner.run(front, "SCRIPT:ho Who knows?"), await streamed_run(front, "SCRIPT:ho Who knows?")):
        assert run.last_agent is expert
        assert run.final_output == "The expert says Oslo.", run.final_output

    typed = Agent(name="typed", model=MODEL, output_type=City, model_settings=ModelSettings(max_tokens=200))
    made = await Runner.run(typed, "SCRIPT:js A city.", run_config=RunConfig())
    assert made.final_output == City(name="Oslo"), made.final_output


async def streamed_run(agent: Agent, text: str):
    run = Runner.run_streamed(agent, text)
    async for _ in run.stream_events():
        pass
    return run


asyncio.run(main())
print("openai-agents", version("openai-agents"))
