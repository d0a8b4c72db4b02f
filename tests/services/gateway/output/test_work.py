"""Tests that the cost of parsing a character does not grow with the output.

Cost is the number of calls, or of reread characters.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import pytest

from rootstock_llm.services.gateway.api.texts.parsing import calls_in
from rootstock_llm.services.gateway.output import json_text
from rootstock_llm.services.gateway.output.event_writer import EventWriter
from rootstock_llm.services.gateway.output.formats.families import output_parser
from rootstock_llm.services.gateway.output.output_parser import CallArguments, CallEnd, CallStart, Event, OutputParser, Text
from rootstock_llm.services.gateway.output.reading import ReadingParser
from rootstock_llm.services.gateway.output.source import Marks, Source
from rootstock_llm.services.shared.output_formats import OutputFormats
from tests.services.gateway.output.outputs import events, setup_of

# By format: a text that is written once, and a text that is written repeatedly after it. The repeated texts are plain text, white
# space, false beginnings of calls, and long values.
REPEATED: Mapping[OutputFormats, list[tuple[str, str]]] = {
    OutputFormats("hermes", "think"): [
        ("", "<tool_call>"),
        ("", " \n"),
        ("", '<tool_call>{"name": '),
        ("<think>", "</thin"),
        ("<think>", "<tool_call>"),
        ("<think>", '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'),
        ("<think>", '<tool_call>{"name": "ping", "arguments": {}}</tool_call>a'),
        ('<tool_call>{"name": "ping", "arguments": {"a": "', '</tool_call>\\"'),
        ('<tool_call>{"name": "ping", "arguments": {"a": [', '"</tool_call>", '),
        ('<tool_call>{"name": "ping", "arguments": {"a": NaN, "b": [', '"</tool_cal", ['),
        ('<tool_call>{"name": "ping", "arguments": {"a": "', '\\"}'),
        ('<tool_call>{"arguments": {"a": "', "x<tool_call>"),
        ('<tool_call>{"name": "ping", "arguments": "{', "\\u00e9\\ud83d"),
        ("", '<tool_call>{"name": "ping", "arguments": {}}</tool_call>\n'),
    ],
    OutputFormats("qwen3_coder"): [
        ("", "<tool_call>\n<function="),
        ("<function=search><parameter=query>", "\n</parameter"),
        ("<function=search><parameter=tags>", "\n</parameter"),
        ("<function=search><parameter=query>", "\n</function>"),
        ("<function=search>", "<parameter=query>\n</function>\n</parameter>"),
        ("<function=search>", '<parameter=tags>["</function>", "\n'),
        ("<function=search>", "<parameter=tags>[</parameter>"),
        ("<function=nope>", "<parameter=a>1</parameter>"),
        ("", "<function=nope><parameter=a>x</function>"),
    ],
    OutputFormats("llama3_json"): [
        ("", "{"),
        ("", '{"name": "'),
        ("", '{"name": "x", "id": ['),
        ("", '{"type": {"name": '),
        ("", '{"id":' * 20 + "]"),
    ],
    OutputFormats("pythonic"): [
        ("", "["),
        ("", "[nope(a="),
        ("", "[nope(a=["),
        ("[ping(a=", "[1, "),
        ("", "[ping(a='\\x41"),
        ("", "[ping("),
    ],
    OutputFormats("mistral"): [
        ("", "[TOOL_CALLS]"),
        ("", "[TOOL_CALLS][{"),
        ("[TOOL_CALLS]", "name"),
        ("[TOOL_CALLS]x[CALL_ID]", "[ARGS"),
    ],
    OutputFormats("deepseek_v3"): [("", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>")],
    OutputFormats("harmony", "harmony"): [
        ("", "<|channel|>"),
        ("<|channel|>analysis<|message|>", "<|en"),
        ("", "<|start|>a<|message|>"),
    ],
}
MARK_CHARS = 32  # longer than every mark


def unread(parser: OutputParser) -> int:
    """Returns the number of characters that the next feed() reads again."""
    assert isinstance(parser, ReadingParser)
    return len(parser._source._text) - parser._source._at


def count_calls(formats: OutputFormats, text: str) -> int:
    """Returns the number of calls of Python and C functions while the text is fed character by character and ended."""
    parser, count = output_parser(formats, setup_of()), 0

    def on_event(_frame: FrameType, event: str, _of: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for char in text:
        sys.setprofile(on_event)
        try:
            parser.feed(char)
        finally:
            sys.setprofile(None)
        assert unread(parser) <= MARK_CHARS
    sys.setprofile(on_event)
    try:
        parser.finish()
    finally:
        sys.setprofile(None)
    return count


def test_parser_input_is_not_copied_while_no_text_is_read() -> None:
    source = Source()
    source.add("{" * 100)
    text = source._text
    for _ in range(3):
        reading = source.take()
        with pytest.raises(StopIteration) as read:
            next(reading)
        source.give_back(read.value.value)
        assert source._text is text and source._at == 0


class CountingPattern:
    """A compiled pattern that counts the characters that it searches."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self.num_searched = 0

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        found = self._pattern.search(text, at)
        self.num_searched += (found.end() if found else len(text)) - at
        return found

    def sub(self, new: str, text: str) -> str:
        self.num_searched += len(text)
        return self._pattern.sub(new, text)


