"""Short chat templates, each with one property of a published template, and a renderer for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rootstock_llm.services.tokenizer.render_child import Renderer

HEADER = {"add_generation_prompt": True, "continue_final_message": False}
END = "{% if add_generation_prompt %}<assistant>{% endif %}"
ALTERNATE = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
# As in Mistral's templates, messages with tool calls or their results do not count for the alternation of roles.
ALTERNATE_BUT_CALLS = (
    "{% set ns = namespace(n=0) %}{% for m in rest %}{% if m.role in ['user', 'assistant'] and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
)
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
ITEMS = "{% for k, v in c.function.arguments|items %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}"
SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
)


def each(body: str, before: str = "") -> str:
    return before + "{% for m in messages %}" + body + "{% endfor %}" + END


def turns(shown: str) -> str:
    """Returns a template that writes `shown` for the message of every role."""
    return each("<{{ m.role }}>" + shown)


SHAPES: Mapping[str, str] = {  # by property
    "prints content": turns("{{ m.content }}" + CALLS),
    "concatenates content": turns("{{ m.content + '|' }}" + CALLS),
    "trims content": turns("{{ m['content'] | trim }}" + CALLS),
    "splits content": turns("{{ m.content.split('</think>')[-1] }}" + CALLS),
    "content is none beside calls": each(
        "<{{ m.role }}>{% if m.role == 'assistant' and m['content'] is none %}"
        + CALLS
        + "{% else %}{{ m['content'] + '|' }}{% endif %}"
    ),
    "content is absent beside calls": each(
        "<{{ m.role }}>{% if 'content' in m %}{{ m.content }}{% else %}" + CALLS + "{% endif %}"
    ),
    "calls or content": each("<{{ m.role }}>{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content + '|' }}{% endif %}"),
    "parts in user messages alone": each(
        "<{{ m.role }}>{% if m.role == 'user' and m.content is not string %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% else %}{{ m.content + '|' }}{% endif %}" + CALLS
    ),
    "parts alone": turns("{% for p in m.content %}{{ p['text'] }}{% endfor %}" + CALLS),
    "first part alone": turns("{{ m.content[0]['text'] + '|' }}" + CALLS),
    "parts or string by a macro": each(
        "<{{ m.role }}>{{ show(m.content) }}" + CALLS,
        "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for p in content %}{% if 'text' in p %}"
        "{{ p.text }}{% else %}{{ raise_exception('Unexpected part.') }}{% endif %}{% endfor %}{% endif %}{% endmacro %}",
    ),
    "iterates over arguments": turns(
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}" + ITEMS + "{% endfor %}"
    ),
    "items() of arguments": turns(
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %}{% endfor %}"
    ),
    "names of arguments": turns(
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
        "{% for k in c.function.arguments %}{{ k }}={{ c.function.arguments[k] }}{% endfor %}{% endfor %}"
    ),
    "arguments as text": turns(
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + c.function.arguments }}{% endfor %}"
    ),
    "arguments by kind": turns(
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% if c.function.arguments is string %}"
        "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}"
    ),
    "mappings alone": turns(
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% if c.function.arguments is mapping %}"
        "{{ c.function.arguments | tojson }}{% endif %}{% endfor %}"
    ),
    "defined, then indexed": turns(
        "{{ m.content }}{% if m.tool_calls is defined %}<call>{{ m.tool_calls[0].function.name }} "
        "{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
    ),
    "one call a turn": each(
        "<{{ m.role }}>{% if 'tool_calls' in m %}{% if m.tool_calls|length != 1 %}{{ raise_exception('One call!') }}{% endif %}"
        + CALLS
        + "{% else %}{{ m.content + '|' }}{% endif %}"
    ),
    "first call alone": turns(
        "{{ m.content }}{% if m.tool_calls %}<call>{% set f = m.tool_calls[0].function %}{{ f.name }}{{ f.arguments | tojson }}"
        "{% endif %}"
    ),
    "short ids": turns(
        "{{ m.content }}{% for c in m.tool_calls or [] %}{% if c.id is not defined or c.id|length != 9 %}"
        "{{ raise_exception('Ids have length 9.') }}{% endif %}{% endfor %}" + CALLS
    ),
    "one system message, first": each(
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be first.') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}" + CALLS
    ),
    "later system messages left out": SYSTEM_FIRST
    + "{% for m in rest %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}"
    + CALLS
    + "{% endif %}{% endfor %}"
    + END,
    "no system messages": each(
        "{% if m.role == 'system' %}{{ raise_exception('System role not supported.') }}{% endif %}<{{ m.role }}>{{ m.content }}"
        + CALLS
    ),
    "strict alternation": SYSTEM_FIRST
    + "{% for m in rest %}"
    + ALTERNATE
    + "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('Only user and assistant roles.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content + '|' }}{% endfor %}" + END,
    "strict alternation without system messages": each(
        "{% if m.role == 'system' %}{{ raise_exception('System role not supported.') }}{% endif %}"
        + ALTERNATE
        + "<{{ m.role }}>{{ m['content'] | trim }}"
    ),
    "alternation beside calls": SYSTEM_FIRST
    + ALTERNATE_BUT_CALLS
    + "{% for m in rest %}{% if m.role not in ['user', 'assistant', 'tool'] %}{{ raise_exception('Unknown role.') }}{% endif %}"
    "<{{ m.role }}>{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content + '|' }}{% endif %}{% endfor %}" + END,
    "a user is needed": each(
        "<{{ m.role }}>{{ m.content }}" + CALLS,
        "{% if not messages|selectattr('role', 'equalto', 'user')|list %}{{ raise_exception('No user.') }}{% endif %}",
    ),
    "results follow calls": each(
        "{% if m.role == 'tool' and messages[loop.index0 - 1].role not in ['tool', 'assistant'] %}"
        "{{ raise_exception('A result follows its call.') }}{% endif %}<{{ m.role }}>{{ m.content }}" + CALLS
    ),
    "text or calls needed": each(
        "{% if m.role == 'assistant' and not m.content and not m.tool_calls %}{{ raise_exception('Text or calls.') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}" + CALLS
    ),
    "text or thinking beside calls": each(
        "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('Not both.') }}{% endif %}"
        "<{{ m.role }}>{{ m.content or m.thinking }}<call>{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}"
    ),
    "roles by branches": each(
        "{% if m.role == 'user' %}<user>{{ m.content }}{% elif m.role == 'assistant' %}<assistant>{{ m.content or '' }}"
        + CALLS
        + "{% elif m.role == 'system' %}<system>{{ m.content }}{% elif m.role == 'tool' %}<tool>{{ m.content | tojson }}"
        "{% else %}{{ raise_exception('Unknown role ' ~ m.role) }}{% endif %}"
    ),
    "developer known": each(
        "{% if m.role in ['developer', 'system'] and not loop.first %}{{ raise_exception('First!') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}" + CALLS
    ),
}
# Templates that omit calls.
WITHOUT_CALLS = ("strict alternation", "strict alternation without system messages")


def renderer(template: str, **setup: Any) -> Renderer:
    return Renderer(
        {"templates": {"default": template}, "special_tokens": {}, "max_chars": 100_000, "max_messages": 1000, **setup}
    )


def rendered(template: str, messages: list[dict[str, Any]], tools: list[Any] | None = None, **kwargs: Any) -> str:
    """Returns the rendered chat. Raises InvalidField or TooMuch if the renderer refuses the chat."""
    tools_json = json.dumps(tools).encode() if tools else b""
    return renderer(template).render(HEADER, json.dumps(messages).encode(), tools_json, json.dumps(kwargs).encode())
