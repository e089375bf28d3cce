"""openai's Python SDK over the Responses API: plain, raw stream, helper, a forced call, in the background."""

from __future__ import annotations

import os
import time

import openai

URL, MODEL = os.environ["MARATHON_CLIENT_URL"], os.environ["MARATHON_CLIENT_MODEL"]
KEY = os.environ["MARATHON_CLIENT_KEY"]

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
asked = {"model": MODEL, "input": "Say hello.", "max_output_tokens": 12}

plain = client.responses.create(**asked)
assert plain.usage.output_tokens <= 12, plain.usage
assert plain.status in {"completed", "incomplete"}

names = [event.type for event in client.responses.create(**asked, stream=True)]
assert names[:2] == ["response.created", "response.in_progress"], names
assert names[-1] in {"response.completed", "response.incomplete"}, names

tool = {
    "type": "function",
    "name": "mark",
    "parameters": {
        "type": "object",
        "properties": {"x": {"enum": [1, 2]}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "strict": True,
}
with client.responses.stream(
    model=MODEL, input="Mark it.", tools=[tool], tool_choice={"type": "function", "name": "mark"}
) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_response()
assert "response.function_call_arguments.done" in kinds, kinds
assert [item.name for item in final.output if item.type == "function_call"] == ["mark"], final.output

made = client.responses.create(**asked, background=True)
assert made.status in {"queued", "in_progress"}, made
while made.status in {"queued", "in_progress"}:
    time.sleep(0.2)
    made = client.responses.retrieve(made.id)
assert made.status in {"completed", "incomplete"}, made
again = client.responses.create(**asked, previous_response_id=made.id)
assert again.usage.input_tokens > made.usage.input_tokens, again.usage
client.responses.delete(made.id)
try:
    client.responses.retrieve(made.id)
except openai.NotFoundError as missing:
    assert missing.status_code == 404
else:
    raise AssertionError("a deleted response was found")
print(openai.__version__, "responses")