def test_removal_of_nested_marks_searches_each_character_a_constant_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_searched(depth: int) -> int:
        pattern = CountingPattern(re.compile("<call>|</call>"))
        with monkeypatch.context() as patch:
            patch.setattr(re, "compile", lambda _: pattern)
            marks = Marks("<call>", "</call>")
        assert marks.without("a" + "<ca" * depth + "<call>" + "ll>" * depth + "b") == "ab"
        return pattern.num_searched

    assert num_searched(1000) <= 11 * num_searched(100)


class CountingMarks(Marks):
    """Marks that store the size of the largest text in which they were searched."""

    largest = 0

    def find(self, text: str, at: int, stop: int) -> re.Match[str] | None:
        self.largest = max(self.largest, stop - at)
        return super().find(text, at, stop)


def test_text_after_a_removed_mark_is_joined_without_a_search_of_all_held_blanks() -> None:
    marks = CountingMarks("</call>")
    writer = EventWriter(setup_of(), marks)
    writer.text("a" * 1000)
    for _ in range(1000):
        writer.stray("</call>")
        writer.text(" ")
    writer.finish()
    assert writer.log.take() == [Text("a" * 1000 + " " * 1000)]
    assert 0 < marks.largest <= 2 * MARK_CHARS


class CountingList(list[str]):
    """A list that counts the elements of all lists in which a value was searched."""

    num_searched = 0

    def __contains__(self, value: object) -> bool:
        CountingList.num_searched += len(self)
        return super().__contains__(value)


def test_surplus_brackets_of_a_broken_call_are_skipped_without_a_search_of_all_open_brackets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    CountingList.num_searched = 0
    monkeypatch.setattr(json_text, "list", CountingList, raising=False)
    text = '<tool_call>{"name": "ping", "arguments": {"a": NaN, ' + "{" * 1000 + "]" * 1000 + "}" * 1002 + "</tool_call>b"
    found = events(OutputFormats("hermes"), [text])
    assert found == [CallStart(0, "ping"), CallArguments(0, "{}"), CallEnd(0), Text("b")]
    assert CountingList.num_searched <= 3000


def test_event_loop_runs_other_tasks_during_a_long_output() -> None:
    async def body() -> None:
        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        turns, counting = 0, asyncio.create_task(count())
        assert await calls_in("{" * 30_000, {}, "llama3_json", output_parser) == {"normal_text": "{" * 30_000, "calls": []}
        assert turns > 20
        counting.cancel()

    asyncio.run(body())


class CountingText(str):
    """A piece of text that counts the characters of all texts that it is added to, including its own."""

    num_copied = 0

    def __radd__(self, other: str) -> str:
        CountingText.num_copied += len(other) + len(self)
        return str.__add__(other, self)


def test_arguments_of_a_call_are_joined_without_repeated_copies() -> None:
    class Parser:
        def feed(self, text: str) -> list[Event]:
            return [CallStart(0, "ping"), *(CallArguments(0, CountingText(char)) for char in text)]

        def finish(self, cut: bool = False) -> list[Event]:
            return [CallEnd(0)]

    CountingText.num_copied = 0
    found = asyncio.run(calls_in("{" + " " * 1000 + "}", {"ping": None}, "hermes", lambda *_: Parser()))
    assert found["calls"] == [{"tool_index": 0, "name": "ping", "parameters": "{" + " " * 1000 + "}"}]
    assert CountingText.num_copied <= 2 * 1002


def test_parser_work_per_character_does_not_grow_with_the_length_of_the_output() -> None:
    """Some characters are read twice, because they look like the beginning of a call."""
    for formats, outputs in REPEATED.items():
        for once, again in outputs:
            short, long = (once + again * (size // len(again)) for size in (600, 2400))
            few, many = count_calls(formats, short), count_calls(formats, long)
            assert many / len(long) <= 1.1 * few / len(short), (once, again)
