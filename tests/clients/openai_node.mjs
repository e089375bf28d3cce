// openai's Node SDK: plain, stream, tools, parsed schema, errors.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { MARATHON_CLIENT_URL: baseURL, MARATHON_CLIENT_MODEL: model, MARATHON_CLIENT_KEY: apiKey } = process.env;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const fixed = { model, messages, max_tokens: 12, temperature: 0 };

const whole = await client.chat.completions.create(fixed);
assert.ok(whole.usage.completion_tokens > 0);
let text = "";
let usage;
for await (const chunk of await client.chat.completions.create({
  ...fixed,
  stream: true,
  stream_options: { include_usage: true },
})) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const parameters = {
  type: "object",
  properties: { city: { enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const asked = { model, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };
const called = await client.chat.completions.create(asked);
assert.equal(called.choices[0].finish_reason, "tool_calls");
const runner = client.chat.completions.stream(asked);
const final = await runner.finalMessage();
assert.ok(["Oslo", "Rome"].includes(JSON.parse(final.tool_calls[0].function.arguments).city));

const City = z.object({ name: z.string().max(8), size: z.enum(["small", "large"]) });
const parsed = await client.chat.completions.parse({
  model,
  messages,
  max_tokens: 400,
  response_format: zodResponseFormat(City, "city"),
});
assert.ok(["small", "large"].includes(parsed.choices[0].message.parsed.size));

async function fails(kind, fields, using = client) {
  try {
    await using.chat.completions.create({ ...fixed, ...fields });
  } catch (error) {
    assert.ok(error instanceof kind, String(error));
    assert.ok(error.type && error.code && error.error.message);
    return error;
  }
  throw new Error(`${kind.name} wasn't thrown`);
}
const bad = await fails(OpenAI.BadRequestError, { temperature: 3 });
assert.deepEqual([bad.type, bad.param, bad.code], ["invalid_request_error", "temperature", "invalid_value"]);
await fails(OpenAI.NotFoundError, { model: "nobody" });
await fails(OpenAI.AuthenticationError, {}, new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }));
console.log("openai-node on", process.version);
