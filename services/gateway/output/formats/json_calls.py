"""Reads the call formats that write a call's arguments as a JSON object. JsonCall reads the object of one call.

| format | calls |
| --- | --- |
| Hermes, Qwen | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` for each call |
| Llama 3 | `{"name": …, "parameters": {…}}`, optionally after `<|python_tag|>`, separated by semicolons or in a list |
| Mistral | `[TOOL_CALLS]` before a list of `{"name": …, "arguments": {…}}`, or before each `NAME[ARGS]{…}` |
"""

from __future__ import annotations

import re

from rootstock_llm.services.gateway.output import json_text
from rootstock_llm.services.gateway.output.json_text import Breaks
from rootstock_llm.services.gateway.output.reading import CallFormat, Outcome, OutputReading
from rootstock_llm.services.gateway.output.source import Malformed, Marks, Source, Steps, discard

_ARGUMENTS = ("arguments", "parameters")
HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
_HERMES_BREAKS = Breaks((HERMES_END,), (HERMES_BEGIN,))  # marks that end a call even inside a string
PYTHON_TAG = "<|python_tag|>"
_LLAMA3_BREAKS = Breaks((), (PYTHON_TAG,))
MISTRAL_BEGIN, MISTRAL_ARGUMENTS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MISTRAL_MARKS = (MISTRAL_BEGIN, MISTRAL_ARGUMENTS, MISTRAL_ID)
_MISTRAL_ENDS = (MISTRAL_BEGIN,)  # texts that may follow a call without arguments
_AFTER_ID = Marks(MISTRAL_ARGUMENTS, MISTRAL_BEGIN, "{")
_MISTRAL_BREAKS = Breaks((), (MISTRAL_BEGIN,))
_NAME = re.compile(r"[^\s\[\]{}\"]*")


