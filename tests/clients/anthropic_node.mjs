// anthropic's TypeScript SDK: raw stream, helper, counting, its tool runner, errors.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";

const client = new Anthropic({
  baseURL: process.env.MARATHON_CLIENT_URL.replace(/\/v1$/, ""),
  apiKey: process.env.MARATHON_CLIENT_KEY,
  maxRetries: 0,
});
const given = {
  model: process.env.MARATHON_CLIENT_MODEL,
  max_tokens: 200,
  messages: [{ role: "user", content: "SCRIPT:ab Where?" }],
};
const schema = { type: "object", properties: { key: { type: "string" } }, required: ["key"] };
const tools = [{ name: "look_up", description: "Looks something up.", input_schema: schema }];

const names = [];
for await (const event of await client.messages.create({ ...given, tools, stream: true })) names.push(event.type);
assert.equal(names[0], "message_start");
assert.deepEqual(names.slice(-2), ["message_delta", "message_stop"]);

const helper = client.messages.stream({ ...given, tools });
let text = "";
helper.on("text", (piece) => (text += piece));
const message = await helper.finalMessage();
assert.equal(text, "One moment.");
assert.deepEqual(
  message.content.map((block) => block.type),
  ["thinking", "text", "tool_use"],
);
assert.deepEqual(message.content[2].input, { key: "oslo" });
assert.equal(message.stop_reason, "tool_use");
const { input_tokens: counted } = await client.messages.countTokens({
  model: given.model,
  messages: given.messages,
  tools,
});
assert.equal(counted, message.usage.input_tokens + message.usage.cache_read_input_tokens);

const asked = [];
const lookUp = betaZodTool({
  name: "look_up",
  description: "Looks something up.",
  inputSchema: z.object({ key: z.string() }),
  run: ({ key }) => {
    asked.push(key);
    return `${key} is far`;
  },
});
const last = await client.beta.messages.toolRunner({ ...given, tools: [lookUp] });
assert.equal(last.content.at(-1).text, "It is Oslo.");
for await (const turn of client.beta.messages.toolRunner({ ...given, tools: [lookUp], stream: true })) {
  await turn.finalMessage();
}
assert.deepEqual(asked, ["oslo", "oslo"]);

await assert.rejects(client.messages.create({ ...given, temperature: 3 }), (error) => {
  assert.equal(error.status, 400);
  assert.equal(error.error.error.type, "invalid_request_error");
  return true;
});
console.log("anthropic");
