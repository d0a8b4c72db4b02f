"""Tests of the detection of output formats in templates, and of reasoning that a prompt has opened."""

from __future__ import annotations

from typing import get_args

from rootstock_llm.services.shared.output_formats import NONE, REASONING_FORMATS, TOOL_FORMATS, OutputFormats, detect
from rootstock_llm.services.tokenizer.settings import ReasoningParser, ToolParser

# Case → the relevant part of a template, its tool format and its reasoning format.
TEMPLATES = {
    "none": ("{{ messages[0].content }}", "", ""),
    "unknown format with a known mark": ("<tool_call>{{ name }}<arg_key>", "", ""),
    "reasoning that the prompt opens": (
        "{{ content.split('</think>')[-1] }}{% if add_generation_prompt %}<think>\n{% endif %}",
        "",
        "think_open",
    ),
    "reasoning that the prompt opens or closes": (
        "{% if add_generation_prompt %}{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}",
        "",
        "think",
    ),
    "an object in words": (
        """{{ 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}"""
        """{{ '{"name": "' + call.name + '", ' }}{{ '"parameters": ' }}""",
        "llama3_json",
        "",
    ),
    "an object in words, escaped": ('{{ "Write\\n{\\"name\\": \\"<function-name>\\"}" }}', "", ""),
    "a list of objects in words": (
        'calls in an array: \n\n[{"name": "tool_name", "arguments": {"a": "b"}}, ...]',
        "llama3_json",
        "",
    ),
    "objects that are rendered": ("""{{ '{"name": "' + call.name + '", "parameters": ' + call.arguments }}""", "", ""),
    "an object behind a word": ('functools[{"name": [function name], "arguments": [arguments]}]', "", ""),
    "an object behind a mark": ('<function_call> {"name": "no_function", "arguments": {}}', "", ""),
    "Python in words": ("in the format [func_name1(params_name1=params_value1, ...), func_name2(params)]", "pythonic", ""),
    "Python behind a mark": ("<tool>[func_name1(params_name1=params_value1)]</tool>", "", ""),
    "thoughts in marks of their own": ("[THINK]{{ thought }}[/THINK]", "", "mistral_think"),
}


def test_output_formats_are_detected_from_the_chat_template() -> None:
    for case, (template, tools, reasoning) in TEMPLATES.items():
        assert detect(template) == OutputFormats(tools, reasoning), case


def test_reasoning_format_depends_on_the_mark_at_the_end_of_the_prompt() -> None:
    for formats in (OutputFormats("hermes", "think"), OutputFormats("hermes", "think_open")):
        assert formats.after("…<|im_start|>assistant\n<think>\n").reasoning == "think_open"
        assert formats.after("…<|im_start|>assistant\n<think>\n\n</think>\n\n").reasoning == "think"
    for formats in (OutputFormats("harmony", "harmony"), OutputFormats("mistral", "mistral_think"), OutputFormats()):
        assert formats.after("…<think>") == formats


def test_special_tokens_to_keep_are_listed_once() -> None:
    assert OutputFormats("hermes", "think").kept == ("<tool_call>", "</tool_call>", "<think>", "</think>")
    assert len(OutputFormats("harmony", "harmony").kept) == len(OutputFormats("harmony").kept) == 7
    assert OutputFormats().kept == ()


def test_parser_settings_accept_every_output_format() -> None:
    assert set(get_args(ToolParser)) == {"auto", "none", *TOOL_FORMATS} - {NONE}
    assert set(get_args(ReasoningParser)) == {"auto", "none", *REASONING_FORMATS} - {NONE}
