"""instructor: a model of pydantic through tools and through a schema. Runs in an environment of its own."""

import os
from importlib.metadata import version
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field

URL, MODEL, KEY = (os.environ[f"MARATHON_CLIENT_{name}"] for name in ("URL", "MODEL", "KEY"))


class City(BaseModel, extra="forbid"):
    name: str = Field(max_length=8)
    size: Literal["small", "large"]


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "A city."}]
    city = client.create(model=MODEL, messages=messages, response_model=City, max_tokens=400, max_retries=0)
    assert isinstance(city, City), mode
    parts = list(client.create_partial(model=MODEL, messages=messages, response_model=City, max_tokens=400))
    assert parts[-1].size in {"small", "large"}, mode
print("instructor", version("instructor"))
