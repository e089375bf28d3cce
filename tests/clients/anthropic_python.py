"""anthropic's Python SDK: raw stream, helper, counting, its tool runner, errors."""

from __future__ import annotations

import os

import anthropic
from anthropic import Anthropic, beta_tool

URL, MODEL, KEY = (os.environ[f"MARATHON_CLIENT_{name}"] for name in ("URL", "MODEL", "KEY"))
client = Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
asked: list[str] = []


@beta_tool
def look_up(key: str) -> str:
    """Look something up.

    Args:
        key: of it
    """
    asked.append(key)
    return f"{key} is far"


given = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "SCRIPT:ab Where?"}]}
tools = [look_up.to_dict()]
names = [event.type for event in client.messages.create(**given, tools=tools, stream=True)]
assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"]), names
with client.messages.stream(**given, tools=tools) as stream:
    text = "".join(stream.text_stream)
    message = stream.get_final_message()
assert text == "One moment.", text
assert [block.type for block in message.content] == ["thinking", "text", "tool_use"], message.content
assert message.stop_reason == "tool_use"
counted = client.messages.count_tokens(model=MODEL, messages=given["messages"], tools=tools)
usage = message.usage
assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage)

for streamed in (False, True):
    runner = client.beta.messages.tool_runner(**given, tools=[look_up], stream=streamed)
    last = None
    for turn in runner:
        last = turn.get_final_message() if streamed else turn
    assert [block.type for block in last.content] == ["thinking", "text"], last.content
    assert last.content[-1].text == "It is Oslo.", last.content
assert asked == ["oslo", "oslo"], asked

try:
    client.messages.create(**given, extra_body={"temperature": 3})
except anthropic.BadRequestError as refused:
    assert refused.body["error"]["type"] == "invalid_request_error", refused.body
else:
    raise AssertionError("a temperature of 3 wasn't refused")
print("anthropic", anthropic.__version__)
