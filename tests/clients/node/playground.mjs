// The playground and the API page of the gateway (ROOTSTOCK_URL) in a browser, at the widths of a desktop and of a phone.
// CHROMIUM is the path of the browser's program, and PICTURES is the folder for screenshots.

import assert from "node:assert/strict";
import { join } from "node:path";
import { chromium } from "playwright-core";

const url = process.env.ROOTSTOCK_URL;
const CHAT = "**/v1/chat/completions";
const SIZES = { 1280: { width: 1280, height: 860 }, 390: { width: 390, height: 844 } };
const HOSTILE = `<img src="https://elsewhere.test/a.png" onerror="window.taken = 1"><script>window.taken = 1</script>\n\`\`\`\n<b>code</b>\n\`\`\`\n[link](javascript:alert(1))`;

async function measured(name, labels = "") {
  const text = await (await fetch(`${url}/metrics`)).text();
  const line = text.split("\n").find((each) => each.startsWith(`${name}${labels}`));
  return line === undefined ? 0 : Number(line.split(" ").at(-1));
}

async function until(condition, what) {
  for (const end = Date.now() + 30_000; !(await condition()); await new Promise((wake) => setTimeout(wake, 50))) {
    assert.ok(Date.now() < end, `waited 30 s for ${what}`);
  }
}

/** Returns a new page, the URLs that it has requested, and its errors. */
async function opened(browser, width, path = "/", scheme = "light") {
  const context = await browser.newContext({ viewport: SIZES[width], deviceScaleFactor: width === "390" ? 2 : 1, colorScheme: scheme });
  const asked = [], complaints = [];
  context.on("request", (request) => asked.push(request.url()));
  context.on("weberror", (error) => complaints.push(String(error.error())));
  await context.grantPermissions(["clipboard-read", "clipboard-write"], { origin: url });
  const page = await context.newPage();
  page.on("console", (message) => message.type() === "error" && complaints.push(message.text()));
  await page.goto(`${url}${path}`);
  return { context, page, asked, complaints };
}

const narrow = ["390"];

async function settings(page, width, change) {
  if (narrow.includes(width)) await page.getByRole("button", { name: "Settings" }).click();
  await change();
  await inside(page);
  if (narrow.includes(width)) await page.getByRole("button", { name: "Done" }).click();
}

/** Checks that no content is wider than the window, so that the page does not scroll sideways. */
async function inside(page) {
  const [wide, window] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  assert.ok(wide <= window, `${wide} pixels of content in ${window}`);
}

async function ask(page, text) {
  await page.getByLabel("Message").fill(text);
  await page.keyboard.press("Enter");
}

/** Returns the last answer when it is complete and has this text. */
async function answered(page, text) {
  const last = page.locator(".answer:not(.running)").last();
  await last.filter({ hasText: text }).waitFor();
  await inside(page);
  return last;
}

async function fact(answer, name) {
  return answer.locator(".facts div", { has: answer.page().locator("dt", { hasText: new RegExp(`^${name}$`) }) }).locator("dd").innerText();
}

async function seen(page, name) {
  await page.screenshot({ path: join(process.env.PICTURES, `${name}.png`) });
}

/** The effective temperature is shown at the message field and with each answer. */
async function showsTemperature(page, width) {
  const shown = page.getByRole("note", { name: "Sampling" });
  await shown.filter({ hasText: "Temperature 0 (the server's default): each token is the likeliest one" }).waitFor();
  await ask(page, "What is 1 + 1?");
  assert.equal(await fact(await answered(page, "1 + 1 = 2."), "temperature"), "0");
  await settings(page, width, () => page.getByLabel("Temperature", { exact: true }).fill("0.25"));
  await shown.filter({ hasText: "Temperature 0.25 (set here): tokens are drawn, and answers differ" }).waitFor();
  await ask(page, "What is 17 + 25?");
  assert.equal(await fact(await answered(page, "17 + 25"), "temperature"), "0.25");
  await settings(page, width, () => page.getByLabel("Temperature", { exact: true }).fill(""));
  await page.getByRole("button", { name: "New chat" }).click();
}