class JsonCall:
    """Reads one call that is an object `{"name": …, "arguments": {…}}`.

    The members may have any order. Other members are ignored. If the object is malformed after the call has begun, the call is
    ended.

    An object is marked if it follows a mark that announces a call. If the arguments of a marked object are not an object, it is
    a call without arguments. An unmarked object is a call only if it has arguments, and no member outside MEMBERS.
    """

    MEMBERS = ("name", *_ARGUMENTS, "type", "id")

    def __init__(self, reading: OutputReading, marked: bool, breaks: Breaks) -> None:
        self._reading = reading
        self._marked = marked
        self._breaks = breaks
        self._name: str | None = None
        self._early_arguments: list[str] = []  # pieces of arguments that the model wrote before the name
        self._has_arguments = False  # whether the start of the arguments was read
        self._is_complete = False  # whether the arguments are complete

    def read(self) -> Steps[None]:
        """Reads the object from its opening brace. Raises Malformed."""
        yield from self._reading.source.expect("{")
        yield from self.members(None)

    def members(self, key: str | None) -> Steps[None]:
        """Reads the object after its opening brace. `key` is the first key if it has been read, else None. Raises Malformed."""
        try:
            yield from self._members(key)
        except Malformed:
            self._break_off()
            raise
        if self._name is None or not (self._is_complete or self._marked):
            raise Malformed
        if not self._has_arguments:
            self._write_arguments("{}")
        self._reading.writer.end()

    def _members(self, key: str | None) -> Steps[None]:
        """Reads up to and including the closing brace. The brace may be missing if the name and the arguments are complete."""
        source = self._reading.source
        while True:
            yield from source.space()
            if key is None:
                if (yield from source.choose(("}",))):
                    return
                key = yield from json_text.string(source, self._breaks)
                yield from source.space()
            yield from source.expect(":")
            yield from source.space()
            yield from self._member(key)
            yield from source.space()
            key = None
            if not (yield from source.choose((",",))):
                break
        if not (yield from source.choose(("}",))) and not (self._is_complete and self._name):
            raise Malformed

    def _member(self, key: str) -> Steps[None]:
        if key == "name" and self._name is None:
            self._name = yield from json_text.string(self._reading.source, self._breaks)
            self._catch_up()
        elif key in _ARGUMENTS and not self._has_arguments:
            yield from self._arguments()
            self._is_complete = True
            self._catch_up()
        elif not self._marked and key not in self.MEMBERS:
            raise Malformed
        else:
            yield from json_text.skip(self._reading.source, self._breaks)

    def _arguments(self) -> Steps[None]:
        """Reads the arguments: an object, a string that contains an object, or null.

        In a marked object, any other value is skipped. In an unmarked object, any other value raises Malformed.
        """
        source = self._reading.source
        first = yield from source.peek()
        if first == "{":
            if not (yield from json_text.repaired(source, self._write_arguments, self._breaks)):
                raise Malformed
        elif first == '"':
            yield from source.take()
            yield from self._text_of_arguments()
        elif self._marked:
            if first not in (",", "}"):
                yield from json_text.skip(source, self._breaks)
        elif (yield from json_text.scalar(source)) != "null":
            raise Malformed
        if not self._has_arguments:
            self._write_arguments("{}")

    def _text_of_arguments(self) -> Steps[None]:
        """Reads arguments that are written as a string, after the opening quote of the string.

        Decodes the string and reads the object in it piece by piece.
        """
        source, inner = self._reading.source, Source()
        reading = self._object_in(inner)
        next(reading)

        def sink(text: str) -> None:
            inner.add(text)
            next(reading, None)

        try:
            yield from json_text.decoded(source, sink, self._breaks)
        finally:
            inner.close(source.was_cut)
            next(reading, None)

    def _object_in(self, source: Source) -> Steps[None]:
        """Reads the arguments in a decoded string.

        In a marked object, text that is no object is ignored. In an unmarked object, such text raises Malformed.
        """
        yield from source.space()
        first = yield from source.peek()
        if first == "{":
            yield from json_text.repaired(source, self._write_arguments)
        elif first and not self._marked:
            raise Malformed

    def _write_arguments(self, text: str) -> None:
        if not self._has_arguments:
            self._has_arguments = True
            if self._name is not None:
                self._reading.begin(self._name)
        if self._name is None:
            self._early_arguments.append(text)
        else:
            self._reading.writer.arguments(text)

    def _catch_up(self) -> None:
        """Starts the call when the name is known, and writes the arguments that came before the name."""
        if self._early_arguments and self._name is not None:
            self._reading.begin(self._name)
            self._reading.writer.arguments("".join(self._early_arguments))
            self._early_arguments = []

    def _break_off(self) -> None:
        """Ends a malformed call if its name is known. Completes its arguments to an object, unless a token limit cut them off."""
        if self._name is None:
            return
        if self._is_complete:
            self._reading.writer.end()
        elif self._has_arguments:
            self._reading.end()
        elif self._marked and self._reading.writer.has_tool(self._name):
            self._reading.begin(self._name)
            self._reading.end("{}")


def _read_hermes(reading: OutputReading, mark: str) -> Steps[None]:
    outcome = yield from reading.attempt(mark, _hermes_call(reading))
    if outcome is Outcome.COMPLETE:
        yield from reading.closed_by(HERMES_END)
    elif outcome is Outcome.BROKEN:
        yield from reading.skip_rest((HERMES_END,), (HERMES_BEGIN,))


def _hermes_call(reading: OutputReading) -> Steps[None]:
    yield from reading.source.space()
    yield from JsonCall(reading, marked=True, breaks=_HERMES_BREAKS).read()


HERMES = CallFormat((HERMES_BEGIN,), (HERMES_BEGIN, HERMES_END), _read_hermes)


_LLAMA3_KEYS = tuple(f'"{key}"' for key in JsonCall.MEMBERS)


def _read_llama3(reading: OutputReading, mark: str) -> Steps[None]:
    """Reads a call, or a list of calls. Without the mark `<|python_tag|>`, any `{` may begin a call.

    An object after any other mark stays text if it has a member that calls do not have.
    """
    outcome = yield from reading.attempt(mark, _llama3_call(reading) if mark == "{" else _call_behind_mark(reading, mark))
    if outcome is not Outcome.COMPLETE:
        return
    if mark != "[":
        yield from reading.closed_by(";")
        return
    while (yield from _has_another(reading)):
        if (yield from reading.attempt("{", _llama3_call(reading))) is not Outcome.COMPLETE:
            return


