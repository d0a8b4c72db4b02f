"""Reads a call that is a JSON object: `{"name": …, "arguments": {…}}`, in either order, with other members that are ignored."""

from __future__ import annotations

from services.gateway.parsers import json_text
from services.gateway.parsers.json_text import Breaks
from services.gateway.parsers.reading import OutputReading
from services.gateway.parsers.source import Malformed, Source, Steps

_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """The reader of one object. Ends the call in the writer, also if the object is malformed.

    A marked object follows a mark that announces a call. If its arguments are not an object, it is a call without arguments.
    An unmarked object is a call only if it has arguments and no member outside MEMBERS.
    """

    MEMBERS = ("name", *_ARGUMENTS, "type", "id")

    def __init__(self, reading: OutputReading, marked: bool, breaks: Breaks) -> None:
        self._reading = reading
        self._marked = marked
        self._breaks = breaks
        self._name: str | None = None
        self._before: list[str] = []  # arguments that came before the name
        self._began = False  # whether the start of the arguments was read
        self._whole = False  # whether the arguments are complete

    def read(self) -> Steps[None]:
        """Reads the object from its opening brace. Raises Malformed."""
        yield from self._reading.source.expect("{")
        yield from self.members(None)

    def members(self, key: str | None) -> Steps[None]:
        """Reads the object after its brace, or after its first key if `key` is not None. Raises Malformed."""
        try:
            yield from self._members(key)
        except Malformed:
            self._break_off()
            raise
        if self._name is None or not (self._whole or self._marked):
            raise Malformed
        if not self._began:
            self._give("{}")
        self._reading.writer.end()

    def _members(self, key: str | None) -> Steps[None]:
        """Reads up to and with the closing brace. The brace may be missing after the name and complete arguments."""
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
        if not (yield from source.choose(("}",))) and not (self._whole and self._name):
            raise Malformed

    def _member(self, key: str) -> Steps[None]:
        if key == "name" and self._name is None:
            self._name = yield from json_text.string(self._reading.source, self._breaks)
            self._catch_up()
        elif key in _ARGUMENTS and not self._began:
            yield from self._arguments()
            self._whole = True
            self._catch_up()
        elif not self._marked and key not in self.MEMBERS:
            raise Malformed
        else:
            yield from json_text.skip(self._reading.source, self._breaks)

    def _arguments(self) -> Steps[None]:
        """Reads the arguments: an object, a string with an object's text, or null. Accepts any value in a marked object."""
        source = self._reading.source
        first = yield from source.peek()
        if first == "{":
            if not (yield from json_text.mended(source, self._give, self._breaks)):
                raise Malformed
        elif first == '"':
            yield from source.take()
            yield from self._text_of_arguments()
        elif self._marked:
            if first not in (",", "}"):
                yield from json_text.skip(source, self._breaks)
        elif (yield from json_text.scalar(source)) != "null":
            raise Malformed
        if not self._began:
            self._give("{}")

    def _text_of_arguments(self) -> Steps[None]:
        """Reads arguments in a string after its opening quote, and passes the decoded text to an inner reader."""
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
        """Reads an object. Other text raises Malformed, unless a mark announced the call."""
        yield from source.space()
        first = yield from source.peek()
        if first == "{":
            yield from json_text.mended(source, self._give)
        elif first and not self._marked:
            raise Malformed

    def _give(self, text: str) -> None:
        if not self._began:
            self._began = True
            if self._name is not None:
                self._reading.begin(self._name)
        if self._name is None:
            self._before.append(text)
        else:
            self._reading.writer.arguments(text)

    def _catch_up(self) -> None:
        """Starts the call with the arguments that came before the name."""
        if self._before and self._name is not None:
            self._reading.begin(self._name)
            self._reading.writer.arguments("".join(self._before))
            self._before = []

    def _break_off(self) -> None:
        """Ends a malformed call if its name is known. Its arguments are an object, unless a token limit cut them off."""
        if self._name is None:
            return
        if self._whole:
            self._reading.writer.end()
        elif self._began:
            self._reading.end()
        elif self._marked and self._reading.writer.knows(self._name):
            self._reading.begin(self._name)
            self._reading.end("{}")
