"""Reads harmony (gpt-oss): messages whose headers name a channel and a recipient.

A message in the channel `analysis` is reasoning. A message to `functions.NAME` is a call. Any other message is text. The prompt
ends with `<|start|>assistant`, with which the header of the first message begins.

Source: https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rootstock_llm.services.gateway.output.json_text import Breaks
from rootstock_llm.services.gateway.output.reading import Outcome, OutputReading
from rootstock_llm.services.gateway.output.source import Malformed, Marks, Sink, Steps, discard

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
_MESSAGE_ENDS = (END, RETURN, CALL, START, CHANNEL)
_ENDS = Marks(*_MESSAGE_ENDS)
_BREAKS = Breaks((END, RETURN, CALL), (START, CHANNEL))
_ALL = Marks(*MARKS)
_HEADER_ENDS = Marks(MESSAGE, END, RETURN, CALL)
_HEADER_BEGINS = (START, CHANNEL, MESSAGE, " to=", "to=")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"(?<!\S)to=([^\s<]+)|(?<=>)to=([^\s<]+)")
MAX_HEADER_CHARS = 1024  # maximum characters of a header


@dataclass(frozen=True, slots=True)
class _Header:
    """The header of a message."""

    channel: str  # "" if the header has no channel
    recipient: str  # "" if the header has no recipient

    @property
    def calls(self) -> bool:
        """Whether the message calls a function."""
        return self.recipient.startswith("functions.")


def read(reading: OutputReading) -> Steps[None]:
    begun = yield from reading.source.choose(_HEADER_BEGINS)
    yield from _Messages(reading).read(begun)


class _Messages:
    """Reads the messages of one output. Writes a line end between two messages of the same kind."""

    def __init__(self, reading: OutputReading) -> None:
        self._reading = reading
        self._written_kinds: set[str] = set()

    def read(self, begun: str) -> Steps[None]:
        """Reads all messages.

        Args:
            begun: The beginning of the first header, which has been read; "" if the output begins without a header.
        """
        source, writer = self._reading.source, self._reading.writer
        while True:
            if not begun:
                mark = yield from source.until(_ALL, writer.text)
                if not mark:
                    return
                writer.stray(mark)
                begun = mark if mark in (START, CHANNEL, MESSAGE) else ""
                continue
            header = yield from self._header(begun)
            mark = (yield from self._message(header)) if header else ""
            writer.stray(mark)
            begun = mark if mark in (START, CHANNEL) else ""

    def _header(self, begun: str) -> Steps[_Header | None]:
        """Reads the rest of a header, up to the message's content.

        Args:
            begun: The beginning of the header, which has been read.

        Returns:
            The header, or None if the read text is no header. A header ends with `<|message|>` after at most MAX_HEADER_CHARS.
            The header of a call may also end before `{` or before the end of the message.
        """
        source = self._reading.source
        if begun == MESSAGE:
            return _Header("", "")
        source.record(MAX_HEADER_CHARS)
        try:
            mark = yield from source.until(_HEADER_ENDS, discard)
        except Malformed:
            mark = ""
        read = source.forget()
        found = _parsed(begun + read)
        if mark == MESSAGE:
            return found
        # The model left out `<|message|>`: the body of a call begins at `{`.
        body = read.find("{") if found.calls else -1
        if body >= 0 or (mark and found.calls):
            source.give_back(read[body:] if body >= 0 else mark)
            return found
        if begun not in MARKS:
            self._reading.writer.stray(begun + read)
        return None

    def _message(self, header: _Header) -> Steps[str]:
        """Reads a message's content. Returns the mark that ends it, which has been read; "" at the end of the output."""
        writer = self._reading.writer
        if header.recipient:
            return (yield from self._call(header.recipient.removeprefix("functions.")))
        if header.channel == "analysis":
            return (yield from self._content("thoughts", writer.reasoning))
        return (yield from self._content("texts", writer.text))

    def _content(self, kind: str, sink: Sink) -> Steps[str]:
        if kind in self._written_kinds:
            sink("\n")
        self._written_kinds.add(kind)
        while (mark := (yield from self._reading.source.until(_ALL, sink))) in (MESSAGE, CONSTRAIN):
            self._reading.writer.stray(mark)
        return mark

    def _call(self, name: str) -> Steps[str]:
        """Reads a call's arguments, and returns the next mark as _message() does. Content that is no JSON object becomes text."""
        outcome = yield from self._reading.attempt("", self._arguments(name))
        if outcome is Outcome.NOT_A_CALL:
            return (yield from self._content("texts", self._reading.writer.text))
        return (yield from self._reading.source.until(_ENDS, discard))

    def _arguments(self, name: str) -> Steps[None]:
        """Reads the arguments: an object, or nothing if the message ends. Raises Malformed for other text."""
        yield from self._reading.source.space()
        if not (yield from self._reading.body_comes(_MESSAGE_ENDS)):
            raise Malformed
        self._reading.begin(name)
        yield from self._reading.arguments(_BREAKS, _MESSAGE_ENDS)


def _parsed(header: str) -> _Header:
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    return _Header(channel[1] if channel else "", (recipient[1] or recipient[2]) if recipient else "")
