"""Inputs that failed for users of servers of this kind, on every API that can carry them, through the whole system."""

from __future__ import annotations

import http.client
import json
from typing import Any

import httpx
import pytest

from tests.e2e.system import System

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
QUESTION = "Count from 3 to 9."
USER = [{"role": "user", "content": QUESTION}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "demo", "messages": USER, "max_tokens": 40},
    COMPLETIONS: {"model": "demo", "prompt": QUESTION, "max_tokens": 40},
    GENERATE: {"text": QUESTION},
    MESSAGES: {"model": "demo", "messages": USER, "max_tokens": 40},
    RESPONSES: {"model": "demo", "input": QUESTION, "max_output_tokens": 40},
}
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
EVERY_API = pytest.mark.parametrize("path", BODIES)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def body_of(path: str, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    fields = {"sampling_params": {"max_new_tokens": 40, **sampling}} if path == GENERATE else sampling
    return {**BODIES[path], **fields, "stream": stream}


def text_of(path: str, content: str, stream: bool) -> str:
    """The text of an answer, of any API, whole or streamed."""
    if not stream:
        document = json.loads(content)
        if path == RESPONSES:
            return "".join(part["text"] for item in document["output"] for part in item["content"])
        if path == MESSAGES:
            return "".join(block["text"] for block in document["content"])
        if path == GENERATE:
            return str(document["text"])
        choice = document["choices"][0]
        return str(choice["message"]["content"] if path == CHAT else choice["text"])
    lines = [line[6:] for line in content.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    events = [json.loads(line) for line in lines]
    if path == GENERATE:
        return str(events[-1]["text"])
    if path == RESPONSES:
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    if path == MESSAGES:
        return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    choices = [choice for event in events for choice in event["choices"]]
    return "".join((choice["delta"].get("content") or "") if path == CHAT else choice["text"] for choice in choices)


def ask(system: System, path: str, stream: bool, **sampling: Any) -> str:
    answer = httpx.post(f"{system.url}{path}", json=body_of(path, stream, **sampling), timeout=60)
    assert answer.status_code == 200, answer.text
    return text_of(path, answer.text, stream)


@STREAMED
@EVERY_API
def test_http_1_0_gets_no_chunks(system: System, path: str, stream: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", system.port, timeout=60)
    connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
    connection.request("POST", path, json.dumps(body_of(path, stream, temperature=0)), {"connection": "keep-alive"})
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    assert answer.status == 200 and answer.getheader("transfer-encoding") is None
    assert text_of(path, content, stream) == ask(system, path, stream, temperature=0)


@STREAMED
@EVERY_API
def test_top_p_of_0_gives_the_likeliest_tokens(system: System, path: str, stream: bool) -> None:
    greedy = ask(system, path, stream, temperature=0)
    assert greedy and ask(system, path, stream, temperature=1, top_p=0) == greedy


@EVERY_API
def test_temperature_is_0_when_the_model_does_not_sample(system: System, path: str) -> None:
    card = httpx.get(f"{system.url}/v1/models").json()["data"][0]
    assert card["sampling_defaults"]["temperature"] == 0
    assert ask(system, path, False) == ask(system, path, False, temperature=0)


@STREAMED
@pytest.mark.parametrize(
    ("path", "hosted", "function"),
    [
        (
            CHAT,
            {"type": "custom", "custom": {"name": "a"}},
            {"type": "function", "function": {"name": "b", "parameters": SCHEMA}},
        ),
        (RESPONSES, {"type": "web_search"}, {"type": "function", "name": "b", "parameters": SCHEMA}),
        (RESPONSES, {"type": "local_shell"}, {"type": "function", "name": "b", "parameters": SCHEMA}),
        (RESPONSES, {"type": "image_generation"}, {"type": "function", "name": "b", "parameters": SCHEMA}),
        (MESSAGES, {"type": "web_search_20250305", "name": "web_search"}, {"name": "b", "input_schema": SCHEMA}),
    ],
    ids=["custom", "web search", "local shell", "image generation", "messages"],
)
def test_hosted_tools_are_left_out(system: System, path: str, hosted: Any, function: Any, stream: bool) -> None:
    body = {**body_of(path, stream), "tools": [hosted, function]}
    answer = httpx.post(f"{system.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-rootstock-omitted-tools"].partition(":")[0] == hosted["type"]
