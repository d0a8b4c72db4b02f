"""Tests that each shape of template renders every chat that the API allows, with the text of every message."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rootstock_llm.services.tokenizer.render_child import ChatTemplate, InvalidField
from tests.services.tokenizer.template_shapes import CALLS, HEADER, SHAPES, WITHOUT_CALLS, each, rendered, renderer, turns

Message = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


def turn(role: str, text: Any = "", **fields: Any) -> Message:
    return {"role": role, "content": text or f"{role}'s.", **fields}


def call(arguments: Any = '{"a": "given"}', name: str = "call_1") -> Message:
    return {"id": name, "type": "function", "function": {"name": "find", "arguments": arguments}}


def calls(*tool_calls: Message, **fields: Any) -> Message:
    return {"role": "assistant", "tool_calls": list(tool_calls or [call()]), **fields}


def result(number: int = 1, text: str = "found") -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": f"{text}{number}"}


def with_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": f"{message['content']}{number}"} for number in (1, 2)]}


USER, ANSWER, SYSTEM, DEVELOPER = (turn(role) for role in ("user", "assistant", "system", "developer"))
TWO_CALLS = calls(call(), call('{"a": "more"}', "call_2"))
# Arguments of a call that are no JSON object
NO_OBJECTS = ('{"a": 1', "not json", "[1]", '"s"', "7", "null", 7, [1], None, "")
CHATS: dict[str, list[Message]] = {
    "content null beside a call": [USER, calls(content=None), result()],
    "content absent beside a call": [USER, calls(), result()],
    "content empty beside a call": [USER, calls(content=""), result()],
    "content without parts beside a call": [USER, calls(content=[]), result()],
    "content null beside reasoning": [USER, {"role": "assistant", "content": None, "reasoning_content": "Hm."}, USER],
    "content null beside reasoning and a call": [USER, calls(content=None, reasoning_content="Hm."), result()],
    "content null alone": [USER, {"role": "assistant", "content": None}, USER],
    "empty tool_calls": [USER, {**ANSWER, "tool_calls": []}, USER],
    "empty fields": [USER, {**ANSWER, "tool_calls": [], "annotations": [], "audio": {}, "reasoning_content": ""}, USER],
    "parts in every role": [with_parts(SYSTEM), with_parts(USER), with_parts(ANSWER), with_parts(USER)],
    "parts in a result": [USER, calls(), with_parts(result())],
    "text beside a call": [USER, calls(content="Let me look."), result()],
    "text and reasoning beside a call": [USER, calls(content="Let me look.", reasoning_content="Hm."), result()],
    "two calls": [USER, TWO_CALLS, result(1), result(2)],
    "two calls, results in another order": [USER, TWO_CALLS, result(2), result(1)],
    "two calls, then a user": [USER, TWO_CALLS, result(1), result(2), USER],
    "two calls without ids": [
        USER,
        calls(*({"function": each["function"]} for each in TWO_CALLS["tool_calls"])),
        turn("tool"),
    ],
    "a later system message": [SYSTEM, USER, ANSWER, turn("system", "later"), USER],
    "a system message last": [USER, SYSTEM],
    "two leading system messages": [SYSTEM, turn("system", "second"), USER],
    "a system message alone": [SYSTEM],
    "a leading developer message": [DEVELOPER, USER],
    "a developer message behind a system message": [SYSTEM, DEVELOPER, USER],
    "a later developer message": [SYSTEM, USER, ANSWER, DEVELOPER, USER],
    "a system message before an answer": [USER, SYSTEM, ANSWER, USER],
    "two user turns": [USER, turn("user", "again")],
    "two assistant turns": [USER, ANSWER, turn("assistant", "again"), USER],
    "an assistant turn first": [ANSWER, USER],
    "an assistant turn behind a system message": [SYSTEM, ANSWER, USER],
    "an assistant turn alone": [ANSWER],
    "a user behind a result": [USER, calls(), result(), USER],
    "a user behind a call": [USER, calls(), USER],
    "a system message between call and result": [USER, calls(), SYSTEM, result(), USER],
    "a user between call and result": [USER, calls(), USER, result()],
    "a result without a call": [USER, result()],
    "a result without content": [USER, calls(), {"role": "tool", "tool_call_id": "call_1", "content": None}],
    "a function's result without content": [
        USER,
        {"role": "assistant", "function_call": call()["function"]},
        {"role": "function", "name": "find"},
    ],
    "a refusal in place of content": [USER, {"role": "assistant", "content": None, "refusal": "No."}, USER],
    "a result first": [result(), USER],
    "several rounds": [USER, calls(), result(), calls(call(name="call_2")), result(2), ANSWER, USER],
    "a function's older form": [
        USER,
        {"role": "assistant", "content": None, "function_call": call()["function"]},
        turn("function"),
    ],
    **{f"arguments {tool_calls!r}": [USER, calls(call(tool_calls), content=None), result()] for tool_calls in NO_OBJECTS},
    "arguments with half of a surrogate pair": [USER, calls(call('{"a": "\\ud83d given"}')), result()],
    "no arguments": [USER, calls({"id": "call_1", "type": "function", "function": {"name": "find"}}), result()],
}


def expected_texts(chat: list[Message], shows_calls: bool) -> Iterator[str]:
    """Yields the texts that a rendered chat has to contain. A template may leave out the text of a turn with calls."""
    for message in chat:
        tool_calls, content = message.get("tool_calls"), message.get("content")
        if not tool_calls and "function_call" in message:
            tool_calls = [{"function": message["function_call"]}]
        if tool_calls and shows_calls:
            yield from (each["function"]["name"] for each in tool_calls)
            yield from (word for word in ("given", "more", "not json") if word in json.dumps(tool_calls))
        elif not tool_calls:
            yield from [content] if isinstance(content, str) else [part["text"] for part in content or ()]


def check(name: str, chat: list[Message], text: str) -> None:
    for word in expected_texts(chat, name not in WITHOUT_CALLS):
        assert word in text, (word, text)
    assert "{'" not in text and "'text'" not in text and "None" not in text, text


@pytest.mark.parametrize("name", SHAPES)
def test_every_template_shape_renders_every_chat(name: str) -> None:
    for title, chat in CHATS.items():
        for tools in (None, TOOLS):
            try:
                text = rendered(SHAPES[name], chat, tools)
            except InvalidField as error:
                raise AssertionError(f"{title}: {error}") from error
            check(name, chat, text)


@pytest.mark.parametrize("name", SHAPES)
def test_one_renderer_renders_random_chats_with_every_template_shape(name: str) -> None:
    """Renders all chats with the same renderer, which remembers the form of messages that a template accepts."""
    drawn = random.Random(name)
    child = renderer(SHAPES[name])
    for _ in range(25):
        chat = [message for _ in range(drawn.randint(1, 4)) for message in drawn.choice(list(CHATS.values()))]
        check(name, chat, child.render(HEADER, json.dumps(chat).encode(), b"", b""))


def test_missing_message_content_is_rendered_as_empty_text() -> None:
    shown = turns("[{{ m.content + '' }}]")
    for said in ({}, {"content": None}, {"content": ""}, {"content": []}):
        assert rendered(shown, [USER, calls(**said)]) == "<user>[user's.]<assistant>[]<assistant>"


def test_call_arguments_that_are_no_json_object_are_rendered_as_text() -> None:
    def shown(template: str, arguments: Any) -> str:
        return rendered(template, [USER, calls(call(arguments)), result()]).partition("find")[2].partition("<tool>")[0]

    items = SHAPES["iterates over arguments"]
    for tool_calls, text in (
        ("not json", "not json"),
        ('{"a": 1', '{"a": 1'),
        ("[1]", "[1]"),
        ([1], "[1]"),
        ('"s"', '"s"'),
        ("null", "null"),
    ):
        assert shown(items, tool_calls) == f"<arguments>{text}</arguments>"
        assert shown(SHAPES["arguments as text"], tool_calls) == text
        assert shown(SHAPES["prints content"], tool_calls) == f" {json.dumps(text)}</call>"
    for tool_calls in (None, ""):
        assert shown(items, tool_calls) == "" and shown(SHAPES["prints content"], tool_calls) == " {}</call>"
        assert shown(SHAPES["arguments as text"], tool_calls) == "{}"
    assert shown(items, '{"a": "\\ud83d"}') == "<a>\ufffd</a>"


def test_tool_calls_are_split_over_turns_when_the_template_allows_one_call_per_turn() -> None:
    chat = [USER, {**TWO_CALLS, "content": "Both.", "reasoning_content": "Hm."}, result(2), result(1), turn("user", "On.")]
    turns_of_calls = (
        '<assistant><call>find {"a": "given"}</call><tool>found1|<assistant><call>find {"a": "more"}</call><tool>found2|'
    )
    assert rendered(SHAPES["one call a turn"], chat) == f"<user>user's.|{turns_of_calls}<user>On.|<assistant>"
    unknown = [USER, TWO_CALLS, turn("tool", "first", tool_call_id="x"), turn("tool", "second", tool_call_id="y")]
    text = rendered(SHAPES["one call a turn"], unknown)
    assert text.index("given") < text.index("first") < text.index("more") < text.index("second")


def test_system_messages_that_the_template_refuses_are_joined_with_other_messages() -> None:
    first, later = SHAPES["one system message, first"], turn("system", "Later.")
    assert rendered(first, [SYSTEM, later, USER]) == "<system>system's.\n\nLater.<user>user's.<assistant>"
    chat = [SYSTEM, USER, ANSWER, later, USER]
    assert rendered(first, chat) == "<system>system's.<user>user's.<assistant>assistant's.<user>Later.\n\nuser's.<assistant>"
    assert rendered(first, [USER, later]) == "<user>user's.<user>Later.<assistant>"
    assert rendered(SHAPES["strict alternation"], [USER, later]) == "<user>user's.\n\nLater.|<assistant>"
    between = [USER, calls(), later, result(), USER]
    assert rendered(first, between) == (
        '<user>user\'s.<assistant><call>find {"a": "given"}</call><tool>found1<user>Later.\n\nuser\'s.<assistant>'
    )
    assert rendered(SHAPES["no system messages"], chat) == (
        "<user>system's.\n\nuser's.<assistant>assistant's.<user>Later.\n\nuser's.<assistant>"
    )
    assert rendered(SHAPES["prints content"], chat) == (
        "<system>system's.<user>user's.<assistant>assistant's.<system>Later.<user>user's.<assistant>"
    )


def test_turns_are_joined_or_inserted_when_the_template_requires_alternating_roles() -> None:
    strict, beside_calls = SHAPES["strict alternation"], SHAPES["alternation beside calls"]
    assert rendered(strict, [USER, turn("user", "On.")]) == "<user>user's.\n\nOn.|<assistant>"
    assert rendered(strict, [ANSWER, USER]) == "<user>|<assistant>assistant's.|<user>user's.|<assistant>"
    assert rendered(strict, [USER, ANSWER, result()]) == "<user>user's.|<assistant>assistant's.|<user>found1|<assistant>"
    assert rendered(beside_calls, [USER, calls(), result(), USER]) == (
        '<user>user\'s.|<assistant><call>find {"a": "given"}</call><tool>found1|<assistant>|<user>user\'s.|<assistant>'
    )


def test_text_and_tool_calls_get_separate_turns_when_the_template_cannot_show_both() -> None:
    text = rendered(SHAPES["content is none beside calls"], [USER, calls(content="Look."), result()])
    assert text == '<user>user\'s.|<assistant>Look.|<assistant><call>find {"a": "given"}</call><tool>found1|<assistant>'


def test_message_text_becomes_a_content_part_when_the_template_shows_only_parts() -> None:
    shown = SHAPES["parts alone"]
    assert rendered(shown, [SYSTEM, USER]) == "<system>system's.<user>user's.<assistant>"
    assert rendered(SHAPES["first part alone"], [with_parts(USER)]) == "<user>user's.1 user's.2|<assistant>"


def test_refusal_names_the_message_that_the_template_cannot_render_in_any_form() -> None:
    bad = "{% if m.content == 'bad' %}{{ raise_exception('Not this.') }}{% endif %}{{ m.content }}"
    for at in range(4):
        chat = [
            turn(role, "bad" if at == index else "good") for index, role in enumerate(("system", "user", "assistant", "user"))
        ]
        with pytest.raises(InvalidField, match=rf"^messages\[{at}\]: Not this\.$"):
            rendered(each(bad), chat)
    with pytest.raises(InvalidField, match=r"^messages: Never\.$"):
        rendered("{{ raise_exception('Never.') }}", [USER])
    with pytest.raises(InvalidField, match=r"^messages\[1\]: the chat template failed with ZeroDivisionError$"):
        rendered(each("{% if m.role == 'assistant' %}{{ 1 / 0 }}{% endif %}"), [USER, ANSWER, USER])


def test_chat_is_rendered_when_the_probe_chats_fail() -> None:
    """The template needs a variable that the renderer's probe chats do not have."""
    shown = "{{ raise_exception('No day.') if day is not defined }}" + turns("{{ m.content + '|' }}" + CALLS)
    chat = [with_parts(USER), calls(content=None), result()]
    assert (
        rendered(shown, chat, day=1)
        == '<user>user\'s.1 user\'s.2|<assistant>|<call>find {"a": "given"}</call><tool>found1|<assistant>'
    )