async function chats(page, width) {
  await settings(page, width, () => page.getByLabel("Temperature", { exact: true }).fill("0"));
  await ask(page, "What is 17 + 25?");
  await answered(page, "17 + 25 = 42.");
  await ask(page, "Count from 3 to 60.");
  const answer = await answered(page, ", 59, 60");
  assert.ok(Number(await fact(answer, "tokens in")) > 5);
  assert.ok(Number(await fact(answer, "tokens out")) > 5);
  assert.match(await fact(answer, "TTFT"), /^[\d.]+ m?s$/);
  assert.match(await fact(answer, "tokens/s"), /^\d+$/);
  assert.match(await fact(answer, "queued"), /^[\d.]+ m?s$/);
  assert.equal(await fact(answer, "worker"), "worker-0");
  assert.match(await fact(answer, "cached"), /^\d+$/);
  assert.equal(await fact(answer, "retractions"), "0");
}

async function callsTools(page, width) {
  await page.getByRole("button", { name: "New chat" }).click();
  await settings(page, width, async () => {
    await page.getByText("Tools", { exact: true }).click();
    await page.getByLabel("Functions as JSON").fill("[{");
    await page.getByText("Not valid JSON").waitFor();
    await page.getByRole("button", { name: "Fill in an example" }).click();
    await page.getByText("Valid: get_mayor, get_age.").waitFor();
  });
  await ask(page, "What is the age of the mayor of Lima?");
  await page.getByLabel("Result of get_mayor").fill("Ada");
  await page.getByRole("button", { name: "Send result" }).click();
  await page.getByLabel("Result of get_age").waitFor();
  assert.deepEqual(JSON.parse(await page.locator(".call pre").last().innerText()), { person: "Ada" });
  await page.getByLabel("Result of get_age").fill("52");
  await page.keyboard.press("Enter");
  await answered(page, "The age of the mayor of Lima is 52.");
  assert.ok(Number(await fact(await answered(page, "52"), "cached")) > 0, "both requests must begin with the same tokens");
  await ask(page, "Count from 3 to 60.");
  await answered(page, ", 59, 60");
  await page.locator("#settings").evaluate((each) => each.scrollTo(0, 0));
  await seen(page, `playground-${width}`);
}

async function stops(page, width) {
  await page.getByRole("button", { name: "New chat" }).click();
  await settings(page, width, () => page.getByLabel("Functions as JSON").fill(""));
  for (const [how, text] of [["Escape", "Count from 1 to 10"], ["Stop", "Count from 2 to 10"]]) {
    const before = await measured("rootstock_gateway_aborts_total", '{phase="streaming"}');
    await ask(page, text);
    await page.locator(".answer.running .text", { hasText: ", 5" }).waitFor();
    await (how === "Stop" ? page.getByRole("button", { name: "Stop" }).click() : page.keyboard.press("Escape"));
    await answered(page, "Stopped.");
    await until(async () => (await measured("rootstock_gateway_aborts_total", '{phase="streaming"}')) === before + 1, "the abort");
    await until(async () => (await measured("rootstock_gateway_requests_in_flight")) === 0, "the request's end");
  }
}

async function holdsToSchema(page, width) {
  await page.getByRole("button", { name: "New chat" }).click();
  await settings(page, width, async () => {
    await page.getByText("Output format", { exact: true }).click();
    await page.getByLabel("The answer is").selectOption("json_schema");
  });
  await ask(page, "Give the JSON for name Ada, age 36.");
  await answered(page, "Valid by the schema");
  await page.route(CHAT, (route) => route.fulfill(stream('{"name": "Ada", "age": "old"}')));
  await ask(page, "Again.");
  await answered(page, "Not of the schema: $.age is not of type integer");
  await page.unroute(CHAT);
  await settings(page, width, () => page.getByLabel("The answer is").selectOption("text"));
}

function stream(...contents) {
  const chunks = contents.map((content) => ({ choices: [{ index: 0, delta: typeof content === "string" ? { content } : content, finish_reason: null }] }));
  const body = [...chunks.map((each) => `data: ${JSON.stringify(each)}\n\n`), "data: [DONE]\n\n"].join("");
  return { status: 200, contentType: "text/event-stream", body };
}

