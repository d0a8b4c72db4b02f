"""Tests of outputs that no template writes: calls that are malformed, unknown, too many, cut off, too deep or too long."""

from __future__ import annotations

import json
import random

import pytest

from rootstock_llm.services.gateway.output.formats.harmony import MAX_HEADER_CHARS
from rootstock_llm.services.gateway.output.output_parser import (
    CallArguments,
    CallDropped,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)
from rootstock_llm.services.gateway.output.parameter_types import ANY, parameter_types
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.output_formats import OutputFormats
from tests.services.gateway.output.outputs import at_random, calls_of, events, in_characters, setup_of

HERMES, CODER, LLAMA = OutputFormats("hermes"), OutputFormats("qwen3_coder"), OutputFormats("llama3_json")
PYTHONIC, MISTRAL, HARMONY = OutputFormats("pythonic"), OutputFormats("mistral"), OutputFormats("harmony", "harmony")
FENCED, BARE = OutputFormats("deepseek_v3"), OutputFormats("deepseek_v31")
THINK, OPENED, MISTRAL_THINK = (
    OutputFormats("hermes", "think"),
    OutputFormats("hermes", "think_open"),
    OutputFormats("", "mistral_think"),
)
PING = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
SECTION, CALL, CALL_END, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def call(name: str, arguments: str = "{}", index: int = 0) -> list[Event]:
    return [CallStart(index, name), CallArguments(index, arguments), CallEnd(index)]


