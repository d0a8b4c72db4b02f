"""Tests of calls that are unfinished, empty or damaged, and of calls in unclosed reasoning, in every format."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from rootstock_llm.services.gateway.output.formats.families import output_parser
from rootstock_llm.services.gateway.output.output_parser import Event, ParserSetup, Reasoning
from rootstock_llm.services.shared.output_formats import OutputFormats
from tests.services.gateway.output.outputs import calls_of, events, in_characters, text_of
from tests.services.gateway.output.test_damaged_outputs import arguments_of

READ = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}, "list": {"type": "array"}}}
SETUP = ParserSetup({"read": READ}, 100)
SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
HARMONY_CALL = "<|channel|>commentary to=functions.read <|constrain|>json<|message|>"


@dataclass(frozen=True)
class Family:
    """The texts from which calls of one format are built."""

    begin: str  # beginning of a call, before its arguments
    arguments: str  # the arguments {"path": "a"} in this format
    ends: tuple[str, ...]  # closing marks after the arguments, in order
    empty: tuple[str, ...]  # outputs with a call that has no arguments
    reasoning: str = "think_open"  # reasoning format

    @property
    def call(self) -> str:
        return "".join([self.begin, self.arguments, *self.ends])


OBJECT = '{"path": "a"}'
FAMILIES: Mapping[str, Family] = {
    "hermes": Family(
        '<tool_call>\n{"name": "read", "arguments": ',
        OBJECT,
        ("}", "\n</tool_call>"),
        (
            '<tool_call>{"name": "read", "arguments": }</tool_call>',
            '<tool_call>{"name": "read", "arguments": ""}</tool_call>',
            '<tool_call>{"name": "read"}</tool_call>',
            '<tool_call>{"name": "read"',
        ),
    ),
    "qwen3_coder": Family(
        "<tool_call>\n<function=read>\n<parameter=path>\n",
        "a",
        ("\n</parameter>", "\n</function>", "\n</tool_call>"),
        ("<tool_call>\n<function=read>\n</function>\n</tool_call>", "<function=read></function>", "<tool_call><function=read>"),
    ),
    "llama3_json": Family(
        '{"name": "read", "parameters": ',
        OBJECT,
        ("}",),
        (
            '{"name": "read", "parameters": {}}',
            '{"name": "read", "parameters": null}',
            '<|python_tag|>{"name": "read", "parameters": {',
            '<|python_tag|>{"name": "read"}',
            '<|python_tag|>{"name": "read"',
        ),
    ),
    "pythonic": Family("[read(", 'path="a"', (")", "]"), ("[read()]", "<|python_start|>[read()]<|python_end|>", "[read(")),
    "mistral": Family(
        "[TOOL_CALLS]read[ARGS]",
        OBJECT,
        (),
        ("[TOOL_CALLS]read[ARGS]", "[TOOL_CALLS]read[CALL_ID]abc[ARGS]", "[TOOL_CALLS]read", '[TOOL_CALLS][{"name": "read"}]'),
        "mistral_think",
    ),
    "deepseek_v3": Family(
        f"{SECTION}{CALL}function{SEP}read\n```json\n",
        OBJECT,
        ("\n```", CALL_END, SECTION_END),
        (
            f"{SECTION}{CALL}function{SEP}read\n```json\n```{CALL_END}{SECTION_END}",
            f"{SECTION}{CALL}function{SEP}read{CALL_END}{SECTION_END}",
            f"{CALL}function{SEP}read",
        ),
    ),
    "deepseek_v31": Family(
        f"{SECTION}{CALL}read{SEP}",
        OBJECT,
        (CALL_END, SECTION_END),
        (
            f"{SECTION}{CALL}read{SEP}{CALL_END}{SECTION_END}",
            f"{CALL}read{SEP}",
            f"{SECTION}{CALL}read{CALL_END}{SECTION_END}",
            f"{CALL}read",
        ),
    ),
    "harmony": Family(
        HARMONY_CALL,
        OBJECT,
        ("<|call|>",),
        (f"{HARMONY_CALL}<|call|>", f"{HARMONY_CALL} ", "<|channel|>commentary to=functions.read<|call|>"),
        "harmony",
    ),
}
CALLED = [("read", {"path": "a"})]
JSON_FAMILIES = [name for name, family in FAMILIES.items() if family.arguments == OBJECT]
MARKS = ("<tool_call>", "</tool_call>", "</function>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "｜>", "<|", "```")
# By damaged arguments: the arguments of the parsed call.
DAMAGED: Mapping[str, Any] = {
    '{"path": "a\nb\t"}': {"path": "a\nb\t"},
    '{"path": "a",}': {"path": "a"},
    '{"path": "a", "list": [1, 2,],}': {"path": "a", "list": [1, 2]},
    '{"path": NaN}': {},
    '{"path": a}': {},
    '{"path": "a", "n": -Infinity}': {"path": "a"},
    '{"path": "a", "list": [1, {"b": c, "d": 1}], "n": 1}': {"path": "a", "list": [1, {}]},
    '{"path": True, "n": None}': {"path": True, "n": None},
    '{"path": "a" "n": 1}': {"path": "a"},
    '{"path": "C:\\dir\\u12"}': {"path": "C:\\dir\\u12"},
    '{"path": "\\ud83d"}': {"path": "\ufffd"},
    '{"path": }': {},
    '{"list": [1, {"b": 2]}': {"list": [1, {"b": 2}]},
    '{path: "a"}': {},
}
# By the arguments with which the output ends: the arguments of the parsed call.
UNFINISHED: Mapping[str, Any] = {
    "{": {},
    '{"path': {},
    '{"path": ': {},
    '{"path": "a': {"path": "a"},
    '{"path": "a\\': {"path": "a"},
    '{"path": "a", "n': {"path": "a"},
    '{"path": "a", "n": 12': {"path": "a", "n": 12},
    '{"path": "a", "n": 1e': {"path": "a"},
    '{"path": "a", "list": [tru': {"path": "a", "list": []},
    '{"list": [1, {"b": "c': {"list": [1, {"b": "c"}]},
}


def parse(name: str, output: str, reasoning: str = "", cut: bool = False) -> list[Event]:
    """Returns the events of an output. Asserts that the events are the same when it arrives in single characters."""
    formats = OutputFormats(name, "harmony" if name == "harmony" else reasoning)
    found = events(formats, [output], SETUP, cut)
    assert events(formats, in_characters(output), SETUP, cut) == found
    return found


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "harmony"])
class TestCallInReasoning:
    """The model does not close its reasoning, or closes it after a call."""

    def test_parser_returns_calls_in_reasoning_at_the_end_of_the_output(self, name: str) -> None:
        family = FAMILIES[name]
        begin, end = ("[THINK]", "[/THINK]") if family.reasoning == "mistral_think" else ("", "</think>")
        for calls in (1, 2, 3):
            for blanks in ("", "\n", "\n\n "):
                thought = f"{begin}Hm: [{{x}}] <a>\n"
                found = parse(name, thought + blanks.join([family.call] * calls) + blanks, family.reasoning)
                assert calls_of(found) == CALLED * calls and text_of(found) == ""
                assert text_of(found, Reasoning) == "Hm: [{x}] <a>"
        assert calls_of(parse(name, f"{begin or '<think>'}Hm.{family.call}", family.reasoning)) == CALLED
        closed = parse(name, f"{begin}Hm. {family.call} {end}So: {family.call}", family.reasoning)
        assert text_of(closed, Reasoning) == f"Hm. {family.call}" and text_of(closed) == "So:" and calls_of(closed) == CALLED

    def test_parser_returns_calls_in_reasoning_as_reasoning_text_when_other_text_follows(self, name: str) -> None:
        family = FAMILIES[name]
        begin = "[THINK]" if family.reasoning == "mistral_think" else ""
        for rest in (" or not", f" or not {family.begin[:9]}", f" <| {family.call} no"):
            found = parse(name, f"{begin}Hm. {family.call}{rest}", family.reasoning)
            assert not calls_of(found) and text_of(found, Reasoning) == f"Hm. {family.call}{rest}"
        later = parse(name, f"{begin}Hm. {family.call} no: {family.call}", family.reasoning)
        assert calls_of(later) == CALLED and text_of(later, Reasoning) == f"Hm. {family.call} no:"

    def test_parser_returns_an_incomplete_call_in_reasoning_as_reasoning_text(self, name: str) -> None:
        family = FAMILIES[name]
        begin = "[THINK]" if family.reasoning == "mistral_think" else ""
        for output, cut in ((family.begin + family.arguments[:-1], False), (family.call, True)):
            found = parse(name, f"{begin}Hm. {output}", family.reasoning, cut)
            assert not calls_of(found) and text_of(found, Reasoning) == f"Hm. {output}"

    def test_parser_streams_reasoning_except_for_a_possible_call(self, name: str) -> None:
        """Only the text of the possible call waits for the end of the output."""
        family = FAMILIES[name]
        begin = "[THINK]" if family.reasoning == "mistral_think" else ""
        parser = output_parser(OutputFormats(name, family.reasoning), SETUP)
        assert parser.feed(f"{begin}Hm.") == [Reasoning("Hm.")]
        assert parser.feed(f" {family.call}\n") == []
        assert parser.feed("or") == [Reasoning(f" {family.call}\nor")]


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_are_an_empty_object_when_the_call_has_no_arguments(name: str) -> None:
    for output in FAMILIES[name].empty:
        found = parse(name, output)
        assert calls_of(found) == [("read", {})], output
        assert text_of(found) == "", output


@pytest.mark.parametrize("name", FAMILIES)
def test_tool_call_is_parsed_when_closing_marks_are_missing(name: str) -> None:
    """Each combination of closing marks is left out, at the end of the output and before another call.

    If the last mark is present, text after the call is tested too.
    """
    family = FAMILIES[name]
    start = "<|start|>assistant" if name == "harmony" else ""
    for present in itertools.product((True, False), repeat=len(family.ends)):
        open_call = "".join([family.begin, family.arguments, *itertools.compress(family.ends, present)])
        assert calls_of(parse(name, open_call)) == CALLED, open_call
        twice = parse(name, f"{open_call}{start}{family.call}")
        assert calls_of(twice) == CALLED * 2 and text_of(twice) == "", open_call
        if present and present[-1] and name not in ("harmony", "llama3_json"):
            assert text_of(parse(name, f"{open_call} So.")) == " So.", open_call


@pytest.mark.parametrize("name", JSON_FAMILIES)
def test_arguments_are_a_json_object_when_the_json_in_the_output_is_damaged(name: str) -> None:
    family = FAMILIES[name]
    for damaged, expected in DAMAGED.items():
        output = "".join([family.begin, damaged, *family.ends])
        found = parse(name, output)
        assert calls_of(found) == [("read", expected)], output
        assert text_of(found) == "", output


@pytest.mark.parametrize("name", JSON_FAMILIES)
def test_json_of_the_arguments_is_completed_when_the_output_ends_early(name: str) -> None:
    family = FAMILIES[name]
    for beginning, expected in UNFINISHED.items():
        assert calls_of(parse(name, family.begin + beginning)) == [("read", expected)], beginning
    if family.ends:
        for quote in ('{"path": "a', '{"path": "a"', '{"path": "a"}'):
            output = "".join([family.begin, quote, *family.ends[1 if family.ends[0] == "}" else 0 :]])
            for rest in ("", " So.", ' So: "b".') if name != "harmony" else ("",):
                found = parse(name, output + rest if len(family.ends) > 1 else output)
                assert calls_of(found)[0][1]["path"].rstrip("}") == "a", output
                assert text_of(found) in ("", rest), output


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_end_where_the_output_is_cut_off(name: str) -> None:
    family = FAMILIES[name]
    whole = "".join(arguments_of(parse(name, family.call)).values())
    for size in range(len(family.call)):
        cut = arguments_of(parse(name, family.call[:size], cut=True))
        assert all(whole.startswith(arguments) for arguments in cut.values()), family.call[:size]


def test_pythonic_call_is_completed_when_the_output_ends_early() -> None:
    for beginning, expected in {
        '[read(path="a': {"path": "a"},
        "[read(path='a', n=1": {"path": "a", "n": 1},
        "[read(path='a', n=": {"path": "a"},
        "[read(list=[1, {'b': 'c": {"list": [1, {"b": "c"}]},
        "[read(path='a', list=[1, (2,": {"path": "a", "list": [1, [2]]},
        "[read(path=a)]": {},
        "[read(path='a', n=nil, list=[1])]": {"path": "a"},
    }.items():
        assert calls_of(parse("pythonic", beginning)) == [("read", expected)], beginning
    assert calls_of(parse("pythonic", "[read(n=[1, x], path=')'), read(path='a')] So.")) == [("read", {"n": [1]}), *CALLED]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("<parameter=path>\na\n</function>\n</tool_call>", {"path": "a"}),
        ("<parameter=path>\na\n<parameter=n>\n3\n</function>\n</tool_call>", {"path": "a", "n": 3}),
        ("<parameter=path>\na\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>", {"path": "a", "n": 3}),
        ("<parameter=path>\na\n</parameter>", {"path": "a"}),
        ("<parameter=n>\n3\n</function>\n</tool_call>", {"n": 3}),
        ("<parameter=list>\n[1, 2\n</parameter>\n</function>\n</tool_call>", {"list": [1, 2]}),
        ('<parameter=list>\n["a\n</parameter>\n</function>\n</tool_call>', {"list": ["a"]}),
        (
            "<parameter=path>\n</function>\n</tool_call>\n</parameter>\n</function>\n</tool_call>",
            {"path": "</function>\n</tool_call>"},
        ),
        ("<parameter=path>\n<parameter=\n<function=nope>\n</parameter>\n</function>", {"path": "<parameter=\n<function=nope>"}),
        ("<parameter=path\na\n</parameter>\n</function>\n</tool_call>", {"path": "a"}),
        ("<parameter=path>\na\n", {"path": "a"}),
    ],
)
def test_qwen3_coder_value_ends_at_the_next_mark(output: str, expected: dict[str, Any]) -> None:
    assert calls_of(parse("qwen3_coder", f"<tool_call>\n<function=read>\n{output}")) == [("read", expected)]


def test_string_of_valid_json_may_contain_marks() -> None:
    for name in JSON_FAMILIES:
        family = FAMILIES[name]
        for text in (family.call, f"a{''.join(family.ends)}", f"{family.begin}{{", *(f"{mark}" for mark in MARKS)):
            arguments = {"path": text, "n": 1}
            output = "".join([family.begin, json.dumps(arguments, ensure_ascii=False), *family.ends])
            assert calls_of(parse(name, output)) == [("read", arguments)], output


def test_unmarked_json_that_is_not_a_valid_call_is_text() -> None:
    for output in (
        '{"a": 1}',
        '{"name": "read"}',
        '{"name": "read", "parameters": 5}',
        '[{"a": 1}]',
        '[1, {"name": 2}] {',
        "{",
        "[",
    ):
        found = parse("llama3_json", output)
        assert text_of(found) == output and not calls_of(found)
    listed = '[{"name": "read", "arguments": {"path": "a"}}, {"name": "read", "arguments": {"path": "a"}}]'
    assert calls_of(parse("llama3_json", listed)) == CALLED * 2 and text_of(parse("llama3_json", listed)) == ""