/** Output text, reasoning and tool calls are shown as text, even if they contain HTML. */
async function staysText(page) {
  const call = [{ index: 0, id: "a", function: { name: HOSTILE, arguments: HOSTILE } }];
  await page.getByRole("button", { name: "New chat" }).click();
  await page.route(CHAT, (route) => route.fulfill(stream({ reasoning_content: HOSTILE }, HOSTILE, { tool_calls: call })));
  await ask(page, HOSTILE);
  const answer = await answered(page, "<b>code</b>");
  assert.equal(await answer.locator("img, script, b, a").count(), 0);
  assert.equal(await answer.locator(".text pre").innerText(), "<b>code</b>");
  assert.equal(await page.locator(".user img, .user script").count(), 0);
  assert.equal(await page.evaluate(() => window.taken), undefined);
  await page.unroute(CHAT);
  await page.getByRole("button", { name: "New chat" }).click();
}

const MARKDOWN = `# Title #

Some *em*, **strong**, ***both***, ~~gone~~, \`a*b\` and snake_case_name, 2 * 3 * 4,
next line with \\*stars\\*.

1. one
2. two
   - deep **item**
   - deeper
     more

> quoted
> > twice

| a | b |
| --- | :-: |
| 1 | **2** |

[a page](https://example.test/a_(b)?c=1) and https://example.test/d.

---

\`\`\`python
def f():
    return "*"
\`\`\`
The end.`;

async function asksFor(page, ...contents) {
  await page.route(CHAT, (route) => route.fulfill(stream(...contents)));
  await ask(page, "Go on.");
  const answer = page.locator(".answer:not(.running)").last();
  await answer.locator(".facts, .views").first().waitFor();
  await answer.getByRole("button", { name: "Answer again" }).waitFor();
  await page.unroute(CHAT);
  return answer;
}

async function rendersMarkdown(page) {
  const answer = await asksFor(page, MARKDOWN), text = answer.locator(".text");
  const texts = (selector) => text.locator(selector).allInnerTexts();
  assert.deepEqual(await texts("h3"), ["Title"]);
  assert.deepEqual(await texts("p em:not(:has(strong))"), ["em"]);
  assert.deepEqual(await texts("p > strong"), ["strong", "item"]);
  assert.deepEqual(await texts("em > strong"), ["both"]);
  assert.deepEqual([await texts("del"), await texts("code")], [["gone"], ["a*b"]]);
  assert.match((await texts("p"))[0], /snake_case_name, 2 \* 3 \* 4,\nnext line with \*stars\*\./);
  assert.deepEqual(await texts("ol > li > p"), ["one", "two"]);
  assert.deepEqual(await texts("ol > li > ul > li > p"), ["deep item", "deeper\nmore"]);
  assert.deepEqual(await texts("blockquote blockquote p"), ["twice"]);
  assert.deepEqual([await texts("th"), await texts("td")], [["a", "b"], ["1", "2"]]);
  const links = await text.locator("a").evaluateAll((all) => all.map((each) => [each.textContent, each.href, each.rel, each.target]));
  const kept = ["noopener noreferrer", "_blank"];
  assert.deepEqual(links, [["a page", "https://example.test/a_(b)?c=1", ...kept], ["https://example.test/d", "https://example.test/d", ...kept]]);
  assert.equal(await text.locator("hr").count(), 1);
  assert.deepEqual([await texts(".fence pre"), await text.locator("figcaption").first().evaluate((each) => each.firstChild.data)], [['def f():\n    return "*"'], "python"]);
  assert.equal((await texts("p")).at(-1), "The end.");
  await inside(page);
}

const pasted = async (page) => {
  await page.getByLabel("Message").fill("");
  await page.keyboard.press("ControlOrMeta+V");
  const value = await page.getByLabel("Message").inputValue();
  await page.getByLabel("Message").fill("");
  return value;
};

