"""Tests of outputs drawn under a grammar of each format: the parser finds the calls for every division into pieces.

The grammar is our structural tag for every format, and xgrammar's tag for every format that has one (not Mistral and pythonic).
Under our tag, the calls also follow the schemas of their tools.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import jsonschema
import pytest
import xgrammar

from rootstock_llm.services.gateway.output.formats import harmony
from rootstock_llm.services.gateway.output.formats.families import CALL_FORMATS
from rootstock_llm.services.gateway.output.output_parser import Reasoning
from rootstock_llm.services.gateway.output.source import Marks
from rootstock_llm.services.gateway.output.tags.demand import CallDemand, ToolSpec
from rootstock_llm.services.gateway.output.tags.structural_tags import call_tag
from rootstock_llm.services.shared.output_formats import REASONING_FORMATS, OutputFormats
from rootstock_llm.services.worker.grammar.schema.structural_tag import structural_tag
from tests.night import NIGHTLY
from tests.services.gateway.output.drawing import Drawer, function, texts
from tests.services.gateway.output.oracles import ORACLES, squeezed, with_think
from tests.services.gateway.output.outputs import TOOLS, at_random, calls_of, events, in_characters, text_of

COUNT = 500 if NIGHTLY else 40
# By format: xgrammar's name of the format, and additional marks for the drawer.
XGRAMMAR_TAGS = {
    "hermes": ("qwen_3", ["<tool_call>", "</tool_call>", '{"name": "']),
    "qwen3_coder": ("qwen_3_coder", ["<tool_call>\n<function=", "\n</parameter>", "\n</function>\n</tool_call>"]),
    "llama3_json": ("llama", ['{"name": ', '{"name']),
    "deepseek_v3": ("deepseek_r1", ["<｜tool▁calls▁begin｜>", "```"]),
    "deepseek_v31": ("deepseek_v3_1", ["<｜tool▁calls▁begin｜>"]),
    "harmony": ("harmony", ["{", "commentary"]),
}
OUR_TAGS = {
    **{name: marks for name, (_, marks) in XGRAMMAR_TAGS.items()},
    "pythonic": ["[get_weather(", "[search("],
    "mistral": ["[TOOL_CALLS]["],
}
# (a call is required, several calls are allowed)
WAYS = [(forced, parallel) for forced in (True, False) for parallel in (True, False)]


def formats_of(name: str) -> OutputFormats:
    return OutputFormats(name, "harmony" if name == "harmony" else "think")


def texts_of_xgrammar_tag(name: str) -> Iterator[str]:
    model, marks = XGRAMMAR_TAGS[name]
    tools = [function(tool, schema) for tool, schema in TOOLS.items()]
    asked = [(choice, reasoning) for choice in ("required", "auto") for reasoning in ("auto", "disabled")]
    tags = [xgrammar.get_model_structural_tag(model, tools=tools, tool_choice=one, reasoning=two) for one, two in asked]
    return texts(Drawer(marks), [tag.model_dump_json() for tag in tags], COUNT, seed=1)


def texts_of_our_tag(name: str, forced: bool, parallel: bool) -> Iterator[str]:
    demand = CallDemand(tuple(ToolSpec(tool, schema, not forced) for tool, schema in TOOLS.items()), forced, parallel)
    tag = call_tag(formats_of(name), demand)
    assert tag is not None
    return texts(Drawer(OUR_TAGS[name]), [structural_tag(tag)], COUNT // 4, seed=2)


def unmarked(name: str, text: str) -> str:
    """Returns the text without the format's marks. The grammar allows these marks anywhere in the text."""
    marks = harmony.MARKS if name == "harmony" else (*CALL_FORMATS[name].marks, *REASONING_FORMATS["think"])
    return Marks(*marks).without(text)


def check(name: str, text: str) -> list[str]:
    """Asserts that parser and reference parser agree for every division into pieces. Returns the names of the calls."""
    oracle = ORACLES[name] if name == "harmony" else with_think(ORACLES[name])
    expected, found = oracle(text), events(formats_of(name), [text])
    assert calls_of(found) == expected.calls, text
    assert unmarked(name, squeezed(text_of(found))) == unmarked(name, expected.text), text
    assert squeezed(text_of(found, Reasoning)) == expected.reasoning, text
    assert events(formats_of(name), in_characters(text)) == found, text
    assert events(formats_of(name), at_random(text, random.Random(len(text)))) == found, text
    return [name for name, _ in expected.calls]


@pytest.mark.parametrize("name", XGRAMMAR_TAGS)
def test_parser_reads_random_outputs_of_the_structural_tag_of_xgrammar(name: str) -> None:
    called = [call for text in texts_of_xgrammar_tag(name) for call in check(name, text)]
    assert len(called) > COUNT // 4 and set(called) == TOOLS.keys()


@pytest.mark.parametrize("name", OUR_TAGS)
def test_parser_reads_random_outputs_of_the_structural_tag_of_rootstock(name: str) -> None:
    """Calls follow the schemas of their tools. A forced output has calls and no text."""
    called: list[str] = []
    for forced, parallel in WAYS:
        for text in texts_of_our_tag(name, forced, parallel):
            called += check(name, text)
            found = events(formats_of(name), [text])
            calls = calls_of(found)
            for tool, arguments in calls:
                jsonschema.validate(arguments, TOOLS[tool])
            assert parallel or len(calls) <= 1, text
            assert not forced or (calls and not text_of(found).strip()), text
    assert len(called) > COUNT // 2 and set(called) == TOOLS.keys()


@pytest.mark.parametrize("name", OUR_TAGS)
def test_text_without_marks_equals_the_text_after_repeated_removal(name: str) -> None:
    """The texts are made of halves of marks, so that a removal often joins two halves to another mark."""
    reasoning = [()] if name == "harmony" else [pair for pair in REASONING_FORMATS.values() if len(pair) == 2]
    for pair in reasoning:
        marks = [*(harmony.MARKS if name == "harmony" else CALL_FORMATS[name].marks), *pair]
        pattern, rng = re.compile("|".join(map(re.escape, marks))), random.Random(3)
        for _ in range(10 * COUNT):
            text = ""
            for _ in range(rng.randrange(12)):
                mark, at = rng.choice(marks), rng.randrange(len(text) + 1)
                cut = rng.choice((0, 0, rng.randrange(len(mark))))
                text = text[:at] + mark[cut:] + rng.choice(("", "", "a", "<")) + text[at:]
            expected = text
            while (rest := pattern.sub("", expected)) != expected:
                expected = rest
            assert Marks(*marks).without(text) == expected, text
