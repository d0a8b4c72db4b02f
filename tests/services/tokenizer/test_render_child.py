"""Tests of chat templates in the sandbox, checked messages, and the renderer's errors."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest

from rootstock_llm.services.tokenizer.render_child import (
    ChatTemplate,
    InvalidField,
    OutputTooLong,
    Renderer,
    TemplateRefusal,
    TooMuch,
    cut_at_tag,
    parse_json,
    prepare_messages,
    tag_final,
)


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(variables, 10_000)


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{{ x | tojson }}", '{"a": "<é>&"}'),
        ("{{ x | tojson(indent=1, ensure_ascii=True) }}", '{\n "a": "<\\u00e9>&"\n}'),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{{ dict(a=1).a }}", "1"),
        ("{{ missing }}", ""),
    ],
)
def test_template_renders_as_in_transformers(source: str, want: str) -> None:
    assert render(source, x={"a": "<é>&"}) == want


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__class__ }}{{ dict.__class__.__subclasses__() }}",
        "{{ ''|attr('__class__') |attr('__mro__') | list }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_template_cannot_reach_interpreter_internals(source: str) -> None:
    try:
        text = render(source, messages=[1])
    except (jinja2.TemplateError, TypeError):
        return
    assert "class" not in text and "object" not in text, text


def test_error_raised_by_a_template_keeps_the_message() -> None:
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_rendering_stops_at_the_character_limit() -> None:
    template = ChatTemplate("{% for i in range(100000) %}{% for j in range(100000) %}xxxxxxxxxx{% endfor %}{% endfor %}")
    with pytest.raises(OutputTooLong):
        template.render({}, 1000)


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_reasoning_is_copied_to_every_field_name_that_templates_use() -> None:
    message = prepare_messages([{"role": "assistant", "reasoning": "hm", "content": None}])[0]
    assert message == {"role": "assistant", "reasoning": "hm", "thinking": "hm", "reasoning_content": "hm"}


@pytest.mark.by_day(one_in=5, seed=1)
@pytest.mark.parametrize(
    ("field", "messages"),
    [
        ("messages:", []),
        ("messages[0]:", ["secret"]),
        ("messages[1].role:", [{"role": "user"}, {"content": "secret"}]),
        ("messages[0].content:", [{"role": "user", "content": 7}]),
        ("messages[0].content[1]:", [{"role": "user", "content": [PARTS[0], "secret"]}]),
        ("messages[0].content[0].type:", [{"role": "user", "content": [{"type": "image_url", "image_url": "secret"}]}]),
        ("messages[0].content[0].text:", [{"role": "user", "content": [{"type": "text", "text": ["secret"]}]}]),
        ("messages[0].tool_calls:", [{"role": "assistant", "tool_calls": "secret"}]),
        ("messages[0].tool_calls[0]:", [{"role": "assistant", "tool_calls": ["secret"]}]),
    ],
)
def test_error_for_an_invalid_message_names_the_field_but_not_the_value(field: str, messages: list[Any]) -> None:
    with pytest.raises(InvalidField) as raised:
        prepare_messages(messages)
    assert str(raised.value).startswith(field) and "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "data",
    [b"{", b"\xff", b"[" * 100_000, b"1" * 10_000, b'"secret"'],
    ids=["cut off", "not UTF-8", "deep", "long number", "string"],
)
def test_error_for_invalid_json_does_not_quote_the_json(data: bytes) -> None:
    with pytest.raises(InvalidField, match=r"^messages: ") as raised:
        parse_json("messages", data, list)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("template", "final", "want"),
    [
        ("A{{ messages[-1].content }}<end>", "well, ", "Awell, "),
        ("A{{ messages[-1].content | trim }}<end>", "well, ", "Awell,"),
        ("A{{ messages[-1].content }}<end>", "", "A"),
    ],
)
def test_prompt_ends_inside_the_final_message_when_the_message_is_continued(template: str, final: str, want: str) -> None:
    messages = prepare_messages([{"role": "assistant", "content": final}])
    tag_final(messages)
    assert cut_at_tag(render(template, messages=messages), final) == want


def test_continuation_is_refused_when_the_template_omits_the_final_message() -> None:
    with pytest.raises(InvalidField, match=r"^continue_final_message: "):
        cut_at_tag("nothing of it", "secret")


def renderer(template: str, **setup: Any) -> Renderer:
    return Renderer({"templates": {"default": template}, "special_tokens": {}, "max_chars": 100, "max_messages": 3, **setup})


HEADER = {"add_generation_prompt": True, "continue_final_message": False}
HELLO = json.dumps([{"role": "user", "content": "secret"}]).encode()


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("template", ["{{ messages[0].content + 1 }}", "{{ messages[0].content.nope.nope }}"])
def test_renderer_reports_only_the_type_of_a_python_error(template: str) -> None:
    with pytest.raises(InvalidField, match=r"^messages\[0\]: the chat template failed with \w+Error$"):
        renderer(template).render(HEADER, HELLO, b"", b"")


@pytest.mark.by_day(one_in=2, seed=13)
@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "tokenize", "add_generation_prompt"])
def test_renderer_refuses_reserved_template_kwargs(name: str) -> None:
    with pytest.raises(InvalidField, match=f"^template_kwargs: {name} "):
        renderer("x").render(HEADER, HELLO, b"", json.dumps({name: "y"}).encode())


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":  1}'}}
QUESTION = {"role": "user", "content": "?"}
CALLS = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
DONE = "{% endfor %}{% endif %}{% endfor %}"
# Templates that write calls in different ways, each with its output for CALL. The key is the way.
CALL_TEMPLATES = {
    "prints the object": (CALLS + "{{ c.function.arguments | tojson }}" + DONE, '{"x": 1}'),
    "prints each argument": (
        CALLS + "{% for name, value in c.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}" + DONE,
        "x=1",
    ),
    "concatenates the text": (CALLS + "{{ '[' + c.function.arguments + ']' }}" + DONE, '[{"x":  1}]'),
    "prints the text": (CALLS + "{{ c.function.arguments }}" + DONE, '{"x":  1}'),
    "tests content for none": (
        CALLS + "{% if m.content is none %}{{ c.function.arguments | tojson }}{% else %}text{% endif %}" + DONE,
        '{"x": 1}',
    ),
    "tests and concatenates": (
        "{% for m in messages %}{% if m.role == 'assistant' and m['content'] is none %}"
        "{{ m.tool_calls[0]['function']['name'] + '(' + m.tool_calls[0]['function']['arguments'] + ')' }}"
        "{% elif m.role == 'assistant' %}{{ m['content'] + '!' }}{% endif %}{% endfor %}",
        'f({"x":  1})',
    ),
    "shows no calls": ("{% for m in messages %}{{ m.content }}{% endfor %}", "?"),
}


def test_tool_call_is_rendered_in_the_form_that_the_template_expects() -> None:
    for name, (template, want) in CALL_TEMPLATES.items():
        child = renderer(template)
        for said in ({}, {"content": None}, {"content": ""}):
            chat = json.dumps([QUESTION, {"role": "assistant", "tool_calls": [CALL], **said}]).encode()
            assert child.render(HEADER, chat, b"", b"") == want, (name, said)


def test_renderer_shortens_call_ids_when_the_template_demands_nine_characters() -> None:
    """Mistral's templates demand nine characters. A call and its result get the same short id, and a short id stays as it is."""
    rule = "{% if c.id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
    shown = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}" + rule + "{{ c.id }}={{ c.function.arguments | tojson }};"
        "{% endfor %}{% if m.tool_call_id %}{{ m.tool_call_id }}{% endif %}{% endfor %}"
    )
    for given in ("call_302e1f11239a79bed40712c3", "toolu_0123456789abcdef01234567", "\ud83d", "abcdef123"):
        chat = [QUESTION, {"role": "assistant", "tool_calls": [CALL | {"id": given}]}, {"role": "tool", "tool_call_id": given}]
        found = [renderer(each).render(HEADER, json.dumps(chat).encode(), b"", b"") for each in (shown, shown.replace(rule, ""))]
        called, answered = found[0].split('={"x": 1};')
        assert called == answered and len(called) == 9 and called.isalnum() and (called == given) == (given == "abcdef123")
        assert found[1] == f'{given}={{"x": 1}};{given}'


def test_developer_message_becomes_a_system_message_when_the_template_has_no_developer_role() -> None:
    shown = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"

    def rendered(template: str, *roles: str) -> str:
        messages = [{"role": role, "content": str(at)} for at, role in enumerate(roles)]
        return renderer(template).render(HEADER, json.dumps(messages).encode(), b"", b"")

    assert rendered(shown, "developer", "user") == "system:0;user:1;"
    assert rendered(shown, "system", "developer", "user") == "system:0\n\n1;user:2;"
    assert rendered(shown, "user", "developer") == "user:0;system:1;"
    assert rendered(shown + "{# developer #}", "developer", "user") == "developer:0;user:1;"


def test_renderer_refuses_too_many_messages() -> None:
    with pytest.raises(TooMuch, match=r"^messages: 4 messages"):
        renderer("x").render(HEADER, json.dumps([{"role": "user"}] * 4).encode(), b"", b"")


def test_renderer_passes_variables_to_the_template() -> None:
    child = renderer(
        "{{ bos_token }}{{ thinking }}{{ add_generation_prompt }}{{ tools is none }}", special_tokens={"bos_token": "<s>"}
    )
    assert child.render(HEADER, HELLO, b"", b'{"thinking": 1}') == "<s>1TrueTrue"