/** The page copies by a selection if it has no clipboard, as without TLS. */
async function copiesAnswers(page) {
  const answer = page.locator(".answer").last(), code = 'def f():\n    return "*"';
  for (const clipboard of [true, false]) {
    if (!clipboard) await page.evaluate(() => Object.defineProperty(navigator, "clipboard", { value: undefined, configurable: true }));
    for (const [name, text] of [["Copy", MARKDOWN], ["Copy code", code]]) {
      await answer.getByRole("button", { name, exact: true }).click();
      await answer.getByRole("button", { name: "Copied" }).waitFor();
      assert.equal(await pasted(page), text);
      await answer.getByRole("button", { name, exact: true }).waitFor();
    }
  }
  await page.evaluate(() => delete navigator.clipboard);
  const raw = answer.getByRole("button", { name: "Raw" });
  await raw.click();
  assert.equal(await answer.locator(".text").evaluate((each) => each.childElementCount || each.textContent), MARKDOWN);
  assert.equal(await raw.getAttribute("aria-pressed"), "true");
  await raw.click();
  assert.equal(await answer.locator(".text h3").count(), 1);
}

/** A streamed text ends with the same nodes as a text that arrives whole. A complete block keeps its node during the stream. */
async function rendersMarkdownWhileItStreams(page) {
  await page.evaluate(() => {
    window.ownFetch = window.fetch;
    window.fetch = async (path, options) => {
      if (!String(path).includes("chat/completions")) return window.ownFetch(path, options);
      const body = new ReadableStream({ start: (given) => (window.given = given) });
      return new Response(body, { status: 200, headers: { "content-type": "text/event-stream" } });
    };
    const bytes = (text) => new TextEncoder().encode(text);
    window.push = async (content) => {
      window.given.enqueue(bytes(`data: ${JSON.stringify({ choices: [{ index: 0, delta: { content }, finish_reason: null }] })}\n\n`));
      await new Promise((wake) => requestAnimationFrame(() => requestAnimationFrame(wake)));
    };
    window.end = () => window.given.enqueue(bytes("data: [DONE]\n\n"));
  });
  await ask(page, "Go on.");
  await page.waitForFunction(() => window.given);
  const [same, before] = await page.evaluate(async (text) => {
    let first;
    for (let index = 0; index < text.length; index += 3) {
      await window.push(text.slice(index, index + 3));
      if (index > 40) first ??= document.querySelector(".running .text > h3");
    }
    const shown = document.querySelector(".running .text");
    return [first === shown.querySelector("h3"), shown.innerHTML];
  }, MARKDOWN);
  await page.evaluate(() => window.end());
  const answer = page.locator(".answer:not(.running)").last();
  await answer.getByRole("button", { name: "Answer again" }).waitFor();
  assert.deepEqual([same, await answer.locator(".text").evaluate((each) => each.innerHTML)], [true, before]);
  await page.evaluate(() => {
    window.fetch = window.ownFetch;
    delete window.given;
  });
}

/** Hostile texts of 100 kB are rendered, and create only the elements of Markdown. */
async function withstandsHostileMarkdown(page) {
  const times = (part, size = 100_000) => part.repeat(Math.ceil(size / part.length)).slice(0, size);
  const parts = ["[", "![a](", "[a](", "**", "*a ", "_a", "***a **b ", "`", "~~", "> ", "- ", "  - a\n", "1. ", "|", "|-", "# ", "\\", "http://", "<http://a", "&lt;", "\n", "> \n", "- \n\n", "`a`", "*a*", "a\n---\n", "```\n", " ", "-  ", "[a](b \"", "\u202e", "\ud800"];
  const nested = [Array.from({ length: 2000 }, (_, depth) => `${"  ".repeat(Math.min(depth, 40))}- a`).join("\n"), `${">".repeat(5000)} a`, times("~~~\n```\n", 8000), `|a|b|\n|-|-|\n${times("|1|2|\n")}`, Array.from({ length: 440 }, (_, length) => "`".repeat(length + 1)).join(" ")];
  const own = "a, blockquote, button, code, del, div, em, figcaption, figure, h3, h4, h5, h6, hr, li, ol, p, pre, strong, table, tbody, td, th, thead, tr, ul";
  for (const text of [...parts.map((each) => times(each)), ...nested]) {
    const answer = await asksFor(page, text), shown = answer.locator(".text");
    assert.equal(await shown.locator(`:not(:is(${own}))`).count(), 0, text.slice(0, 20));
    await page.getByRole("button", { name: "New chat" }).click();
  }
  const links = ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\tscript:alert(1)", "data:text/html,<script>1</script>", "vbscript:a", "file:///etc/passwd", "//elsewhere.test", "/v1/models", "blob:http://a", " javascript:alert(1)", "&#106;avascript:alert(1)", "https://"];
  const answer = await asksFor(page, links.map((each) => `[a](${each}) ![b](${each}) <${each}>`).join("\n\n"));
  const made = await answer.locator(".text a").evaluateAll((all) => all.map((each) => each.protocol));
  assert.deepEqual(made.filter((each) => !["http:", "https:"].includes(each)), []);
  assert.equal(await answer.locator("img, script").count(), 0);
  const own2 = await asksFor(page, '<a href="https://elsewhere.test" onclick="window.taken = 1">a</a><style>*{display:none}</style><svg onload="window.taken = 1">');
  assert.equal(await own2.locator(".text svg, .text style, .text [onclick], .text [onload]").count(), 0);
  assert.equal(await page.evaluate(() => window.taken), undefined);
  await page.getByRole("button", { name: "New chat" }).click();
}

