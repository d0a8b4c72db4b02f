"""What may be written where: colours, control characters, width."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from typing import TextIO

MIN_WIDTH, PLAIN_WIDTH = 40, 80
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line end
_CODES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33"}


def harmless(text: str) -> str:
    """Text from elsewhere whose control characters do nothing."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class Terminal:
    """A stream that is a terminal, or is not: then it gets neither colours nor cursor movements, and text as it is."""

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
        """Text from elsewhere too, as in write()."""
        shown = harmless(text) if self.is_tty else text
        return f"\x1b[{_CODES[colour]}m{shown}\x1b[0m" if self.has_colours else shown

    def write(self, text: str, colour: str = "") -> None:
        """Text from elsewhere: on a terminal its control characters do nothing."""
        shown = harmless(text) if self.is_tty else text
        self._stream.write(self.painted(shown, colour) if colour else shown)
        self._stream.flush()

    def overwrite(self, text: str) -> None:
        """The line that the cursor is in."""
        self._stream.write(f"\r{text[: self.width - 1]}\x1b[K")
        self._stream.flush()

    def redraw(self, lines: list[str]) -> None:
        """The whole screen, without flicker."""
        body = "".join(f"{line}\x1b[K\n" for line in lines[: self.height - 1])
        self._stream.write(f"\x1b[H{body}\x1b[J")
        self._stream.flush()

    def line(self, text: str = "") -> None:
        """Text of our own, painted or not."""
        self._stream.write(text + "\n")
        self._stream.flush()
