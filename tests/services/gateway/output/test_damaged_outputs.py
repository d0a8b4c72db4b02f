"""Tests of damaged outputs of every format: the arguments of each call are a JSON object, and no text contains a mark."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import pytest

from rootstock_llm.services.gateway.output.formats import harmony
from rootstock_llm.services.gateway.output.formats.families import CALL_FORMATS
from rootstock_llm.services.gateway.output.output_parser import CallArguments, CallEnd, CallStart, Event
from rootstock_llm.services.shared.output_formats import REASONING_FORMATS, OutputFormats
from rootstock_llm.services.tokenizer.render_child import ChatTemplate
from tests.night import NIGHTLY
from tests.services.gateway.output.outputs import at_random, events, in_characters, text_of
from tests.services.gateway.output.templates import TEMPLATES
from tests.services.gateway.output.test_rendered_calls import CALLS, REASONING, TEXT, WAYS

COUNT = 20_000 // len(WAYS) + 1 if NIGHTLY else 40  # number of damaged outputs per entry of WAYS
SEED = 20_260
MAX_FAULTS = 4  # maximum number of faults in one output
# Texts that are inserted anywhere, or that replace a value.
PIECES = (
    "\n",
    "\t",
    " ",
    ",",
    '"',
    "'",
    "\\",
    "\\u12",
    "\\ud83d",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ":",
    "=",
    ";",
    "<",
    "```",
    "a",
    "7",
)
VALUES = ("NaN", "-Infinity", "a", "None", "True", "01", "1e999", "+1", '"', "'", "[", "{", "", "'a'", "// a", "1,", "nil")
_VALUE = re.compile(r"""(?<=[:=] )?("[^"]*"|'[^']*'|-?\d+|true|null)""")


def damaged(text: str, marks: Sequence[str], chooser: random.Random) -> str:
    """Returns the text with one to MAX_FAULTS faults."""
    for _ in range(chooser.randint(1, MAX_FAULTS)):
        at = chooser.randint(0, len(text))
        found = list(re.finditer("|".join(map(re.escape, marks)), text))
        mark = chooser.choice(found).span() if found else (at, at)
        value = chooser.choice(list(_VALUE.finditer(text)) or [None])
        match chooser.randint(0, 9):
            case 0:  # removes a mark
                text = text[: mark[0]] + text[mark[1] :]
            case 1:  # repeats a mark
                text = text[: mark[1]] + text[mark[0] :]
            case 2:  # cuts a mark
                text = text[: chooser.randint(*mark)] + text[mark[1] :]
            case 3:  # inserts a mark
                text = text[:at] + chooser.choice(marks) + text[at:]
            case 4 | 5:
                text = text[:at] + chooser.choice(PIECES) + text[at:]
            case 6:
                text = text[:at] + text[at + chooser.randint(1, 9) :]
            case 7:
                text = text[:at]
            case _ if value is not None:
                text = text[: value.start()] + chooser.choice(VALUES) + text[value.end() :]
    return text


def outputs(way: str) -> Iterator[tuple[OutputFormats, Sequence[str], str]]:
    """Yields the formats, their marks and a damaged output.

    Except with harmony, half of the outputs are written and parsed with a random reasoning format instead of the family's own.
    """
    name, own, variables = WAYS[way]
    template, chooser = ChatTemplate(TEMPLATES[name]), random.Random(f"{SEED} {way}")
    for _ in range(COUNT):
        calls = chooser.sample(CALLS, chooser.randint(1, 3))
        turn = {**variables, "content": chooser.choice(("", TEXT)), "calls": calls}
        if name == "harmony" or chooser.random() < 0.5:
            formats, reasoning = own, ""
        else:
            formats, reasoning = (
                OutputFormats(name, chooser.choice([each for each in REASONING_FORMATS if each != "harmony"])),
                "",
            )
            turn.pop("reasoning", None)
            if formats.reasoning and chooser.random() < 0.8:
                begin, end = REASONING_FORMATS[formats.reasoning]
                reasoning = f"{begin * (formats.reasoning != 'think_open')}{REASONING}{end * (chooser.random() < 0.6)}"
        marks = harmony.MARKS if name == "harmony" else (*CALL_FORMATS[name].marks, *REASONING_FORMATS[formats.reasoning])
        output = reasoning + template.render(turn, 1 << 20)
        yield formats, marks, damaged(output, marks or ("<tool_call>",), chooser)


def arguments_of(found: Sequence[Event]) -> dict[int, str]:
    out: dict[int, str] = {}
    for event in found:
        if isinstance(event, CallStart):
            out[event.index] = ""
        elif isinstance(event, CallArguments):
            out[event.index] += event.fragment
    return out


def check(formats: OutputFormats, marks: Sequence[str], output: str, chooser: random.Random) -> int:
    """Asserts the invariants of a damaged output and returns the number of its calls."""
    found = events(formats, [output])
    for pieces in (at_random(output, chooser), in_characters(output)):
        assert events(formats, pieces) == found, "the events are the same for every cut"
    arguments = arguments_of(found)
    assert [event.index for event in found if isinstance(event, CallEnd)] == list(arguments), "each call ends"
    for text in arguments.values():
        parsed: Any = json.loads(text)
        assert isinstance(parsed, dict) and isinstance(orjson.loads(text), dict), text
    shown = text_of(found)
    assert not [mark for mark in marks if mark in shown], shown
    cut = events(formats, at_random(output, chooser), cut=True)
    assert all(arguments[index].startswith(text) for index, text in arguments_of(cut).items()), (
        "the arguments of a call cut off by max_tokens are a prefix"
    )
    return len(arguments)


@pytest.mark.parametrize("way", WAYS)
def test_damaged_output_is_parsed_into_calls_with_json_objects_and_text_without_marks(way: str) -> None:
    chooser, calls = random.Random(SEED), 0
    for number, (formats, marks, output) in enumerate(outputs(way)):
        try:
            calls += check(formats, marks, output, chooser)
        except BaseException as error:
            raise AssertionError(f"{way}, output {number} of {COUNT}: {output!r}") from error
    assert calls > COUNT // 2