/** Each of several parallel calls gets its own result, and all results are sent together. */
async function callsSeveral(page) {
  const calls = ["one", "two"].map((name, index) => ({ index, id: `call-${name}`, function: { name, arguments: "{}" } }));
  await page.route(CHAT, (route) => route.fulfill(stream({ tool_calls: calls })));
  await ask(page, "Both.");
  await page.getByLabel("Result of one").fill("1");
  await page.getByRole("button", { name: "Send results" }).click();
  assert.equal(await page.evaluate(() => document.activeElement.id), "result-call-two", "the missing result gets the focus");
  await ask(page, "Something else meanwhile.");
  assert.equal(await page.evaluate(() => document.activeElement.id), "result-call-two", "the missing result keeps the focus");
  await page.getByLabel("Message").fill("");
  await page.getByLabel("Result of two").fill("2");
  await page.unroute(CHAT);
  await page.route(CHAT, (route) => route.fulfill(stream("Three.")));
  const sent = page.waitForRequest(CHAT);
  await page.getByRole("button", { name: "Send results" }).click();
  const { messages } = (await sent).postDataJSON();
  assert.deepEqual(messages.slice(-2), [["one", "1"], ["two", "2"]].map(([name, content]) => ({ role: "tool", tool_call_id: `call-${name}`, content })));
  assert.deepEqual(messages.at(-3).tool_calls.map((call) => call.id), ["call-one", "call-two"]);
  await answered(page, "Three.");
  await page.unroute(CHAT);
  await page.getByRole("button", { name: "New chat" }).click();
}

/** Injected content is not executed and sends no request. */
async function holdsToItsPolicy(browser, width, path) {
  const { context, page, asked } = await opened(browser, width, path);
  const refused = await page.evaluate(async () => {
    const directives = [];
    document.addEventListener("securitypolicyviolation", (event) => directives.push(event.effectiveDirective));
    const script = document.createElement("script"), style = document.createElement("style"), image = document.createElement("img");
    script.textContent = "window.taken = 1";
    style.textContent = "body { color: red }";
    image.src = "https://elsewhere.test/a.png";
    document.body.append(script, style, image);
    document.body.setAttribute("onclick", "window.taken = 1");
    document.body.click();
    await fetch("https://elsewhere.test/").catch(() => undefined);
    while (directives.length < 5) await new Promise((wake) => setTimeout(wake, 20));
    return [directives.sort(), window.taken];
  });
  assert.deepEqual(refused, [["connect-src", "img-src", "script-src-attr", "script-src-elem", "style-src-elem"], undefined]);
  assert.ok(asked.length);
  await context.close();
}

const refusal = (status, message, headers = {}) => ({ status, headers, contentType: "application/json", body: JSON.stringify({ error: { message } }) });

