"""Tests that a turn rendered by each family's template is parsed into its calls, text and reasoning."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from rootstock_llm.services.gateway.output.output_parser import Reasoning
from rootstock_llm.services.shared.output_formats import OutputFormats, detect
from rootstock_llm.services.tokenizer.render_child import ChatTemplate
from tests.services.gateway.output.outputs import at_random, calls_of, events, in_characters, text_of
from tests.services.gateway.output.templates import TEMPLATES

CALLS: list[dict[str, Any]] = [
    {"name": "get_weather", "arguments": {"city": 'São "Paulo"\n\\n\t</x> 🙂', "days": -3, "unit": "C"}},
    {"name": "ping", "arguments": {}},
    {"name": "search", "arguments": {"query": "5", "tags": [], "more": {"deep": True, "near": None}}},
    {"name": "search", "arguments": {"query": "it's", "tags": ["a'b", '"', "[x](y)", "</tool_call>"], "more": {"near": 1.5e-07}}},
]
TEXT = "Let me look: [this](that) costs {5} < 6."
REASONING = "They want\n\nthe weather [in] {two} places."
# By case: the family of the template, the formats of the parser, and variables of the template.
WAYS: Mapping[str, tuple[str, OutputFormats, dict[str, Any]]] = {
    "hermes": ("hermes", OutputFormats("hermes", "think"), {"reasoning": REASONING}),
    "hermes without thinking": ("hermes", OutputFormats("hermes", "think"), {}),
    "qwen3_coder": ("qwen3_coder", OutputFormats("qwen3_coder"), {}),
    "llama3_json": ("llama3_json", OutputFormats("llama3_json"), {}),
    "llama3_json with its tag": ("llama3_json", OutputFormats("llama3_json"), {"tools_first": True}),
    "pythonic": ("pythonic", OutputFormats("pythonic"), {}),
    "mistral": ("mistral", OutputFormats("mistral", "mistral_think"), {"reasoning": REASONING}),
    "mistral, a list": ("mistral", OutputFormats("mistral", "mistral_think"), {"old": True}),
    "deepseek_v3": ("deepseek_v3", OutputFormats("deepseek_v3"), {}),
    "deepseek_v31": ("deepseek_v31", OutputFormats("deepseek_v31", "think_open"), {"reasoning": REASONING}),
    "harmony": ("harmony", OutputFormats("harmony", "harmony"), {"reasoning": REASONING}),
}


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("way", WAYS)
def test_rendered_assistant_turn_is_parsed_into_calls_and_text_and_reasoning(way: str) -> None:
    name, formats, variables = WAYS[way]
    assert detect(TEMPLATES[name]) == formats
    template = ChatTemplate(TEMPLATES[name])
    for content in ("", TEXT):
        for calls in (CALLS, CALLS[:1], []):
            turn = template.render({"content": content, "calls": calls, **variables}, 1 << 20)
            found = events(formats, [turn])
            assert calls_of(found) == [(call["name"], call["arguments"]) for call in calls]
            assert text_of(found) == content and text_of(found, Reasoning) == variables.get("reasoning", "")
            assert events(formats, in_characters(turn)) == found
            assert events(formats, at_random(turn, random.Random(len(turn)))) == found
