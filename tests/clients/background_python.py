"""openai's Python SDK over background responses: dropped and resumed by hand and by helper, polled, cancelled, deleted;
readers of different speeds, and one that never reads. The model says the script `lg`: 300 words."""

from __future__ import annotations

import os
import threading
import time

import openai

URL, MODEL = os.environ["MARATHON_CLIENT_URL"], os.environ["MARATHON_CLIENT_MODEL"]
KEY = os.environ["MARATHON_CLIENT_KEY"]
DROP = 20

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
asked = {"model": MODEL, "input": "SCRIPT:lg", "background": True}
TEXT = "".join(f" word{number}" for number in range(300))


def words(events) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


# Dropped at event 20, resumed by hand.
stream = client.responses.create(**asked, stream=True)
first = []
for event in stream:
    first.append(event)
    if event.sequence_number == DROP:
        break
stream.close()
assert [event.type for event in first[:3]] == ["response.created", "response.queued", "response.in_progress"], first[:3]
assert (first[0].response.status, first[2].response.status) == ("queued", "in_progress")
id = first[0].response.id
rest = list(client.responses.retrieve(id, stream=True, starting_after=DROP))
assert [event.sequence_number for event in first + rest] == list(range(len(first) + len(rest)))
assert words(first + rest) == TEXT
assert rest[-1].type == "response.completed"
assert rest[-1].response.output_text == client.responses.retrieve(id).output_text == TEXT

# Resumed by the helper, which reads from the beginning and shows what follows.
with client.responses.stream(response_id=id, starting_after=DROP) as helper:
    shown = [event for event in helper if event.type != "keepalive"]
    assert helper.get_final_response().output_text == TEXT
assert shown[0].sequence_number == DROP + 1, shown[0]

# Polled, and gone on from.
made = client.responses.create(**asked)
assert (made.status, made.background, made.output) == ("queued", True, []), made
while made.status in {"queued", "in_progress"}:
    time.sleep(0.05)
    made = client.responses.retrieve(made.id)
assert (made.status, made.output_text) == ("completed", TEXT)
second = client.responses.create(model=MODEL, input="And then?", previous_response_id=made.id)
assert (second.status, second.previous_response_id) == ("completed", made.id)
assert [item.type for item in client.responses.input_items.list(made.id)] == ["message"]

# Cancelled twice.
running = client.responses.create(**(asked | {"input": "SCRIPT:lx"}))
cancelled = client.responses.cancel(running.id)
assert cancelled.status == "cancelled", cancelled
assert client.responses.cancel(running.id) == cancelled == client.responses.retrieve(running.id)
assert client.responses.cancel(made.id).status == "completed", "what has ended stays as it is"
try:
    client.responses.cancel(second.id)
except openai.BadRequestError as refused:
    assert "synchronous" in refused.message
else:
    raise AssertionError("a synchronous response was cancelled")

# Two readers of different speeds, and one that never reads.
created = client.responses.create(**asked, stream=True)
id = next(iter(created)).response.id
idle = client.responses.retrieve(id, stream=True)
texts: dict[str, str] = {}


def read(name: str, pause: float) -> None:
    seen = []
    for event in client.responses.retrieve(id, stream=True):
        seen.append(event)
        time.sleep(pause)
    texts[name] = words(seen)


readers = [threading.Thread(target=read, args=pair) for pair in (("quick", 0.0), ("slow", 0.004))]
for reader in readers:
    reader.start()
for reader in readers:
    reader.join()
assert texts == {"quick": TEXT, "slow": TEXT}
assert client.responses.retrieve(id).status == "completed"
idle.close()
created.close()

# Deleted.
client.responses.delete(id)
for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
    try:
        call(id)
    except openai.NotFoundError as missing:
        assert id in missing.message, missing
    else:
        raise AssertionError(f"{call} found a deleted response")

# A chat completion that is kept.
chat = client.chat.completions.create(
    model=MODEL, messages=[{"role": "user", "content": "SCRIPT:lo"}], store=True, metadata={"from": "the test"}
)
kept = client.chat.completions.retrieve(chat.id)
assert kept.choices[0].message.content == chat.choices[0].message.content
assert chat.id in [one.id for one in client.chat.completions.list(metadata={"from": "the test"})]
assert [one.content for one in client.chat.completions.messages.list(chat.id)] == ["SCRIPT:lo"]
assert client.chat.completions.update(chat.id, metadata={"a": "b"}).metadata == {"a": "b"}
assert client.chat.completions.delete(chat.id).deleted
print(openai.__version__, "background responses")
