"""Tests the texts that regular expressions, EBNF, structural tags and plain JSON objects allow and refuse."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused
from tests.grammar import model

# (pattern, texts that pass, texts that do not)
PATTERNS: list[tuple[str, list[str], list[str]]] = [
    ("a|bc", ["a", "bc"], ["ab", "", "xa"]),
    ("^abc$", ["abc"], ["abcd"]),
    ("a{2,3}b*c+d?", ["aac", "aaabbccd"], ["ac", "aaaac", "aad"]),
    ("a{0}b{2}", ["bb"], ["abb", "b"]),
    ("(?:x|(?<name>y))z*?", ["x", "yzz"], ["z"]),
    (r"\d+\.\d\w\s", ["1.2_ ", "10.0a\t"], ["1.2a", "x.2a "]),
    (r"[a-c\d_\-\]]+", ["a1_-]"], ["d"]),
    (r"[^a-c]{2}", ["xy", "世🌱", '"\n'], ["ax", "x"]),
    (r"\x41\u0042\u{1f331}\ud83c\udf31\t\/", ["AB🌱🌱\t/"], ["ab"]),
    (r".", ["x", "世"], ["\n", ""]),
    (r"a\{b{c", ["a{b{c"], ["ab"]),
    ("", [""], ["x"]),
]


@pytest.mark.parametrize("pattern, passing, stopped", PATTERNS, ids=[case[0] or "empty" for case in PATTERNS])
def test_regex_allows_matching_texts_and_refuses_other_texts(pattern: str, passing: list[str], stopped: list[str]) -> None:
    grammar = model.compiled(GrammarSpec(GrammarKind.REGEX, pattern))
    for text in passing:
        assert model.accepts(grammar, text), f"{text!r} should pass"
    for text in stopped:
        assert not model.accepts(grammar, text), f"{text!r} should not pass"


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "(",
            ")",
            "[",
            "[^]",
            "[b-a]",
            "*a",
            "a**",
            "a{3,1}",
            "a{99999999999}",
            "a\\",
            r"\b",
            r"\1",
        ),
        *(
            "(?=a)",
            "(?i)a",
            "a^",
            "$a",
            r"\u12",
            r"\ud800",
            r"\u{110000}",
            "(" * 100 + ")" * 100,
        ),
    ],
)
def test_invalid_or_unsupported_regex_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarRefused, match=r"^pattern, position \d+: |^pattern: "):
        model.compiled(GrammarSpec(GrammarKind.REGEX, pattern))


def test_octal_escape_is_refused() -> None:
    """Some engines read the escape as NUL and a digit, others as BEL."""
    with pytest.raises(GrammarRefused, match="octal"):
        model.compiled(GrammarSpec(GrammarKind.REGEX, r"\07"))


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("pattern", [r"[a-f]{3,}|\d+(\.\d+)?", r"(ab|c[^d])*\s\S", r".{2,6}[é世]", r"\D\W\d\w"])
def test_output_matches_the_regex(pattern: str) -> None:
    grammar = model.compiled(GrammarSpec(GrammarKind.REGEX, pattern))
    chooser = random.Random(pattern)
    texts = [text for _ in range(20) if (text := model.write(grammar, chooser, free_tokens=10)) is not None]
    assert len(texts) > 10
    for text in texts:
        assert re.fullmatch(pattern, text), text


def test_ebnf_grammar_allows_matching_texts_and_refuses_other_texts() -> None:
    source = 'root ::= term (" + " term)*\nterm ::= [0-9]+ | "(" root ")"'
    grammar = model.compiled(GrammarSpec(GrammarKind.EBNF, source))
    assert model.accepts(grammar, "1 + (23 + 4)")
    assert not model.accepts(grammar, "1 + ")
    assert not model.accepts(grammar, "(1")


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("source", ["", "root ::= missing"])
def test_invalid_ebnf_is_refused_with_the_message_of_the_compiler(source: str) -> None:
    with pytest.raises(GrammarRefused) as refusal:
        model.compiled(GrammarSpec(GrammarKind.EBNF, source))
    assert str(refusal.value)
    for noise in ("\n", ".cc", "Traceback", "0x"):
        assert noise not in str(refusal.value)


def test_json_object_grammar_allows_json_objects_and_refuses_other_texts() -> None:
    grammar = model.compiled(GrammarSpec(GrammarKind.JSON_OBJECT, ""))
    for text in ["{}", '{"a": [1, {"b": null}], "c": "é\\n"}', '{\n  "a": 1\n}']:
        assert model.accepts(grammar, text), text
    for text in ["[]", "1", "", '{"a"}', "{} "]:
        assert not model.accepts(grammar, text), text


def tag(content: Any, **more: Any) -> str:
    calls = {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}
    layout = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [calls], **more}
    return json.dumps({"type": "structural_tag", "format": layout})


CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}, "required": ["city"]}
LEGACY = json.dumps(
    {"type": "structural_tag", "structures": [{"begin": "<call>", "schema": CITY, "end": "</call>"}], "triggers": ["<call>"]}
)


@pytest.mark.parametrize("source", [tag({"type": "json_schema", "json_schema": CITY}), LEGACY], ids=["format", "structures"])
def test_structural_tag_allows_free_text_and_enforces_the_schema(source: str) -> None:
    grammar = model.compiled(GrammarSpec(GrammarKind.STRUCTURAL_TAG, source))
    assert model.accepts(grammar, 'Let me see. <call>{"city": "Oslo"}</call> There.')
    assert model.accepts(grammar, "no call at all")
    assert not model.accepts(grammar, '<call>{"city": "Vladivostok"}</call>')
    assert not model.accepts(grammar, '<call>{"town": "Oslo"}</call>')


def test_structural_tag_requires_a_regex_match_when_at_least_one_is_set() -> None:
    source = tag({"type": "regex", "pattern": "[ab]{2}"}, at_least_one=True, stop_after_first=True)
    grammar = model.compiled(GrammarSpec(GrammarKind.STRUCTURAL_TAG, source))
    assert model.accepts(grammar, "<call>ab</call>")
    assert not model.accepts(grammar, "text")
    assert not model.accepts(grammar, "<call>ac</call>")


@pytest.mark.parametrize(
    "source, pointer",
    [
        ("[]", "#"),
        ("{}", "#"),
        (json.dumps({"type": "structural_tag", "format": {"type": "token", "token": 5}}), "#/format"),
        (tag({"type": "json_schema", "json_schema": {"not": {}}}), "#/format/tags/0/content"),
        (tag({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}), "#/format/tags/0/content/style"),
        (tag({"type": "regex", "pattern": "("}), "#/format/tags/0/content"),
        (tag({"type": "any_text"}, unknown=1), "#/format/unknown"),
    ],
)
def test_structural_tag_is_refused_with_a_json_pointer(source: str, pointer: str) -> None:
    with pytest.raises(GrammarRefused) as refusal:
        model.compiled(GrammarSpec(GrammarKind.STRUCTURAL_TAG, source))
    assert str(refusal.value).startswith(f"structural_tag: {pointer}: ")
