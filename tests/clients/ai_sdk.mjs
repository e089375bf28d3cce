// The AI SDK with its openai-compatible provider: text, stream, tools, objects, errors.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const { MARATHON_CLIENT_URL: baseURL, MARATHON_CLIENT_MODEL: id, MARATHON_CLIENT_KEY: apiKey } = process.env;
const provider = (key) =>
  createOpenAICompatible({ name: "marathon", baseURL, apiKey: key, includeUsage: true, supportsStructuredOutputs: true });
const model = provider(apiKey)(id);
const fixed = { model, prompt: "Say hello.", maxOutputTokens: 12, temperature: 0, maxRetries: 0 };

const whole = await generateText(fixed);
assert.ok(whole.usage.outputTokens > 0);
const stream = streamText(fixed);
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);

const tools = {
  get_weather: tool({
    description: "Weather in a city",
    inputSchema: z.object({ city: z.enum(["Oslo", "Rome"]) }),
  }),
};
const asked = { model, prompt: "Weather?", tools, toolChoice: "required", maxOutputTokens: 400, maxRetries: 0 };
const called = await generateText(asked);
assert.ok(["Oslo", "Rome"].includes(called.toolCalls[0].input.city));
const calling = streamText(asked);
await calling.consumeStream();
assert.equal((await calling.toolCalls)[0].toolName, "get_weather");

const schema = z.object({ name: z.string().max(8), size: z.enum(["small", "large"]) });
const made = await generateObject({ model, schema, prompt: "A city.", maxOutputTokens: 400, maxRetries: 0 });
assert.ok(["small", "large"].includes(made.object.size));
const forming = streamObject({ model, schema, prompt: "A city.", maxOutputTokens: 400, maxRetries: 0 });
for await (const part of forming.partialObjectStream) assert.equal(typeof part, "object");
assert.ok(["small", "large"].includes((await forming.object).size));

async function fails(status, fields) {
  try {
    await generateText({ ...fixed, ...fields });
  } catch (error) {
    assert.ok(APICallError.isInstance(error), String(error));
    assert.equal(error.statusCode, status);
    assert.equal(error.data.error.message, error.message);
    return error.data.error;
  }
  throw new Error("APICallError wasn't thrown");
}
const bad = await fails(400, { temperature: 3 });
assert.deepEqual([bad.type, bad.param, bad.code], ["invalid_request_error", "temperature", "invalid_value"]);
assert.equal((await fails(404, { model: provider(apiKey)("nobody") })).code, "model_not_found");
assert.equal((await fails(401, { model: provider("wrong")(id) })).code, "invalid_api_key");
console.log("ai on", process.version);
