// openai's Node SDK over the Responses API: plain, raw stream, helper, a forced call, in the background.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.MARATHON_CLIENT_URL,
  apiKey: process.env.MARATHON_CLIENT_KEY,
  maxRetries: 0,
});
const asked = { model: process.env.MARATHON_CLIENT_MODEL, input: "Say hello.", max_output_tokens: 12 };

const plain = await client.responses.create(asked);
assert.ok(["completed", "incomplete"].includes(plain.status));

const names = [];
for await (const event of await client.responses.create({ ...asked, stream: true })) names.push(event.type);
assert.deepEqual(names.slice(0, 2), ["response.created", "response.in_progress"]);

const tool = {
  type: "function",
  name: "mark",
  parameters: { type: "object", properties: { x: { enum: [1, 2] } }, required: ["x"], additionalProperties: false },
  strict: true,
};
const helper = client.responses.stream({
  model: asked.model,
  input: "Mark it.",
  tools: [tool],
  tool_choice: { type: "function", name: "mark" },
});
const final = await helper.finalResponse();
assert.deepEqual(
  final.output.filter((item) => item.type === "function_call").map((item) => item.name),
  ["mark"],
);

const unfinished = (one) => ["queued", "in_progress"].includes(one.status);
let made = await client.responses.create({ ...asked, background: true });
assert.ok(unfinished(made));
while (unfinished(made)) {
  await new Promise((resolve) => setTimeout(resolve, 200));
  made = await client.responses.retrieve(made.id);
}
assert.ok(["completed", "incomplete"].includes(made.status));
await client.responses.delete(made.id);
await assert.rejects(client.responses.retrieve(made.id), { status: 404 });
console.log("responses");