# By case: format, output and expected events.
ODD: dict[str, tuple[OutputFormats, str, list[Event]]] = {
    "no format": (OutputFormats(), "a <tool_call> b\n", [Text("a <tool_call> b\n")]),
    "hermes: incomplete mark": (HERMES, "a <tool_c", [Text("a <tool_c")]),
    "hermes: mark without a call": (HERMES, f"<tool_call> oops {PING}", [Text(" oops"), *call("ping")]),
    "hermes: a list": (HERMES, "<tool_call>[1]</tool_call>", [Text("[1]")]),
    "hermes: an empty object": (HERMES, "<tool_call>{}</tool_call>", [Text("{}")]),
    "pythonic: a colon in a name": (PYTHONIC, "[fs:read(a=1)]", [CallDropped("fs:read")]),
    "pythonic: JSON's escapes": (PYTHONIC, '[ping(a="https:\\/\\/x")]', call("ping", '{"a": "https://x"}')),
    "mistral: a mark twice": (
        MISTRAL,
        '[TOOL_CALLS][TOOL_CALLS] ping[ARGS]{"a": 1}',
        call("ping", '{"a": 1}'),
    ),
    "hermes: no name": (HERMES, '<tool_call>{"arguments": {}}</tool_call>', [Text('{"arguments": {}}')]),
    "hermes: cut off before its name": (HERMES, 'a <tool_call>\n{"name": "pi', [Text('a \n{"name": "pi')]),
    "hermes: cut off in its arguments": (
        HERMES,
        '<tool_call>{"name": "search", "arguments": {"query": "x',
        call("search", '{"query": "x"}'),
    ),
    "hermes: brackets that do not match": (
        HERMES,
        f'<tool_call>{{"name": "ping", "arguments": {{"a": ]}}}}</tool_call> b {PING}',
        [*call("ping"), Text(" b"), *call("ping", index=1)],
    ),
    "hermes: broken call without an end before the next call": (
        HERMES,
        f'<tool_call>{{"name": "ping", "arguments": {{]{PING}',
        [*call("ping"), *call("ping", index=1)],
    ),
    "hermes: unknown": (
        HERMES,
        'a\n<tool_call>{"name": "nope", "arguments": {"x": "</tool_call>"}}</tool_call>\n' + PING + " b",
        [Text("a"), CallDropped("nope"), *call("ping"), Text(" b")],
    ),
    "hermes: arguments first": (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "id": [7], "name": "ping"}',
        call("ping", '{"a": 1}'),
    ),
    "hermes: arguments as a JSON string": (
        HERMES,
        '<tool_call>{"name": "ping", "arguments": " {\\"a\\": \\"\\\\u00e9\\\\n \\u00e9\\ud83d\\ude42\\ud83d.\\"}"}',
        call("ping", '{"a": "\\u00e9\\n é🙂\ufffd."}'),
    ),
    "hermes: arguments as a JSON string, before the name": (HERMES, '<tool_call>{"arguments": "", "name": "ping"}', call("ping")),
    "hermes: a JSON string without an object": (
        HERMES,
        '<tool_call>{"name": "ping", "arguments": "x"}',
        call("ping"),
    ),
    "hermes: invalid escapes": (
        HERMES,
        r'<tool_call>{"arguments": "{\q"}<tool_call>{"arguments": "{\u00g0"}',
        [Text(r'{"arguments": "{\q"}{"arguments": "{\u00g0"}')],
    ),
    "hermes: separate surrogates": (
        HERMES,
        r'<tool_call>{"arguments": "{\"a\": \"\ud83d\ud83d\ude42\ude42\ud83d\u0041\"}", "name": "ping"}',
        call("ping", '{"a": "\ufffd🙂\ufffd\ufffdA"}'),
    ),
    "hermes: members without values": (
        HERMES,
        '<tool_call>{"id": , "name": "ping"}<tool_call>{"id": 7, "name": "ping"}',
        [Text('{"id": , "name": "ping"}'), *call("ping")],
    ),
    "hermes: null or no arguments": (
        HERMES,
        '<tool_call>{"name": "ping", "arguments": null}</tool_call><tool_call>{"name": "ping"}</tool_call>',
        [*call("ping"), *call("ping", index=1)],
    ),
    "hermes: a number for arguments": (
        HERMES,
        '<tool_call>{"name": "ping", "arguments": 1}',
        call("ping"),
    ),
    "hermes: blanks": (HERMES, f" a \n\n{PING}\n \n{PING}\n\n", [Text(" a"), *call("ping"), *call("ping", index=1)]),
    "hermes: blanks without a call": (HERMES, " a \n\n", [Text(" a \n\n")]),
    "hermes: no end": (HERMES, PING.removesuffix("</tool_call>") + " b", [*call("ping"), Text(" b")]),
    "coder: no call": (CODER, "<tool_call>\n{}</tool_call>", [Text("\n{}")]),
    "coder: no name": (CODER, "<function=>\n</function>", [Text(">\n")]),
    "coder: without a frame": (CODER, "a <function=ping></function> b", [Text("a"), *call("ping"), Text(" b")]),
    "coder: no end of the function": (CODER, "<tool_call><function=ping></tool_call> b", [*call("ping"), Text(" b")]),
    "coder: types": (
        CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n5\n</parameter>\n<parameter=days> 5 </parameter>"
        "<parameter=unit>\nF\n</parameter>\n<parameter=other>\nNone\n</parameter><parameter=last>x{</parameter></function></tool_call>",
        call("get_weather", '{"city": "5", "days": 5, "unit": "F", "other": null, "last": "x{"}'),
    ),
    "coder: a value of another type": (
        CODER,
        "<function=get_weather><parameter=days>\nsoon\n</parameter></function>",
        call("get_weather", '{"days": "soon"}'),
    ),
    "coder: marks within values": (
        CODER,
        '<function=search><parameter=query>\n</function></tool_call>\n</parameter><parameter=tags>\n["</parameter>"]\n</parameter></function>',
        call("search", '{"query": "</function></tool_call>", "tags": ["</parameter>"]}'),
    ),
    "coder: cut off in a text": (
        CODER,
        "<function=search><parameter=query>\nab\n</param",
        call("search", '{"query": "ab\\n</param"}'),
    ),
    "coder: cut off in a value": (
        CODER,
        "<function=search><parameter=query>a</parameter><parameter=tags>[",
        call("search", '{"query": "a", "tags": []}'),
    ),
    "coder: cut off between parameters": (CODER, "<function=ping> ", call("ping")),
    "coder: a parameter without a name": (
        CODER,
        "<function=ping><parameter=\n>1</parameter></function></tool_call> b",
        [*call("ping"), Text(" b")],
    ),
    "coder: unknown": (CODER, "<function=nope><parameter=a>1</parameter></function>\nb", [CallDropped("nope"), Text("\nb")]),
    "llama: objects that are no calls": (
        LLAMA,
        '{"a": 1} {"name": 5} {"name": "x"} {"name": "x", "age": 3}',
        [Text('{"a": 1} {"name": 5} {"name": "x"} {"name": "x", "age": 3}')],
    ),
    "llama: in the middle": (
        LLAMA,
        'a {"type": "function", "name": "ping", "parameters": {}} b',
        [Text("a"), *call("ping"), Text(" b")],
    ),
    "llama: a call within a broken call": (
        LLAMA,
        '{"name":{"name": "ping", "parameters": {}}',
        [Text('{"name":'), *call("ping")],
    ),
    "llama: unknown": (
        LLAMA,
        '{"name": "nope", "parameters": {}}; {"name": "ping", "parameters": {}}',
        [CallDropped("nope"), *call("ping")],
    ),
    "llama: code after the tag": (LLAMA, "<|python_tag|>print({1})", [Text("print({1})")]),
    "llama: broken": (LLAMA, '{"name": "ping", "parameters": {]}} b', [*call("ping"), Text(" b")]),
    "pythonic: brackets that are no calls": (
        PYTHONIC,
        "a [b](c) [nope(a=1)] [1, 2] [ping x",
        [Text("a [b](c) [nope(a=1)] [1, 2] [ping x")],
    ),
    "pythonic: in the middle": (
        PYTHONIC,
        "a [ping(), nope(x=1), ping()] b",
        [Text("a"), *call("ping"), CallDropped("nope"), *call("ping", index=1), Text(" b")],
    ),
    "pythonic: unknown, first": (PYTHONIC, "[nope(a=(1, [2])), ping()]", [CallDropped("nope"), *call("ping")]),
    "pythonic: unknown, and no call": (PYTHONIC, "[nope(2) = 3]", [Text("[nope(2) = 3]")]),
    "pythonic: literals": (
        PYTHONIC,
        "[ping(a=.5, b=-1_0)] [ping(a=+1., b=(), c={'k': \"it's\", }, d='\\x41\\u00e9\\'\\q', e=[True, None,],)]",
        [
            *call("ping", '{"a": 0.5}'),
            *call("ping", '{"a": 1.0, "b": [], "c": {"k": "it\'s"}, "d": "Aé\'\\\\q", "e": [true, null]}', 1),
        ],
    ),
    "pythonic: no literals": (
        PYTHONIC,
        "".join(f"[ping({each})]" for each in ("=1", "a={1: 2}", "a=(1 2)", "a=nil", r"a='\xg0'", r"a='\U00110000'", "a=1 b=2")),
        [
            event
            for index, arguments in enumerate(
                ("{}", '{"a": {}}', '{"a": [1]}', "{}", r'{"a": "\\xg0"}', '{"a": "\ufffd"}', '{"a": 1}'),
            )
            for event in call("ping", arguments, index)
        ],
    ),
    "pythonic: code": (PYTHONIC, "<|python_start|>[ping(a=__import__('os'))]<|python_end|>", call("ping")),
    "pythonic: no calls after the mark": (PYTHONIC, "<|python_start|>print(1)", [Text("print(1)")]),
    "mistral: no call": (MISTRAL, "[TOOL_CALLS] maybe", [Text(" maybe")]),
    "mistral: a list whose last item is no call": (MISTRAL, '[TOOL_CALLS][{"name": "ping"}, 5] b', [*call("ping"), Text("5] b")]),
    "mistral: a list with a broken call": (
        MISTRAL,
        '[TOOL_CALLS][{"name": "ping", "arguments": {]}}] b',
        [*call("ping"), Text(" b")],
    ),
    "mistral: one object": (MISTRAL, '[TOOL_CALLS]{"name": "ping", "arguments": {}}', call("ping")),
    "mistral: no mark before arguments": (MISTRAL, '[TOOL_CALLS]ping {"a": 1}', call("ping", '{"a": 1}')),
    "mistral: broken": (
        MISTRAL,
        "[TOOL_CALLS]ping[ARGS]{] x [TOOL_CALLS]nope[ARGS]{}[TOOL_CALLS]ping{}",
        [*call("ping"), CallDropped("nope"), *call("ping", index=1)],
    ),
    "deepseek: no call": (BARE, f"{SECTION} no", [Text(" no")]),
    "deepseek: no name": (BARE, f"{CALL}{SEP}{{}}", [Text("{}")]),
    "deepseek: unknown": (
        BARE,
        f"{SECTION}{CALL}nope{SEP}{{}}{CALL_END}{CALL}ping{SEP}{{}}{CALL_END}",
        [CallDropped("nope"), *call("ping")],
    ),
    "deepseek: broken": (
        FENCED,
        f"{CALL}function{SEP}ping\n```json\n{{]\n```{CALL_END}{CALL}function{SEP}ping\n```json\n{{}}",
        [*call("ping"), *call("ping", index=1)],
    ),
    "harmony: no channel": (HARMONY, "Hello <|end|>", [Text("Hello ")]),
    "harmony: cut off in its header": (HARMONY, "<|channel|>anal", []),
    "harmony: a header that never ends": (
        HARMONY,
        "<|channel|>" + "a" * 2000 + "<|end|>",
        [Text("a" * (2000 - MAX_HEADER_CHARS))],
    ),
    "harmony: no header": (HARMONY, "<|message|>a<|end|>", [Text("a")]),
    "harmony: a header without a message": (HARMONY, "<|start|>assistant<|end|><|start|>assistant<|message|>a", [Text("a")]),
    "harmony: text like a header": (HARMONY, " to=be or not", [Text(" to=be or not")]),
    "harmony: a preamble": (
        HARMONY,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>"
        "commentary<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>d<|return|>",
        [Reasoning("a\nb"), Text("c\nd")],
    ),
    "harmony: unknown": (
        HARMONY,
        "<|channel|>commentary to=browser.open code<|message|>{}<|call|>",
        [CallDropped("browser.open")],
    ),
    "harmony: code": (HARMONY, "<|channel|>commentary to=functions.ping<|message|>x = 1<|call|>", [Text("x = 1")]),
    "harmony: broken": (
        HARMONY,
        "<|channel|>commentary to=functions.ping<|message|>{]<|call|><|start|>assistant<|channel|>final<|message|>a",
        [*call("ping"), Text("a")],
    ),
    "think: blanks": (THINK, "\n<think>\n a\n b\n\n</think>\n\n c ", [Reasoning("a\n b"), Text("c ")]),
    "think: none": (THINK, "\n a <think>", [Text("\n a ")]),
    "think: cut off": (THINK, "<think>a</thi", [Reasoning("a</thi")]),
    "think: cut off at a blank": (THINK, "<think> a\n", [Reasoning("a\n")]),
    "think: a call within": (THINK, f"<think>{PING}</think>{PING}", [Reasoning(PING), *call("ping")]),
    "think: opened": (OPENED, f"a</think>{PING}", [Reasoning("a"), *call("ping")]),
    "think: opened twice": (OPENED, "<think>a</think>b", [Reasoning("a"), Text("b")]),
    "think: in brackets": (MISTRAL_THINK, "[THINK]a[/THINK]b", [Reasoning("a"), Text("b")]),
}


