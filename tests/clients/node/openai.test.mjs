// The official openai client for Node against a gateway with the demo model (ROOTSTOCK_URL). Outputs are greedy, so a
// streamed and a whole response to the same request have the same text.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.ROOTSTOCK_URL}/v1`, apiKey: "none", maxRetries: 0 });
const model = "demo";
const temperature = 0;
const sum = [{ role: "user", content: "What is 17 + 25?" }];
const tool = (name, description, parameter) => ({
  type: "function",
  function: {
    name,
    description,
    parameters: {
      type: "object",
      properties: { [parameter]: { type: "string" } },
      required: [parameter],
      additionalProperties: false,
    },
  },
});
const tools = [
  tool("get_mayor", "Get the mayor of a city.", "city"),
  tool("get_age", "Get the age of a person.", "person"),
];
const flat = tools.map((each) => ({ type: "function", strict: false, ...each.function }));
const results = { get_mayor: { Lima: "Ada" }, get_age: { Ada: "52" } };
const asked = "What is the age of the mayor of Lima?";

function run(name, text) {
  const [value] = Object.values(JSON.parse(text));
  return results[name][value];
}

async function gathered(stream) {
  const choices = [];
  let usage = null;
  for await (const chunk of stream) {
    usage = chunk.usage ?? usage;
    for (const { index, delta, finish_reason, logprobs } of chunk.choices) {
      const choice = (choices[index] ??= { text: "", calls: [], reason: null, logprobs: [] });
      choice.text += delta.content ?? "";
      choice.reason = finish_reason ?? choice.reason;
      choice.logprobs.push(...(logprobs?.content ?? []));
      for (const call of delta.tool_calls ?? []) {
        const known = (choice.calls[call.index] ??= { name: call.function.name, arguments: "" });
        known.arguments += call.function.arguments ?? "";
      }
    }
  }
  return { choices, usage };
}

function whole(answer) {
  const choices = answer.choices.map(({ message, finish_reason, logprobs }) => ({
    text: message.content ?? "",
    calls: (message.tool_calls ?? []).map((call) => ({ name: call.function.name, arguments: call.function.arguments })),
    reason: finish_reason,
    logprobs: logprobs?.content ?? [],
  }));
  return { choices, usage: answer.usage };
}

// The number of cached tokens is left out, because it differs between two equal requests.
const counts = ({ prompt_tokens, completion_tokens, total_tokens }) => ({ prompt_tokens, completion_tokens, total_tokens });

async function same(body) {
  const plain = whole(await client.chat.completions.create({ model, temperature, ...body }));
  const options = { stream: true, stream_options: { include_usage: true } };
  const streamed = await gathered(await client.chat.completions.create({ model, temperature, ...body, ...options }));
  assert.deepEqual(streamed.choices, plain.choices);
  assert.deepEqual(counts(streamed.usage), counts(plain.usage));
  return plain;
}

