"""LangChain's ChatOpenAI: plain, stream, tools, structured output. Runs in an environment of its own."""

import os
from importlib.metadata import version
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL, MODEL, KEY = (os.environ[f"MARATHON_CLIENT_{name}"] for name in ("URL", "MODEL", "KEY"))
model = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, max_tokens=300, temperature=0, max_retries=0)


class City(BaseModel, extra="forbid"):
    """A city."""

    name: str = Field(max_length=8)
    size: Literal["small", "large"]


@tool
def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    """Weather in a city."""
    return f"warm in {city}"


short = model.bind(max_tokens=8)
whole = short.invoke("Say hello.")
assert whole.usage_metadata["output_tokens"] > 0
chunks = list(short.stream("Say hello.", stream_usage=True))
assert "".join(chunk.content for chunk in chunks) == whole.content
assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0

bound = model.bind_tools([get_weather], tool_choice="get_weather", strict=True, parallel_tool_calls=False)
call = bound.invoke("Weather?")
assert call.tool_calls[0]["args"]["city"] in {"Oslo", "Rome"}, call
reported = get_weather.invoke(call.tool_calls[0])
assert isinstance(reported, ToolMessage)
model.bind_tools([get_weather]).bind(max_tokens=4).invoke([HumanMessage("Weather?"), call, reported])
streamed = None
for chunk in bound.stream("Weather?"):
    streamed = chunk if streamed is None else streamed + chunk
assert streamed.tool_calls[0]["name"] == "get_weather"

for method in ("json_schema", "function_calling"):
    assert isinstance(model.with_structured_output(City, method=method, strict=True).invoke("A city."), City), method
print("langchain-openai", version("langchain-openai"))