@pytest.mark.parametrize("family", dict.fromkeys(case.partition(":")[0] for case in ODD))
def test_unusual_output_is_parsed_into_the_expected_events(family: str) -> None:
    for case, (formats, output, expected) in ODD.items():
        if case.partition(":")[0] == family:
            for pieces in ([output], in_characters(output), at_random(output, random.Random(1)), ["", *output.partition(" ")]):
                assert events(formats, pieces) == expected, case


def test_calls_beyond_the_allowed_number_are_dropped() -> None:
    found = events(HERMES, [f"a {PING}\n{PING} b"], setup_of(max_calls=1))
    assert found == [Text("a"), *call("ping"), CallDropped("ping"), Text(" b")]


# By format: an output with stray marks, and the text without them.
STRAY: dict[OutputFormats, tuple[str, str]] = {
    HERMES: ("a</tool_call> <tool_call>b</tool_call>", "a b"),
    THINK: ("<think></think>a</think>b<tool_call>c", "abc"),
    LLAMA: ("<|python_tag|>print(1)", "print(1)"),
    PYTHONIC: ("<|python_start|>x<|python_end|>", "x"),
    MISTRAL: ("[TOOL_CALLS][ARGS][TOOL_CALLS][TOOL_CALLS]x" + "y" * 200 + "[ARGS]z[CALL_ID]", "x" + "y" * 200 + "z"),
    BARE: (f"{SECTION}x{SEP}y{CALL_END}", "xy"),
    CODER: ("<tool_call>x</tool_call><function=</parameter>", "x"),
    OutputFormats("hermes", "think_open"): ("</think><tool_<tool_call>call>", "<tool_ call>"),
    OutputFormats("pythonic", "mistral_think"): ("a [/THINK][THINK] b", "a  b"),
}


