"""Reads Qwen3-Coder's calls: a function and its parameters between XML tags. Each value is on its own lines, without quotes.

A string is passed on piece by piece. A value of another type is passed on when it is complete. A value ends at the next mark of
the format. The end mark of a call is a part of the value if `</parameter>` follows before another call begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rootstock_llm.services.gateway.output.json_text import repaired_text
from rootstock_llm.services.gateway.output.parameter_types import as_json, parameter_types, quoted
from rootstock_llm.services.gateway.output.reading import CallFormat, Outcome, OutputReading
from rootstock_llm.services.gateway.output.source import SPACE, Malformed, Marks, Sink, Steps, discard
from rootstock_llm.services.shared.limits import MAX_HELD_CALL_CHARS

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_MARKS = (BEGIN, END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)
_ALL = Marks(*_MARKS)
_CALL_ENDS = (FUNCTION_END, END)
_INSIDE_ENDS = Marks(f"\n{PARAMETER_END}", PARAMETER_END, FUNCTION)
_VALUE_END_TEXTS = (*(f"\n{mark}" for mark in _MARKS), *_MARKS)
_VALUE_ENDS = Marks(*_VALUE_END_TEXTS)
_NAME = re.compile(r"[^<>\n]*")
_STRING = frozenset({"string"})
_OUTSIDE = re.compile(r'[^"\[\]{}<\n]*')
_INSIDE = re.compile(r'[^"\\\n]*')


def _read(reading: OutputReading, mark: str) -> Steps[None]:
    """Reads a call. `<tool_call>` may be missing, because some models leave it out."""
    outcome = yield from reading.attempt(mark, _call(reading, mark))
    if outcome is Outcome.COMPLETE:
        yield from reading.closed_by(END)
    elif outcome is Outcome.BROKEN:
        yield from reading.skip_rest((END,), (BEGIN, FUNCTION))


def _call(reading: OutputReading, mark: str) -> Steps[None]:
    if mark == BEGIN:
        yield from reading.source.space()
        yield from reading.source.expect(FUNCTION)
    name = yield from _name(reading, reading.writer.has_tool)
    reading.begin(name)
    yield from _Parameters(reading, name).read()


def _name(reading: OutputReading, is_known: Callable[[str], bool]) -> Steps[str]:
    """Reads the name of a function or a parameter, and the `>` after it. Raises Malformed if no name comes.

    Args:
        is_known: Returns whether `>` may be missing after a name.
    """
    pieces: list[str] = []
    yield from reading.source.run(_NAME, pieces.append)
    bracket = yield from reading.source.choose((">",))
    name = "".join(pieces).strip()
    if not name or not (bracket or is_known(name)):
        raise Malformed
    return name


class _Parameters:
    """Reads the parameters of one call, and writes them as a JSON object."""

    def __init__(self, reading: OutputReading, function: str) -> None:
        self._reading = reading
        self._schema = reading.schema(function)
        self._closing = "{}"  # text that completes the JSON written so far

    def read(self) -> Steps[None]:
        """Reads the parameters and ends the call. Raises Malformed if the output ends before a mark that ends the call."""
        source = self._reading.source
        try:
            while (part := (yield from source.until(_ALL, discard))) in (PARAMETER, PARAMETER_END):
                if part == PARAMETER:
                    yield from self._parameter()
        finally:
            self._reading.end(self._closing)
        if not part:
            raise Malformed
        if part != FUNCTION_END:
            source.give_back(part)

    def _parameter(self) -> Steps[None]:
        source = self._reading.source
        source.record()
        key = yield from _name(self._reading, bool)
        source.forget()
        yield from source.choose(("\n",))
        types = parameter_types(self._schema, key)
        begun = f"{'{' if self._closing == '{}' else ', '}{quoted(key)}: "
        yield from (self._text(begun) if types == _STRING else self._value(begun, types))

    def _text(self, begun: str) -> Steps[None]:
        writer = self._reading.writer
        writer.arguments(f'{begun}"')
        self._closing = '"}'
        yield from self._until_end(lambda piece: writer.arguments(quoted(piece)[1:-1]))
        writer.arguments('"')
        self._closing = "}"

    def _value(self, begun: str, types: frozenset[str]) -> Steps[None]:
        pieces: list[str] = []
        self._reading.source.record()
        if types and "string" not in types:
            yield from self._brackets(pieces.append)
        yield from self._until_end(pieces.append)
        self._reading.source.forget()
        self._reading.writer.arguments(begun + _json("".join(pieces), types))
        self._closing = "}"

    def _brackets(self, sink: Sink) -> Steps[None]:
        """Reads an object or an array, if one comes. Its strings may contain marks, except at the beginning of a line."""
        source, depth, in_string = self._reading.source, 0, False
        yield from source.space()
        if (yield from source.peek()) not in ("{", "["):
            return
        while depth >= 0:
            yield from source.run(_INSIDE if in_string else _OUTSIDE, sink)
            if (yield from self._at_mark()):
                return
            char = yield from source.take()
            sink(char)
            if char == '"':
                in_string = not in_string
            elif in_string:
                if char == "\\":
                    sink((yield from source.choose(("\\", '"'))))
            elif char in "[{":
                depth += 1
            elif char in "]}":
                depth -= 1
                if not depth:
                    return

    def _at_mark(self) -> Steps[bool]:
        """Returns whether a mark or the end of the output comes next. Reads nothing."""
        source = self._reading.source
        mark = yield from source.choose(_VALUE_END_TEXTS)
        source.give_back(mark)
        return bool(mark) or not (yield from source.peek())

    def _until_end(self, sink: Sink) -> Steps[None]:
        """Reads a value up to its end, and passes it on without its last line end.

        Raises Malformed if a token limit cut off the value.
        """
        source, held = self._reading.source, _HeldLine(sink)

        def add(text: str) -> None:
            if source.was_cut:  # the last piece may end with an incomplete mark
                text = text[: _VALUE_ENDS.begun(text, 0, len(text))]
            if text:
                held.add(text)

        while end := (yield from source.until(_VALUE_ENDS, add)):
            held.flush()
            mark = end.lstrip("\n")
            if mark == PARAMETER_END:
                return
            inside = (yield from self._inside(end)) if mark in _CALL_ENDS else (yield from self._no_begin(end))
            if not inside:
                return
            held.add(inside)
        if source.was_cut:
            raise Malformed

    def _no_begin(self, mark: str) -> Steps[str]:
        """Reads on after a mark that may begin a parameter or a call.

        Returns:
            The read text with the mark, if the mark begins neither a parameter nor a call: the text is a part of the value.
            "" if the mark begins one of them; the mark is then unread again.
        """
        source, read = self._reading.source, [mark]
        if mark.endswith(BEGIN):
            yield from source.run(SPACE, read.append)
            read.append((yield from source.choose((FUNCTION,))))
        name: list[str] = []
        if read[-1]:
            yield from source.run(_NAME, name.append)
            name.append((yield from source.choose((">",))))
        begun, text = "".join(name), "".join([*read, *name])
        is_parameter = mark.endswith(PARAMETER) and len(begun) > 1
        if begun.endswith(">") and (is_parameter or self._reading.writer.has_tool(begun[:-1].strip())):
            source.give_back(text)
            return ""
        return text

    def _inside(self, end: str) -> Steps[str]:
        """Decides whether the end mark of a call is a part of the value.

        It is a part of the value if `</parameter>` follows before another call begins. If the search fails, no mark in the
        searched text starts another search, so the text is searched once.

        Returns:
            The text from the mark up to `</parameter>`, which stays unread. "" if the mark ends the call; nothing is then read.
        """
        source, read, budget = self._reading.source, [end], MAX_HELD_CALL_CHARS
        begun = source.position
        if begun <= self._reading.no_end_before:
            source.give_back(end)
            return ""

        def collect(text: str) -> None:
            nonlocal budget
            read.append(text)
            budget -= len(text)
            if budget < 0:
                raise Malformed

        try:
            while found := (yield from source.until(_INSIDE_ENDS, collect)):
                text = "" if found != FUNCTION else (yield from self._no_begin(FUNCTION))
                if not text:
                    break
                collect(text)
        except Malformed:
            found = ""
        if found and found != FUNCTION:
            source.give_back(found)
            return "".join(read)
        self._reading.no_end_before = min(source.position, begun + MAX_HELD_CALL_CHARS)
        source.give_back("".join(read))
        return ""


class _HeldLine:
    """Passes text on, except for the last line end, which it holds until more text comes."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""

    def add(self, text: str) -> None:
        self.flush()
        self._held = "\n" if text[-1] == "\n" else ""
        if len(text) > len(self._held):
            self._sink(text[: len(text) - len(self._held)])

    def flush(self) -> None:
        if self._held:
            self._sink(self._held)
            self._held = ""


def _json(text: str, types: frozenset[str]) -> str:
    """Returns a value as JSON. An invalid object or array is repaired. If it cannot be repaired, it becomes a string."""
    found = as_json(text, types)
    if found[0] == '"' and types and "string" not in types and text.lstrip()[:1] in ("{", "["):
        return repaired_text(text) or found
    return found


QWEN3_CODER = CallFormat((BEGIN, FUNCTION), _MARKS, _read)
