"""Outputs of models that break the format of tool calls, with the calls, the text and the reasoning that a client must get."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Calls = tuple[tuple[str, Any], ...]
READ = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "n": {"type": "integer"}, "list": {"type": "array"}},
    "additionalProperties": False,
}
A: Calls = (("read", {"path": "a"}),)
SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
HARMONY = "<|channel|>commentary to=functions.read<|message|>"
HERMES = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
CODER = "<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>"
# By format: the text of a call before its arguments, and the text after them. The arguments are JSON.
JSON_CALLS = {
    "hermes": ('<tool_call>\n{"name": "read", "arguments": ', "}\n</tool_call>"),
    "llama3_json": ('{"name": "read", "parameters": ', "}"),
    "mistral": ("[TOOL_CALLS]read[ARGS]", ""),
    "deepseek_v3": (f"{SECTION}{CALL}function{SEP}read\n```json\n", f"\n```{CALL_END}{SECTION_END}"),
    "deepseek_v31": (f"{SECTION}{CALL}read{SEP}", f"{CALL_END}{SECTION_END}"),
    "harmony": (HARMONY, "<|call|>"),
}
DAMAGED = {
    '{"path": "a\nb\t"}': {"path": "a\nb\t"},
    '{"path": "a",}': {"path": "a"},
    '{"path": NaN}': {},
    '{"path": a}': {},
    '{"path": "a", "n": -Infinity, "list": []}': {"path": "a"},
}
OPEN = {'{"path": "a': {"path": "a"}, '{"path": "a", "list": [1, 2': {"path": "a", "list": [1, 2]}, "{": {}}


@dataclass(frozen=True)
class Output:
    """An output of a model, and the parts that a client must get."""

    row: str  # row of the table in test_reported_inputs.py
    family: str  # tool format that the tokenizer is set to
    text: str  # the output
    calls: Calls  # name and arguments of each expected call
    beside: str = ""  # expected text outside of calls
    reasoning: str = ""  # expected reasoning
    opens: bool = False  # whether the prompt ends with the mark that opens reasoning


def _in_reasoning() -> Sequence[Output]:
    calls = {"hermes": HERMES, "qwen3_coder": CODER}
    out = []
    for family, call in calls.items():
        for opens, mark in ((True, ""), (False, "<think>")):
            out += [
                Output("B1", family, f"{mark}Hm.\n{call}", A, reasoning="Hm.", opens=opens),
                Output("B1", family, f"{mark}Hm. {call} </think>So.", (), "So.", f"Hm. {call}", opens),
                Output("B1", family, f"{mark}Hm. {call} no", (), "", f"Hm. {call} no", opens),
                Output(
                    "B1",
                    family,
                    f"{mark}I write <tool_call> later.\n{call}\n{call}",
                    A * 2,
                    "",
                    "I write <tool_call> later.",
                    opens,
                ),
            ]
    return out


def _without_closing_marks() -> Sequence[Output]:
    begin, end = "<tool_call>\n<function=read>\n", "\n</function>\n</tool_call>"
    both = (("read", {"path": "a", "n": 3}),)
    return [
        Output("B2", "qwen3_coder", f"{begin}<parameter=path>\na{end}", A),
        Output("B2", "qwen3_coder", f"{begin}<parameter=path>\na\n<parameter=n>\n3{end}", both),
        Output("B2", "qwen3_coder", f"{begin}<parameter=path>\na\n</parameter>", A),
        Output("B2", "qwen3_coder", f"{begin}<parameter=n>\n3{end}", (("read", {"n": 3}),)),
        Output("B2", "qwen3_coder", f"{begin}<parameter=path>\na\n{CODER}", A * 2),
        Output("B2", "hermes", HERMES.removesuffix("\n</tool_call>") + f"\n{HERMES}", A * 2),
        Output("B2", "mistral", '[TOOL_CALLS][{"name": "read", "arguments": {"path": "a"}}', A),
        Output("B2", "pythonic", '[read(path="a")', A),
        Output("B2", "deepseek_v31", f'{SECTION}{CALL}read{SEP}{{"path": "a"}}{CALL}read{SEP}{{"path": "a"}}', A * 2),
        Output("B2", "harmony", f'{HARMONY}{{"path": "a"}}', A),
    ]


def _empty() -> Sequence[Output]:
    nothing: Calls = (("read", {}),)
    bodies = {
        "hermes": ['<tool_call>{"name": "read", "arguments": }</tool_call>', '<tool_call>{"name": "read"}</tool_call>'],
        "qwen3_coder": ["<tool_call>\n<function=read>\n</function>\n</tool_call>"],
        "llama3_json": [
            '{"name": "read", "parameters": {}}',
            '{"name": "read", "parameters": null}',
            '<|python_tag|>{"name": "read"}',
        ],
        "pythonic": ["[read()]", "<|python_start|>[read()]<|python_end|>"],
        "mistral": ["[TOOL_CALLS]read[ARGS]", "[TOOL_CALLS]read"],
        "deepseek_v3": ["".join(JSON_CALLS["deepseek_v3"])],
        "deepseek_v31": ["".join(JSON_CALLS["deepseek_v31"]), f"{SECTION}{CALL}read{CALL_END}{SECTION_END}"],
        "harmony": ["".join(JSON_CALLS["harmony"])],
    }
    return [Output("B4", family, text, nothing) for family, texts in bodies.items() for text in texts]


def _damaged() -> Sequence[Output]:
    out = [
        Output("B5", family, f"{begin}{given}{end}", (("read", meant),))
        for family, (begin, end) in JSON_CALLS.items()
        for given, meant in DAMAGED.items()
    ]
    out += [
        Output("B5", family, f"{begin}{given}", (("read", meant),))
        for family, (begin, _) in JSON_CALLS.items()
        for given, meant in OPEN.items()
    ]
    return [
        *out,
        Output("B5", "pythonic", '[read(path="a', A),
        Output("B5", "pythonic", '[read(path="a", list=[1, {"b": ', (("read", {"path": "a", "list": [1, {}]}),)),
        Output("B5", "pythonic", "[read(path=a)]", (("read", {}),)),
        Output("B5", "qwen3_coder", CODER.replace("\na\n", "\na\tb\n"), (("read", {"path": "a\tb"}),)),
    ]


OUTPUTS: Sequence[Output] = (*_in_reasoning(), *_without_closing_marks(), *_empty(), *_damaged())
FAMILY_ROWS = sorted({(output.family, output.row) for output in OUTPUTS})
# By format without marks around calls: the instruction in a model's chat template, and a call in this format.
IN_WORDS = {
    "llama3_json": (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
        json.dumps({"name": "read", "parameters": {"path": "a"}}),
    ),
    "pythonic": (
        "Put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
        '[read(path="a")]',
    ),
}
