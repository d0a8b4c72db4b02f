"""One call written as a JSON object: `{"name": …, "arguments": {…}}`, in either order, among members that say nothing to us."""

from __future__ import annotations

from services.gateway.parsers import json_text
from services.gateway.parsers.event_writer import BLANKS
from services.gateway.parsers.reading import Reading
from services.gateway.parsers.source import Malformed, Steps

_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """marked: whether a mark has said already that it is a call. Otherwise an object is one only if it has arguments, and no
    members that calls have not."""

    MEMBERS = ("name", *_ARGUMENTS, "type", "id")

    def __init__(self, reading: Reading, marked: bool) -> None:
        self._reading = reading
        self._marked = marked
        self._name: str | None = None
        self._before: list[str] = []  # arguments that came before the name
        self._began = False  # the arguments
        self._whole = False

    def read(self) -> Steps[None]:
        """The object from its opening brace. Raises Malformed."""
        source = self._reading.source
        yield from source.expect("{")
        yield from source.space()
        yield from self.members((yield from json_text.string(source)))

    def members(self, key: str) -> Steps[None]:
        """The same from after its first key."""
        source = self._reading.source
        while True:
            yield from source.space()
            yield from source.expect(":")
            yield from source.space()
            yield from self._member(key)
            yield from source.space()
            if not (yield from source.choose((",",))):
                break
            yield from source.space()
            key = yield from json_text.string(source)
        yield from source.expect("}")
        self._close()

    def _member(self, key: str) -> Steps[None]:
        if key == "name" and self._name is None:
            self._name = yield from json_text.string(self._reading.source)
            self._catch_up()
        elif key in _ARGUMENTS and not self._began:
            yield from self._arguments()
            self._whole = True
            self._catch_up()
        elif not self._marked and key not in self.MEMBERS:
            raise Malformed
        else:
            yield from json_text.skip(self._reading.source)

    def _arguments(self) -> Steps[None]:
        """An object, the text of one in a string, or nothing: null."""
        source = self._reading.source
        first = yield from source.peek()
        if first == "{":
            yield from json_text.verbatim(source, self._give)
        elif first == '"':
            yield from source.take()
            yield from json_text.decoded(source, self._give)
        elif (yield from json_text.scalar(source)) != "null":
            raise Malformed
        if not self._began:
            self._give("{}")

    def _give(self, text: str) -> None:
        if not self._began:
            text = text.lstrip(BLANKS)
            if not text:
                return
            if text[0] != "{":
                raise Malformed
            self._began = True
            if self._name is not None:
                self._reading.begin(self._name)
        if self._name is None:
            self._before.append(text)
        else:
            self._reading.writer.arguments(text)

    def _catch_up(self) -> None:
        """Gives what came before the name."""
        if self._before and self._name is not None:
            self._reading.begin(self._name)
            self._reading.writer.arguments("".join(self._before))
            self._before = []

    def _close(self) -> None:
        if self._name is None or not (self._whole or self._marked):
            raise Malformed
        if not self._whole:
            self._give("{}")
        self._reading.writer.end()