def test_final_message_is_continued_when_turns_are_joined() -> None:
    chat = [SYSTEM, turn("system", "Second."), USER, turn("assistant", "Well")]
    header = {"add_generation_prompt": False, "continue_final_message": True}
    child = renderer(SHAPES["one system message, first"])
    text = child.render(header, json.dumps(chat).encode(), b"", b"")
    assert text == "<system>system's.\n\nSecond.<user>user's.<assistant>Well"
    reasoned = [USER, {"role": "assistant", "content": None, "reasoning_content": "Hm."}]
    assert child.render(header, json.dumps(reasoned).encode(), b"", b"") == "<user>user's.<assistant>"


def test_list_of_template_variables_has_every_variable_that_the_template_reads() -> None:
    source = (
        "{% set think = think | default(true) %}{% for m in messages %}{{ m.enable_thinking }}{% endfor %}{{ thinking if think }}"
    )
    assert ChatTemplate(source).variables == {"think", "thinking", "messages"}


@pytest.mark.parametrize("name", ["enable_thinking", "thinking", "think"])
def test_renderer_refuses_a_variable_that_the_template_does_not_read(name: str) -> None:
    header, chat = HEADER | {"read_variables": [name]}, json.dumps([USER]).encode()
    kwargs = json.dumps({name: True}).encode()
    child = renderer("{{ messages[0].content }}{{ " + name + " }}")
    assert child.render(header, chat, b"", kwargs) == "user's.True"
    with pytest.raises(InvalidField, match=f"^{name}: "):
        renderer("{{ messages[0].content }}").render(header, chat, b"", kwargs)
    assert renderer("{{ messages[0].content }}").render(HEADER, chat, b"", kwargs) == "user's."


def test_published_chat_templates_render_every_chat() -> None:
    for path in sorted(Path("models").glob("*/chat_template.jinja")):
        source = path.read_text(encoding="utf-8")
        for title, chat in CHATS.items():
            assert rendered(source, chat, TOOLS), (path, title)
