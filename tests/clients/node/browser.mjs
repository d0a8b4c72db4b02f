// The official openai client in a browser, on pages of two origins: the gateway (ROOTSTOCK_URL) allows the first
// (ALLOWED_PORT) and not the second (OTHER_PORT). CHROMIUM is the path of the browser's program.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { dirname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

const folder = join(dirname(fileURLToPath(import.meta.url)), "node_modules/openai");
const page = `<!doctype html><script type="module">
import OpenAI from "/openai/index.mjs";
window.ask = async () => {
  const client = new OpenAI({ baseURL: "${process.env.ROOTSTOCK_URL}/v1", apiKey: "none", dangerouslyAllowBrowser: true, maxRetries: 0 });
  const messages = [{ role: "user", content: "What is 17 + 25?" }];
  const piecesOf = async (messages) => {
    const pieces = [];
    for await (const chunk of await client.chat.completions.create({ model: "demo", temperature: 0, messages, stream: true })) {
      pieces.push(chunk.choices[0].delta.content ?? "");
    }
    return pieces;
  };
  const pieces = await piecesOf(messages);
  const counted = await piecesOf([{ role: "user", content: "Count from 1 to 40." }]); // a short text may arrive in one piece
  const { response, data } = await client.chat.completions.create({ model: "demo", temperature: 0, messages }).withResponse();
  return { streamed: pieces.join(""), pieces: counted.length, whole: data.choices[0].message.content, id: response.headers.get("x-request-id") };
};
</script>`;

function serve(port) {
  const server = createServer(async (request, response) => {
    if (!request.url.startsWith("/openai/")) {
      response.setHeader("content-type", "text/html");
      response.end(page);
      return;
    }
    try {
      const file = await readFile(join(folder, normalize(request.url.slice("/openai/".length))));
      response.setHeader("content-type", "text/javascript");
      response.end(file);
    } catch {
      response.statusCode = 404;
      response.end();
    }
  });
  return new Promise((resolve) => server.listen(port, "127.0.0.1", () => resolve(server)));
}

const ports = [Number(process.env.ALLOWED_PORT), Number(process.env.OTHER_PORT)];
const servers = await Promise.all(ports.map(serve));
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox"] });
try {
  const [allowed, other] = await Promise.all(
    ports.map(async (port) => {
      const tab = await browser.newPage();
      await tab.goto(`http://127.0.0.1:${port}/`);
      await tab.waitForFunction(() => window.ask !== undefined);
      return tab.evaluate(() => window.ask().catch((error) => ({ failed: error.constructor.name })));
    }),
  );
  assert.equal(allowed.streamed, "17 + 25 = 42.");
  assert.equal(allowed.whole, "17 + 25 = 42.");
  assert.ok(allowed.pieces > 2);
  assert.ok(allowed.id, "the page must be able to read the request's id");
  assert.ok(other.failed, "a page of another origin must not get a response");
  console.log(JSON.stringify({ allowed, other }));
} finally {
  await browser.close();
  for (const server of servers) server.close();
}