async function tellsErrors(page, width) {
  const cases = [
    [refusal(429, "Slow down.", { "retry-after": "7" }), "Try again in 7 s."],
    [refusal(503, "Nobody is there.", { "retry-after": "3" }), "Try again in 3 s."],
    [refusal(400, "'top_k' is odd."), "'top_k' is odd."],
    [{ ...stream("So "), body: 'data: {"error": {"message": "A fault."}}\n\n' }, "A fault."],
    [{ ...stream("So "), body: "" }, "The stream has ended before its answer."],
    [refusal(401, "No key."), "The API key is missing"],
  ];
  for (const [answer, words] of cases) {
    await page.route(CHAT, (route) => route.fulfill(answer));
    await ask(page, "What is 1 + 1?");
    await page.getByRole("alert").last().filter({ hasText: words }).waitFor();
    await page.unroute(CHAT);
  }
  assert.equal(await page.evaluate(() => document.activeElement.id), "key");
  await page.route("**/v1/models", (route) => route.fulfill(refusal(401, "No key.")), { times: 1 });
  await page.keyboard.type("other-key");
  await page.keyboard.press("Tab");
  await page.getByText("The server wants an API key.", { exact: true }).waitFor();
  await page.getByLabel("API key").fill("secret-key");
  if (narrow.includes(width)) await page.getByRole("button", { name: "Done" }).click();
  const shown = page.waitForRequest(CHAT);
  await page.getByRole("button", { name: "Try again" }).last().click();
  assert.equal((await shown).headers().authorization, "Bearer secret-key");
  await answered(page, "1 + 1 = 2.");
  const kept = await page.evaluate(() => [localStorage.length, sessionStorage.length, document.cookie, location.href]);
  assert.deepEqual(kept, [0, 0, "", `${url}/`]);
  assert.deepEqual(await page.context().cookies(), []);
}

async function isLabelled(page) {
  const bare = await page.evaluate(() => [...document.querySelectorAll("input, select, textarea")].filter((each) => !each.labels.length && !each.ariaLabel).map((each) => each.id));
  assert.deepEqual(bare, []);
}

async function reference(browser, width) {
  const { context, page, asked, complaints } = await opened(browser, width, "/docs");
  await page.getByLabel("Filter").fill("post chat");
  await page.getByText("/v1/chat/completions").click();
  await page.getByText("x-rootstock-report (header)").waitFor();
  await page.getByText("max_completion_tokens", { exact: true }).waitFor();
  const names = await page.locator(".operation[open] .inside > dl").nth(1).locator("> .member > dt > code").allInnerTexts();
  assert.deepEqual(names.slice(0, 3), ["messages", "model", "max_completion_tokens"], "common fields come first");
  const example = await page.locator(".operation[open] .example").innerText();
  assert.match(example, new RegExp(`^curl ${url}/v1/chat/completions `));
  assert.equal(await page.getByText(/e-\d/).count(), 0, "numbers must be decimal");
  await page.locator(".answer", { hasText: "200" }).first().click();
  await page.getByText("ChatCompletionChunk", { exact: true }).first().click();
  await inside(page);
  assert.deepEqual([asked.filter((each) => new URL(each).origin !== url), complaints], [[], []]);
  await context.close();
}

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox"] });
try {
  for (const width of Object.keys(SIZES)) {
    const { context, page, asked, complaints } = await opened(browser, width);
    page.setDefaultTimeout(60_000);
    await isLabelled(page);
    await page.locator(".reference:not([hidden])").first().waitFor({ state: "attached" });
    await showsTemperature(page, width);
    await chats(page, width);
    await callsTools(page, width);
    await stops(page, width);
    await holdsToSchema(page, width);
    await staysText(page);
    await rendersMarkdown(page);
    await copiesAnswers(page);
    await page.getByRole("button", { name: "New chat" }).click();
    await rendersMarkdownWhileItStreams(page);
    await page.getByRole("button", { name: "New chat" }).click();
    await withstandsHostileMarkdown(page);
    await callsSeveral(page);
    assert.deepEqual(complaints, []);
    await tellsErrors(page, width);
    const others = asked.filter((each) => !each.startsWith("data:") && new URL(each).origin !== url);
    assert.deepEqual(others, [], "no request leaves the origin");
    assert.ok(asked.length > 10);
    await context.close();
    await reference(browser, width);
    for (const path of ["/", "/docs"]) await holdsToItsPolicy(browser, width, path);
    console.log(`${width} pixels: passed, ${asked.length} requests`);
  }
} finally {
  await browser.close();
}
