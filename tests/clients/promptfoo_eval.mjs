// promptfoo over its providers openai:responses, openai:chat and anthropic:messages: one evaluation, all of it passes.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";

const { MARATHON_CLIENT_URL: url, MARATHON_CLIENT_MODEL: model, MARATHON_CLIENT_KEY: apiKey } = process.env;
const openai = { apiBaseUrl: url, apiKey, max_tokens: 100, max_output_tokens: 100 };
const anthropic = { apiBaseUrl: url.replace(/\/v1$/, ""), apiKey, max_tokens: 100 };
const providers = [
  { id: `openai:responses:${model}`, config: openai },
  { id: `openai:chat:${model}`, config: openai },
  { id: `anthropic:messages:${model}`, config: anthropic },
];
const asserts = [{ type: "contains", value: "{{expected}}" }];
const tests = [
  { vars: { asked: "SCRIPT:dd Hello.", expected: "Hello there, friend." }, assert: asserts },
  { vars: { asked: "SCRIPT:lo Count.", expected: "word9" }, assert: asserts },
];
writeFileSync("promptfoo.json", JSON.stringify({ prompts: ["{{asked}}"], providers, tests }));
const out = resolve("promptfoo-out.json");
const done = spawnSync(
  resolve("node_modules/.bin/promptfoo"),
  ["eval", "-c", "promptfoo.json", "--no-cache", "--no-write", "--no-table", "--no-progress-bar", "-o", out],
  {
    encoding: "utf8",
    env: {
      ...process.env,
      PROMPTFOO_CONFIG_DIR: resolve("promptfoo-home"),
      PROMPTFOO_DISABLE_TELEMETRY: "1",
      PROMPTFOO_DISABLE_UPDATE: "1",
      PROMPTFOO_DISABLE_REMOTE_GENERATION: "1",
    },
  },
);
const { results } = JSON.parse(readFileSync(out, "utf8"));
const failed = results.results.filter((one) => !one.success).map((one) => one.error ?? one.response);
assert.deepEqual(failed, [], done.stdout + done.stderr);
assert.equal(results.stats.successes, providers.length * tests.length);
console.log("promptfoo", results.stats.successes);
