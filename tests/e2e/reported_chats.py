"""Chats in every form and order that an API allows, and a strict chat template that refuses or misrenders most of them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.e2e.reported_apis import CHAT, MESSAGES, RESPONSES, Json
from tests.services.tokenizer.test_history import CHATS, NO_OBJECTS

# A strict template. Content must be a string, except in user messages, where it may be parts. Arguments must be an object. The
# template allows one call per turn, and one system message at the beginning, followed by alternating user and assistant messages.
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


TURNS: dict[str, list[Json]] = {
    "a call alone": [ASKED, {"role": "assistant", "content": [USE]}, of_tool()],
    "two calls": [
        ASKED,
        {"role": "assistant", "content": [USE, OTHER]},
        {**of_tool(), "content": [*of_tool()["content"], *of_tool(2)["content"]]},
    ],
    **{
        f"arguments {given!r}": [ASKED, {"role": "assistant", "content": [{**USE, "input": given}]}, of_tool()]
        for given in NO_OBJECTS
    },
    "no arguments": [ASKED, {"role": "assistant", "content": [{**USE, "input": {}}]}, of_tool()],
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
    "thinking to continue": [
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
    **{f"arguments {given!r}": [ASKED, {**CALL, "arguments": given}, OUTPUT] for given in NO_OBJECTS},
    "a result without content": [ASKED, CALL, {**OUTPUT, "output": None}],
    "content null": [ASKED, {"role": "assistant", "content": None}, ASKED],
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
    **{f"chat: {name}": (CHAT, {"messages": chat, "max_tokens": 2}) for name, chat in CHATS.items()},
    **{f"messages: {name}": (MESSAGES, {"messages": chat, "max_tokens": 2}) for name, chat in TURNS.items()},
    "messages: several system blocks": (
        MESSAGES,
        {"messages": [ASKED], "max_tokens": 2, "system": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]},
    ),
    **{f"responses: {name}": (RESPONSES, {"input": items, "max_output_tokens": 2}) for name, items in ITEMS.items()},
    "responses: instructions and a system message": (
        RESPONSES,
        {"input": [{"role": "system", "content": "Two."}, ASKED], "instructions": "One.", "max_output_tokens": 2},
    ),
}
# Row of the table in test_reported_inputs.py → words in the names of its chats. A chat without such a word is in the last row.
ROWS = {
    "A1": ("content", "a call alone", "reasoning", "thinking", "an empty assistant turn"),
    "A2": ("empty",),
    "A3": ("arguments",),
    "A4": ("parts",),
    "A5": ("two calls", "several rounds", "a call between its results"),
    "A6": (),
}


def bodies_of(row: str) -> Sequence[str]:
    """Returns the names of a row's request bodies."""
    if ROWS[row]:
        return [name for name in BODIES if any(word in name for word in ROWS[row])]
    named = {name for words in ROWS.values() for name in BODIES if any(word in name for word in words)}
    return [name for name in BODIES if name not in named]
