// The official Anthropic client for Node against a gateway with the demo model (ROOTSTOCK_URL).

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.ROOTSTOCK_URL, apiKey: "none", maxRetries: 0 });
const model = "demo";
const given = { model, temperature: 0, max_tokens: 200 };
const sum = [{ role: "user", content: "What is 17 + 25?" }];
const tool = (name, description, parameter) => ({
  name,
  description,
  input_schema: { type: "object", properties: { [parameter]: { type: "string" } }, required: [parameter] },
});
const tools = [
  tool("get_mayor", "Get the mayor of a city.", "city"),
  tool("get_age", "Get the age of a person.", "person"),
];
const results = { get_mayor: { Lima: "Ada" }, get_age: { Ada: "52" } };
const asked = [{ role: "user", content: "What is the age of the mayor of Lima?" }];
const shown = ({ content, stop_reason, usage }) => ({
  content: content.map(({ id: _, ...block }) => block),
  stop_reason,
  output: usage.output_tokens,
});

async function same(body) {
  const plain = await client.messages.create({ ...given, ...body });
  const streamed = await client.messages.stream({ ...given, ...body }).finalMessage();
  assert.deepEqual(shown(streamed), shown(plain));
  return plain;
}

test("a message", async () => {
  const { content, stop_reason, role } = await same({ messages: sum, system: "You are a helpful assistant." });
  assert.deepEqual(content, [{ type: "text", text: "17 + 25 = 42." }]);
  assert.equal(stop_reason, "end_turn");
  assert.equal(role, "assistant");
  assert.equal((await same({ messages: sum, max_tokens: 2 })).stop_reason, "max_tokens");
  const stopped = await same({ messages: sum, stop_sequences: ["42"] });
  assert.equal(stopped.stop_reason, "stop_sequence");
  assert.equal(stopped.stop_sequence, "42");
});

test("an agent's loop", async () => {
  const messages = [...asked];
  const names = [];
  for (;;) {
    const answer = await same({ messages, tools });
    messages.push({ role: "assistant", content: answer.content });
    if (answer.stop_reason !== "tool_use") {
      assert.equal(answer.content[0].text, "The age of the mayor of Lima is 52.");
      break;
    }
    const found = answer.content.filter((block) => block.type === "tool_use");
    names.push(...found.map((block) => block.name));
    const content = found.map(({ id, name, input }) => ({
      type: "tool_result",
      tool_use_id: id,
      content: results[name][Object.values(input)[0]],
    }));
    messages.push({ role: "user", content });
  }
  assert.deepEqual(names, ["get_mayor", "get_age"]);
});

test("tools that must be called", async () => {
  for (const choice of [{ type: "any" }, { type: "tool", name: "get_age" }]) {
    const answer = await same({ messages: asked, tools, tool_choice: { ...choice, disable_parallel_tool_use: true } });
    const calls = answer.content.filter((block) => block.type === "tool_use");
    assert.equal(calls.length, 1);
    assert.ok(choice.type === "any" || calls[0].name === "get_age");
  }
});

test("tokens are counted as they are used", async () => {
  const { input_tokens } = await client.messages.countTokens({ model, messages: asked, tools });
  const { usage } = await client.messages.create({ ...given, messages: asked, tools });
  assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
});

test("models, errors, a client that leaves", async () => {
  const names = [];
  for await (const each of client.models.list()) names.push(each.id);
  assert.ok(names.includes(model));
  await assert.rejects(client.messages.create({ ...given, model: "nobody", messages: sum }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ ...given, messages: [] }), Anthropic.BadRequestError);
  const stream = client.messages.stream({ ...given, messages: [{ role: "user", content: "Count from 1 to 60." }] });
  for await (const event of stream) if (event.type === "content_block_delta") break;
  stream.abort();
  assert.equal((await same({ messages: sum })).content[0].text, "17 + 25 = 42.");
});
