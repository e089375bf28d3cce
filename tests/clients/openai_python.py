"""openai's Python SDK, any major: plain, stream, tools, parsed schema, errors. Runs in an environment of its own."""

import enum
import json
import os

import openai
from pydantic import BaseModel, Field

URL, MODEL, KEY = (os.environ[f"MARATHON_CLIENT_{name}"] for name in ("URL", "MODEL", "KEY"))
USER = [{"role": "user", "content": "Say hello."}]
client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)


class Mood(enum.Enum):
    glad = "glad"
    sad = "sad"


class Person(BaseModel):
    name: str = Field(max_length=8)
    mood: Mood
    scores: list[int] = Field(max_length=3)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def plain_and_streamed() -> None:
    fields = {"model": MODEL, "messages": USER, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].finish_reason in {"stop", "length"}
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    scored = client.chat.completions.create(**fields, logprobs=True, top_logprobs=3)
    assert len(scored.choices[0].logprobs.content[0].top_logprobs) == 3


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=["One", "Two"], max_tokens=4, n=2, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(answer.choices[0].logprobs.tokens) <= 4
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def tools() -> None:
    fields = {"model": MODEL, "messages": USER, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
    fields |= {"parallel_tool_calls": False}
    answer = client.chat.completions.create(**fields)
    assert answer.choices[0].finish_reason == "tool_calls", answer
    call = answer.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in {"Oslo", "Rome"}
    history = [*USER, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "warm"}]
    client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER], max_tokens=4)
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, stream=True)]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert pieces[0].function.name == "get_weather"
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces))["city"] in {"Oslo", "Rome"}


def schema() -> None:
    parse = getattr(client.chat.completions, "parse", None) or client.beta.chat.completions.parse
    answer = parse(model=MODEL, messages=USER, response_format=Person, max_tokens=400)
    assert isinstance(answer.choices[0].message.parsed, Person), answer
    tool = openai.pydantic_function_tool(Person, name="keep")
    answer = parse(model=MODEL, messages=USER, tools=[tool], tool_choice="required", max_tokens=400,
                   parallel_tool_calls=False)  # fmt: skip
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Person)


def fails(kind: type[openai.APIStatusError], **fields: object) -> openai.APIStatusError:
    try:
        client.chat.completions.create(**({"model": MODEL, "messages": USER, "max_tokens": 2} | fields))
    except kind as error:
        assert error.type and error.code and isinstance(error.body, dict) and error.body["message"], error.body
        return error
    raise AssertionError(f"{kind.__name__} wasn't raised")


def errors() -> None:
    bad = fails(openai.BadRequestError, temperature=3)
    assert (bad.type, bad.param, bad.code) == ("invalid_request_error", "temperature", "invalid_value")
    assert fails(openai.BadRequestError, temperature=3, stream=True).param == "temperature"
    assert fails(openai.NotFoundError, model="nobody").code == "model_not_found"
    global client
    kept, client = client, openai.OpenAI(base_url=URL, api_key="wrong", max_retries=0)
    assert fails(openai.AuthenticationError).code == "invalid_api_key"
    client = kept


for step in (plain_and_streamed, completions, tools, schema, errors):
    step()
print("openai", openai.__version__)