def test_text_contains_no_mark() -> None:
    for formats, (output, shown) in STRAY.items():
        for pieces in ([output], in_characters(output)):
            assert events(formats, pieces) == [Text(shown)], formats


def nested(depth: int, first: str = "[", last: str = "]") -> str:
    return first * depth + last * depth


def test_nesting_depth_of_arguments_is_limited() -> None:
    allowed, deeper = (nested(limits.MAX_CALL_DEPTH - 1 + more) for more in (0, 1))
    for formats, begin, end in (
        (HERMES, '<tool_call>{"name": "ping", "arguments": {"a": ', "}}</tool_call>"),
        (PYTHONIC, "[ping(a=", ")]"),
    ):
        assert calls_of(events(formats, [begin + allowed + end])) == [("ping", {"a": json.loads(allowed)})]
        assert calls_of(events(formats, [begin + deeper + end])) == [("ping", {"a": json.loads(allowed)})]
    assert events(PYTHONIC, ["[ping(a=" + "[" * 100_000])[0] == CallStart(0, "ping")


def test_held_back_text_is_limited() -> None:
    """Above MAX_HELD_CALL_CHARS characters, arguments before a name become text, and an unquoted value is omitted."""
    for size in (-64, 1):
        long = "x" * (limits.MAX_HELD_CALL_CHARS + size)
        arguments = json.dumps({"a": long})
        early = f'<tool_call>{{"arguments": {arguments}, "name": "ping"}}</tool_call>'
        late = f'<tool_call>{{"name": "ping", "arguments": {arguments}}}</tool_call>'
        value = f"<function=search><parameter=tags>{json.dumps([long])}</parameter></function>"
        for cut in (lambda text: [text], lambda text: [text[at : at + 999] for at in range(0, len(text), 999)]):
            bare = early.removeprefix("<tool_call>").removesuffix("</tool_call>")
            assert events(HERMES, cut(early)) == ([Text(bare)] if size > 0 else call("ping", arguments))
            assert events(HERMES, cut(late)) == call("ping", arguments)
            assert calls_of(events(CODER, cut(value))) == [("search", {"tags": [long]} if size < 0 else {})]


def test_parameter_types_follow_references_and_combinations() -> None:
    tool = {
        "$defs": {"a/b": {"type": "integer"}, "round": {"$ref": "#/$defs/round"}},
        "properties": {
            "one": {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": ["null", "string"]}]},
            "open": {"oneOf": [{"type": "integer"}, {}]},
            "all": {"allOf": [{"const": True}]},
            "round": {"$ref": "#/$defs/round"},
            "nowhere": {"$ref": "#/nowhere/at/all"},
        },
    }
    found = {name: parameter_types(tool, name) for name in (*tool["properties"], "unknown")}
    assert found.pop("one") == {"integer", "null", "string"} and found.pop("all") == {"boolean"}
    assert set(found.values()) == {ANY} == {parameter_types(None, "x"), parameter_types(True, "x")}
