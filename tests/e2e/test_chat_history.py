"""Tests that each API takes chats in every form and order for a model with a strict chat template, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.system import System
from tests.services.tokenizer.test_chat_history import CHATS

Json = dict[str, Any]
# Concatenates content, looks into parts of user messages only, iterates over arguments, allows one call a turn, and takes one
# system message, first, then user and assistant by turns.
STRICT = """{% if messages[0].role == 'system' %}<s>{{ messages[0].content + '|' }}{% set rest = messages[1:] %}{% else %}
{% set rest = messages %}{% endif %}{% set ns = namespace(n=0) %}{% for m in rest %}
{% if m.role not in ['user', 'assistant', 'tool'] %}{{ raise_exception('Unknown role ' + m.role) }}{% endif %}
{% if m.role in ['user', 'assistant'] and m.tool_calls is not defined %}
{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}
{% set ns.n = ns.n + 1 %}{% endif %}<{{ m.role }}>
{% if m.role == 'user' and m.content is not string %}{% for p in m.content %}{{ p.text }}{% endfor %}
{% else %}{{ m.content + '|' }}{% endif %}
{% if m.tool_calls is defined %}{% if m.tool_calls|length != 1 %}{{ raise_exception('One call!') }}{% endif %}
<call>{{ m.tool_calls[0].function.name }}{% for k, v in m.tool_calls[0].function.arguments|items %}<{{ k }}>{{ v }}{% endfor %}
{% endif %}{% endfor %}{% if think is defined %}{{ think }}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"""
USE = {"type": "tool_use", "id": "call_1", "name": "find", "input": {"a": 1}}
OTHER = {**USE, "id": "call_2"}
ASKED: Json = {"role": "user", "content": "Hi"}


def of_tool(number: int = 1) -> Json:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"call_{number}", "content": "found"}]}


MESSAGES: dict[str, list[Json]] = {
    "a call alone": [ASKED, {"role": "assistant", "content": [USE]}, of_tool()],
    "two calls": [
        ASKED,
        {"role": "assistant", "content": [USE, OTHER]},
        {**of_tool(), "content": [*of_tool()["content"], *of_tool(2)["content"]]},
    ],
    "a result, then text": [
        ASKED,
        {"role": "assistant", "content": [USE]},
        {**of_tool(), "content": [*of_tool()["content"], {"type": "text", "text": "On."}]},
    ],
    "thinking alone": [
        ASKED,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]},
        ASKED,
    ],
    "thinking and a call": [
        ASKED,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, USE]},
        of_tool(),
    ],
    "a later system message": [
        ASKED,
        {"role": "assistant", "content": "Hello"},
        {"role": "system", "content": "Be brief."},
        ASKED,
    ],
    "an assistant turn first": [{"role": "assistant", "content": "Hello"}, ASKED],
    "two user turns": [ASKED, ASKED],
    "thinking to go on from": [
        ASKED,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]},
    ],
}
CALL = {"type": "function_call", "call_id": "call_1", "name": "find", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "found"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
ITEMS: dict[str, list[Json]] = {
    "a call alone": [ASKED, CALL, OUTPUT],
    "two calls": [ASKED, CALL, {**CALL, "call_id": "call_2"}, OUTPUT, {**OUTPUT, "call_id": "call_2"}],
    "arguments that are no object": [ASKED, {**CALL, "arguments": "not json"}, OUTPUT],
    "a call between its results": [ASKED, CALL, OUTPUT, {**CALL, "call_id": "call_2"}, {**OUTPUT, "call_id": "call_2"}, ASKED],
    "reasoning alone": [ASKED, REASONING, ASKED],
    "reasoning without text": [ASKED, {**REASONING, "content": []}, ASKED],
    "reasoning and a call": [ASKED, REASONING, CALL, OUTPUT],
    "a later developer message": [
        ASKED,
        {"role": "assistant", "content": "Hello"},
        {"role": "developer", "content": "Be brief."},
        ASKED,
    ],
    "two system messages": [{"role": "system", "content": "One."}, {"role": "developer", "content": "Two."}, ASKED],
    "a system message last": [ASKED, {"role": "system", "content": "Be brief."}],
    "two user turns": [ASKED, ASKED],
    "an assistant turn first": [{"role": "assistant", "content": "Hello"}, ASKED],
    "an empty assistant turn": [ASKED, {"role": "assistant", "content": []}, ASKED],
}
BODIES: dict[str, tuple[str, Json]] = {
    **{f"chat: {name}": ("/v1/chat/completions", {"messages": chat, "max_tokens": 2}) for name, chat in CHATS.items()},
    **{f"messages: {name}": ("/v1/messages", {"messages": chat, "max_tokens": 2}) for name, chat in MESSAGES.items()},
    "messages: several system blocks": (
        "/v1/messages",
        {"messages": [ASKED], "max_tokens": 2, "system": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]},
    ),
    **{f"responses: {name}": ("/v1/responses", {"input": items, "max_output_tokens": 2}) for name, items in ITEMS.items()},
    "responses: instructions and a system message": (
        "/v1/responses",
        {"input": [{"role": "system", "content": "Two."}, ASKED], "instructions": "One.", "max_output_tokens": 2},
    ),
}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("strict")
    template = folder / "strict.jinja"
    template.write_text(STRICT)
    with System(folder, chat_template=str(template)) as running:
        yield running


def ask(system: System, path: str, body: Json, stream: bool) -> httpx.Response:
    return httpx.post(f"{system.url}{path}", json={**body, "model": "demo", "stream": stream, "temperature": 0}, timeout=60)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_chat_is_answered_by_a_model_with_a_strict_template(system: System, stream: bool) -> None:
    refused = {}
    for name, (path, body) in BODIES.items():
        answer = ask(system, path, body, stream)
        if answer.status_code != 200 or (stream and '"error":{' in answer.text):
            refused[name] = answer.text
    assert not refused


def test_unread_switch_is_refused_by_name(system: System) -> None:
    for name in ("enable_thinking", "thinking"):
        for path, body in (("/v1/chat/completions", {"messages": [ASKED]}), ("/v1/responses", {"input": "Hi"})):
            answer = ask(system, path, {**body, name: True}, False)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter"), answer.text
    assert ask(system, "/v1/chat/completions", {"messages": [ASKED], "think": True, "max_tokens": 2}, False).status_code == 200
    kwargs = {"enable_thinking": False}
    body = {"messages": [ASKED], "chat_template_kwargs": kwargs, "max_tokens": 2}
    assert ask(system, "/v1/chat/completions", body, False).status_code == 200
    assert (
        ask(system, "/v1/messages", {"messages": [ASKED], "thinking": {"type": "disabled"}, "max_tokens": 2}, False).status_code
        == 200
    )


def test_refusal_names_the_message(system: System, tmp_path: Path) -> None:
    messages = [ASKED, {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function"}]}, ASKED]
    answer = ask(system, "/v1/chat/completions", {"messages": messages}, False)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1]"), answer.text
    assert "call_1" not in json.dumps(answer.json())
