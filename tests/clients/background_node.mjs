// openai's Node SDK over background responses: dropped and resumed by hand and by helper, polled, cancelled, deleted;
// readers of different speeds, and one that never reads. The model says the script `lg`: 300 words.
import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.MARATHON_CLIENT_URL,
  apiKey: process.env.MARATHON_CLIENT_KEY,
  maxRetries: 0,
});
const asked = { model: process.env.MARATHON_CLIENT_MODEL, input: "SCRIPT:lg", background: true };
const text = Array.from({ length: 300 }, (_, number) => ` word${number}`).join("");
const drop = 20;
const words = (events) =>
  events
    .filter((event) => event.type === "response.output_text.delta")
    .map((event) => event.delta)
    .join("");

// Dropped at event 20, resumed by hand.
const first = [];
const stream = await client.responses.create({ ...asked, stream: true });
for await (const event of stream) {
  first.push(event);
  if (event.sequence_number === drop) break;
}
const id = first[0].response.id;
assert.deepEqual(
  first.slice(0, 3).map((event) => event.type),
  ["response.created", "response.queued", "response.in_progress"],
);
const rest = [];
for await (const event of await client.responses.retrieve(id, { stream: true, starting_after: drop })) rest.push(event);
const numbers = [...first, ...rest].map((event) => event.sequence_number);
assert.deepEqual(numbers, numbers.map((_, place) => place));
assert.equal(words([...first, ...rest]), text);
assert.equal((await client.responses.retrieve(id)).output_text, text);

// Resumed by the helper, which reads from the beginning and shows what follows.
const helper = client.responses.stream({ response_id: id, starting_after: drop });
const shown = [];
for await (const event of helper) shown.push(event);
assert.equal((await helper.finalResponse()).output[0].content[0].text, text);
assert.equal(shown[0].sequence_number, drop + 1);

// Polled.
let made = await client.responses.create(asked);
assert.deepEqual([made.status, made.background], ["queued", true]);
while (["queued", "in_progress"].includes(made.status)) {
  await sleep(50);
  made = await client.responses.retrieve(made.id);
}
assert.deepEqual([made.status, made.output_text], ["completed", text]);

// Cancelled twice; its stream comes to an end.
const doomed = await client.responses.create({ ...asked, input: "SCRIPT:lx", stream: true });
let name, last;
for await (const event of doomed) {
  name ??= event.response.id;
  last = event;
  if (event.sequence_number === 5) await client.responses.cancel(name);
}
assert.equal(last.type, "response.cancelled");
const cancelled = await client.responses.cancel(name);
assert.equal(cancelled.status, "cancelled");
assert.deepEqual((await client.responses.retrieve(name)).output, cancelled.output);

// Two readers of different speeds, and one that never reads.
const created = await client.responses.create(asked).then(({ id }) => id);
assert.ok(created);
const streamed = await client.responses.create({ ...asked, stream: true });
const { value } = await streamed[Symbol.asyncIterator]().next();
const idle = await client.responses.retrieve(value.response.id, { stream: true });
const read = async (pause) => {
  const seen = [];
  for await (const event of await client.responses.retrieve(value.response.id, { stream: true })) {
    seen.push(event);
    if (pause) await sleep(pause);
  }
  return words(seen);
};
assert.deepEqual(await Promise.all([read(0), read(4)]), [text, text]);
idle.controller.abort();
streamed.controller.abort();

// Deleted.
await client.responses.delete(value.response.id);
await assert.rejects(client.responses.retrieve(value.response.id), { status: 404 });
await assert.rejects(client.responses.delete(value.response.id), { status: 404 });
await assert.rejects(client.responses.cancel(value.response.id), { status: 404 });
console.log("background responses");
