"""Reference parsers: they read a complete text with regular expressions and the standard library's JSON parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Call = tuple[str, Any]


@dataclass
class Meaning:
    """The calls, text and reasoning that a reference parser finds."""

    calls: list[Call] = field(default_factory=list)  # name and parsed arguments of each call
    text: str = ""  # without white space, because parsers drop some of it
    reasoning: str = ""  # without white space


Oracle = Callable[[str], Meaning]


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def of_json(begin: str, end: str) -> Oracle:
    """Returns a reference parser of a format whose arguments are JSON.

    Args:
        begin: Pattern of the text before the arguments; its group is the call's name.
        end: Pattern of the text after the arguments.
    """

    def read(text: str) -> Meaning:
        found, outside, at = Meaning(), "", 0
        while match := re.compile(begin).search(text, at):
            arguments, stop = json.JSONDecoder(strict=False).raw_decode(text, match.end())
            closing = re.compile(end).match(text, stop)
            assert closing, (text, stop)
            found.calls.append((match[1], arguments))
            outside, at = outside + text[at : match.start()], closing.end()
        found.text = squeezed(outside + text[at:])
        return found

    return read


def of_qwen3_coder(text: str) -> Meaning:
    """Reads a parameter's value as JSON unless the parameter is a string."""
    found, outside, at = Meaning(), "", 0
    parameters = r"((?:\s*<parameter=\w+>(?:(?!</parameter>).)*</parameter>)*)"
    for match in re.finditer(rf"<tool_call>\n<function=(\w+)>\n{parameters}\s*</function>\n</tool_call>", text, re.S):
        pairs = re.findall(r"<parameter=(\w+)>\n?(.*?)\n?</parameter>", match[2], re.S)
        values = {key: value if key in ("city", "query", "unit") else json.loads(value) for key, value in pairs}
        found.calls.append((match[1], values))
        outside, at = outside + text[at : match.start()], match.end()
    found.text = squeezed(outside + text[at:])
    return found


def of_pythonic(text: str) -> Meaning:
    """Reads calls whose values are JSON, as our grammar writes them."""
    found, outside, at = Meaning(), "", 0
    while match := re.compile(r"\[(?=(?:get_weather|search|ping|free)\()").search(text, at):
        outside, at = outside + text[at : match.start()], match.end()
        while name := re.compile(r"(?:, )?(\w+)\(").match(text, at):
            arguments, at = _keywords(text, name.end())
            found.calls.append((name[1], arguments))
        assert text[at] == "]"
        at += 1
    found.text = squeezed(outside + text[at:])
    return found


def _keywords(text: str, at: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while key := re.compile(r"(?:, )?(\w+)=").match(text, at):
        found[key[1]], at = json.JSONDecoder().raw_decode(text, key.end())
    closing = re.compile(r"(?:, )?\)").match(text, at)
    assert closing
    return found, closing.end()


def of_harmony(text: str) -> Meaning:
    header = r"to=functions\.(\w+)[^{]*<\|message\|>|<\|channel\|>(analysis|final|commentary)<\|message\|>"
    found, at = Meaning(), 0
    while match := re.compile(header).search(text, at):
        if match[1]:
            arguments, at = json.JSONDecoder().raw_decode(text, match.end())
            found.calls.append((match[1], arguments))
            continue
        end = re.compile(r"<\|(?:end|return)\|>|\Z").search(text, match.end())
        assert end
        content, at = squeezed(text[match.end() : end.start()]), end.end()
        if match[2] == "analysis":
            found.reasoning += content
        else:
            found.text += content
    return found


def with_think(inner: Oracle) -> Oracle:
    def read(text: str) -> Meaning:
        if not text.startswith("<think>"):
            return inner(text)
        thought, _, rest = text.removeprefix("<think>").partition("</think>")
        found = inner(rest)
        found.reasoning = squeezed(thought)
        return found

    return read


DEEPSEEK_END = "<｜tool▁call▁end｜>\n?(?:<｜tool▁calls▁end｜>)?"
ORACLES: dict[str, Oracle] = {
    "hermes": of_json(r'<tool_call>\n\{"name": "(\w+)", "arguments": ', r"\}\n</tool_call>"),
    "llama3_json": of_json(r'\{"name": "(\w+)", "parameters": ', r"\}(?:\s*;)?"),
    "mistral": of_json(
        r'(?:\[TOOL_CALLS\](?:\[\{"name": "|(?=\w+\[ARGS\]))|, \{"name": ")(\w+)(?:", "arguments": |\[ARGS\])', r"\}?\]?"
    ),
    "deepseek_v3": of_json(
        r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>function<｜tool▁sep｜>(\w+)\n```json\n", f"\n```{DEEPSEEK_END}"
    ),
    "deepseek_v31": of_json(r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(\w+)<｜tool▁sep｜>", DEEPSEEK_END),
    "qwen3_coder": of_qwen3_coder,
    "pythonic": of_pythonic,
    "harmony": of_harmony,
}
