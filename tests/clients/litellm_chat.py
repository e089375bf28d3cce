"""LiteLLM: plain, stream, tools, schema, errors. Runs in an environment of its own."""

import json
import os
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a price list

import litellm

URL, MODEL, KEY = (os.environ[f"MARATHON_CLIENT_{name}"] for name in ("URL", "MODEL", "KEY"))
USER = [{"role": "user", "content": "Say hello."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}


def ask(**fields):
    given = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "messages": USER, "max_retries": 0}
    return litellm.completion(**(given | fields))


whole = ask(max_tokens=8, temperature=0)
assert whole.usage.completion_tokens > 0
chunks = list(ask(max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}))
texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
assert "".join(texts) == whole.choices[0].message.content
assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == whole.usage.completion_tokens

call = ask(tools=[TOOL], tool_choice="required", max_tokens=200).choices[0].message.tool_calls[0]
assert json.loads(call.function.arguments)["city"] in {"Oslo", "Rome"}
form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
answer = ask(response_format=form, max_tokens=200).choices[0].message.content
assert json.loads(answer)["city"] in {"Oslo", "Rome"}
for kind, fields in (
    (litellm.BadRequestError, {"temperature": 3}),
    (litellm.NotFoundError, {"model": "openai/nobody"}),
    (litellm.AuthenticationError, {"api_key": "wrong"}),
):
    try:
        ask(**fields)
    except kind as error:
        assert error.message
    else:
        raise AssertionError(f"{kind.__name__} wasn't raised")
print("litellm", version("litellm"))