test("models", async () => {
  const names = [];
  for await (const each of client.models.list()) names.push(each.id);
  assert.ok(names.includes(model));
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("a chat", async () => {
  const { choices, usage } = await same({ messages: sum });
  assert.equal(choices[0].text, "17 + 25 = 42.");
  assert.equal(choices[0].reason, "stop");
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
});

test("log probabilities, several choices, stop strings, lengths", async () => {
  const { choices } = await same({ messages: sum, n: 2, logprobs: true, top_logprobs: 2, stop: ["42"] });
  assert.deepEqual(choices.map((each) => each.text), ["17 + 25 = ", "17 + 25 = "]);
  assert.ok(choices.every((each) => each.logprobs.every((entry) => entry.top_logprobs.length === 2)));
  const cut = await same({ messages: sum, max_completion_tokens: 2 });
  assert.equal(cut.choices[0].reason, "length");
});

test("structured output", async () => {
  const schema = { type: "object", properties: { sum: { type: "integer" } }, required: ["sum"], additionalProperties: false };
  const format = { type: "json_schema", json_schema: { name: "sum", strict: true, schema } };
  const { choices } = await same({ messages: sum, response_format: format, max_tokens: 60 });
  assert.deepEqual(Object.keys(JSON.parse(choices[0].text)), ["sum"]);
});

test("tools that must be called", async () => {
  for (const choice of ["required", { type: "function", function: { name: "get_age" } }]) {
    const body = { messages: [{ role: "user", content: asked }], tools, tool_choice: choice, max_tokens: 200 };
    const { choices } = await same({ ...body, parallel_tool_calls: false });
    assert.equal(choices[0].calls.length, 1);
    assert.ok(choice === "required" || choices[0].calls[0].name === "get_age");
    JSON.parse(choices[0].calls[0].arguments);
  }
  const { choices } = await same({ messages: sum, tools, tool_choice: "none" });
  assert.deepEqual(choices[0].calls, []);
});

test("an agent's loop over chats", async () => {
  const messages = [{ role: "user", content: asked }];
  const names = [];
  for (;;) {
    const { choices } = await same({ messages, tools });
    if (choices[0].reason !== "tool_calls") {
      assert.equal(choices[0].text, "The age of the mayor of Lima is 52.");
      break;
    }
    const calls = choices[0].calls.map((call, index) => ({ id: `call_${names.length}_${index}`, type: "function", function: call }));
    messages.push({ role: "assistant", content: choices[0].text || null, tool_calls: calls });
    for (const { id, function: called } of calls) {
      names.push(called.name);
      messages.push({ role: "tool", tool_call_id: id, content: run(called.name, called.arguments) });
    }
  }
  assert.deepEqual(names, ["get_mayor", "get_age"]);
});

test("the client's own runner of tools", async () => {
  const called = [];
  const runnable = tools.map(({ function: each }) => ({
    type: "function",
    function: {
      ...each,
      parse: JSON.parse,
      function: (given) => {
        called.push(each.name);
        return run(each.name, JSON.stringify(given));
      },
    },
  }));
  const runner = client.chat.completions.runTools({ model, temperature, messages: [{ role: "user", content: asked }], tools: runnable });
  assert.equal(await runner.finalContent(), "The age of the mayor of Lima is 52.");
  assert.deepEqual(called, ["get_mayor", "get_age"]);
});

test("completions", async () => {
  const body = { model, temperature, prompt: "What is 17 + 25?", echo: true, logprobs: 1, max_tokens: 4 };
  const plain = (await client.completions.create(body)).choices[0];
  let text = "";
  const tokens = [];
  for await (const chunk of await client.completions.create({ ...body, stream: true })) {
    text += chunk.choices[0].text;
    tokens.push(...chunk.choices[0].logprobs.tokens);
  }
  assert.equal(text, plain.text);
  assert.deepEqual(tokens, plain.logprobs.tokens);
  assert.equal(plain.logprobs.text_offset[0], 0);
  assert.equal((await client.completions.create({ ...body, echo: false, logprobs: null, n: 1, best_of: 3 })).choices.length, 1);
});

test("responses", async () => {
  const first = await client.responses.create({ model, temperature, input: "My name is Ada." });
  assert.equal(first.store, true);
  const body = { model, temperature, input: "What is my name?", previous_response_id: first.id };
  const second = await client.responses.create(body);
  assert.equal(second.output_text, "Your name is Ada.");
  const kinds = [];
  let text = "";
  for await (const event of await client.responses.create({ ...body, stream: true })) {
    kinds.push(event.type);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, second.output_text);
  assert.equal(kinds[0], "response.created");
  assert.equal(kinds.at(-1), "response.completed");
  assert.equal((await client.responses.retrieve(second.id)).output_text, second.output_text);
  const items = [];
  for await (const item of client.responses.inputItems.list(second.id)) items.push(item.type);
  assert.deepEqual(items, ["message"]);
  await client.responses.delete(second.id);
  await assert.rejects(client.responses.retrieve(second.id), OpenAI.NotFoundError);
});

test("an agent's loop over responses", async () => {
  let answer = await client.responses.create({ model, temperature, input: asked, tools: flat });
  const names = [];
  for (;;) {
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (!calls.length) break;
    names.push(...calls.map((call) => call.name));
    const input = calls.map((call) => ({
      type: "function_call_output",
      call_id: call.call_id,
      output: run(call.name, call.arguments),
    }));
    answer = await client.responses.create({ model, temperature, input, tools: flat, previous_response_id: answer.id });
  }
  assert.deepEqual(names, ["get_mayor", "get_age"]);
  assert.equal(answer.output_text, "The age of the mayor of Lima is 52.");
});

test("conversations", async () => {
  const { id } = await client.conversations.create({});
  await client.responses.create({ model, temperature, input: "My name is Ada.", conversation: id });
  const answer = await client.responses.create({ model, temperature, input: "What is my name?", conversation: id });
  assert.equal(answer.output_text, "Your name is Ada.");
  const items = [];
  for await (const item of client.conversations.items.list(id)) items.push(item.type);
  assert.equal(items.length, 4);
  await client.conversations.delete(id);
});

test("errors are the client's own", async () => {
  await assert.rejects(client.chat.completions.create({ model: "nobody", messages: sum }), OpenAI.NotFoundError);
  const error = await client.chat.completions.create({ model, messages: sum, temperature: -1 }).catch((each) => each);
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "temperature");
});

test("a client that leaves", async () => {
  const stream = await client.chat.completions.create({
    model,
    temperature,
    stream: true,
    messages: [{ role: "user", content: "Count from 1 to 60." }],
  });
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
  assert.equal((await same({ messages: sum })).choices[0].text, "17 + 25 = 42.");
});
