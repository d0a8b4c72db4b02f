"""Output to terminals and files: colours, control characters, width."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from typing import TextIO

MIN_WIDTH = 40  # columns, even if the terminal is narrower
PLAIN_WIDTH = 80  # columns of an output that is not a terminal
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line end
_CODES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33"}


def harmless(text: str) -> str:
    """Returns untrusted text with its control characters replaced."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class Terminal:
    """An output stream. If it is not a terminal, write(), painted() and line() leave text unchanged and add no colours."""

    def __init__(self, stream: TextIO, environment: Mapping[str, str]) -> None:
        self._stream = stream
        self.is_tty = stream.isatty()
        self.has_colours = self.is_tty and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"

    @classmethod
    def of(cls, stream: TextIO) -> Terminal:
        return cls(stream, os.environ)

    @property
    def width(self) -> int:
        return max(shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns, MIN_WIDTH) if self.is_tty else PLAIN_WIDTH

    @property
    def height(self) -> int:
        return shutil.get_terminal_size((PLAIN_WIDTH, 24)).lines

    def painted(self, text: str, colour: str) -> str:
        """Returns the text in a colour. If the stream is a terminal, control characters in the text are replaced."""
        shown = harmless(text) if self.is_tty else text
        return f"\x1b[{_CODES[colour]}m{shown}\x1b[0m" if self.has_colours else shown

    def write(self, text: str, colour: str = "") -> None:
        """Writes text of any source. If the stream is a terminal, control characters in the text are replaced."""
        shown = harmless(text) if self.is_tty else text
        self._stream.write(self.painted(shown, colour) if colour else shown)
        self._stream.flush()

    def overwrite(self, text: str) -> None:
        """Replaces the cursor's line. The stream must be a terminal."""
        self._stream.write(f"\r{text[: self.width - 1]}\x1b[K")
        self._stream.flush()

    def redraw(self, lines: list[str]) -> None:
        """Replaces the whole screen without flicker. The stream must be a terminal."""
        body = "".join(f"{line}\x1b[K\n" for line in lines[: self.height - 1])
        self._stream.write(f"\x1b[H{body}\x1b[J")
        self._stream.flush()

    def line(self, text: str = "") -> None:
        """Writes a line of trusted text, which may contain colour codes, unchanged."""
        self._stream.write(text + "\n")
        self._stream.flush()