def _has_another(reading: OutputReading) -> Steps[bool]:
    """Reads the text between two objects of a list, and the opening brace of the second one.

    Returns False if no object follows.
    """
    source = reading.source
    yield from source.space()
    yield from source.choose((",",))
    yield from source.space()
    return (yield from source.choose(("{", "]"))) == "{"


def _call_behind_mark(reading: OutputReading, mark: str) -> Steps[None]:
    yield from reading.source.space()
    yield from reading.source.expect("{")
    yield from _llama3_call(reading, mark == PYTHON_TAG)


def _llama3_call(reading: OutputReading, marked: bool = False) -> Steps[None]:
    """Reads a call after its opening brace. A call after `<|python_tag|>` may omit its parameters."""
    yield from reading.source.space()
    key = yield from reading.source.choose(_LLAMA3_KEYS)
    if not key:
        raise Malformed
    yield from JsonCall(reading, marked, _LLAMA3_BREAKS).members(key.strip('"'))


LLAMA3_JSON = CallFormat((PYTHON_TAG, "{", "["), (PYTHON_TAG,), _read_llama3)


def _read_mistral(reading: OutputReading, mark: str) -> Steps[None]:
    yield from _MistralCalls(reading).read(mark)


class _MistralCalls:
    """Reads the calls after one `[TOOL_CALLS]`: a list of objects, one object, or a name with arguments."""

    def __init__(self, reading: OutputReading) -> None:
        self._reading = reading
        self._in_list = False

    def read(self, mark: str) -> Steps[None]:
        outcome = yield from self._reading.attempt(mark, self._first())
        while self._in_list and outcome is Outcome.COMPLETE and (yield from self._another()):
            outcome = yield from self._reading.attempt("", self._object())
        if outcome is Outcome.BROKEN:
            yield from self._reading.skip_rest(("]",) if self._in_list else (), (MISTRAL_BEGIN,))

    def _first(self) -> Steps[None]:
        source = self._reading.source
        yield from source.space()
        if (yield from source.choose(_MISTRAL_MARKS)):
            raise Malformed
        self._in_list = bool((yield from source.choose(("[",))))
        yield from source.space()
        is_object = self._in_list or (yield from source.peek()) == "{"
        yield from (self._object() if is_object else _named_call(self._reading))

    def _another(self) -> Steps[bool]:
        """Reads the text between two objects of a list. Returns False if no object follows."""
        source = self._reading.source
        yield from source.space()
        yield from source.choose((",",))
        yield from source.space()
        return not (yield from source.choose(("]",))) and (yield from source.peek()) == "{"

    def _object(self) -> Steps[None]:
        yield from JsonCall(self._reading, marked=True, breaks=_MISTRAL_BREAKS).read()


def _named_call(reading: OutputReading) -> Steps[None]:
    """Reads a call that is a name and arguments. Raises Malformed if the text is no call.

    Some models write `[CALL_ID]` and an id between the name and the arguments. The id is skipped.

    A body is an object, the end of the output, or the mark of the next call.

    - The name of a known tool is a call if `[ARGS]` or a body follows.
    - Any other name is a call if an object follows, or if `[ARGS]` and then a body follow.
    """
    source, pieces = reading.source, list[str]()
    yield from source.run(_NAME, pieces.append)
    yield from source.space()
    name, mark = "".join(pieces), (yield from source.choose((MISTRAL_ID, MISTRAL_ARGUMENTS)))
    if mark == MISTRAL_ID:
        mark = yield from source.until(_AFTER_ID, discard)
        if mark != MISTRAL_ARGUMENTS:
            source.give_back(mark)
    yield from source.space()
    has_body, is_known = (yield from reading.body_comes(_MISTRAL_ENDS)), reading.writer.has_tool(name)
    if not name or not (has_body or (mark and is_known)) or not (mark or is_known or (yield from source.peek()) == "{"):
        raise Malformed
    reading.begin(name)
    yield from reading.arguments(_MISTRAL_BREAKS, _MISTRAL_ENDS)


MISTRAL = CallFormat((MISTRAL_BEGIN,), _MISTRAL_MARKS, _read_mistral)
