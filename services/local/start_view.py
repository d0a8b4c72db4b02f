"""What is shown of a system that starts: on a terminal one line that changes, elsewhere a line now and then."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from services.shared.observe import progress

EVERY_S = 5.0  # between two lines where nothing can be overwritten
TAIL_BYTES = 8192  # of a log: its last lines
WIDTH = 78


class StartView:
    """Owns the line of a terminal until clear()."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._is_tty = stream.isatty()
        self._said, self._begun = clock(), clock()
        self._shown = ""

    def waiting(self, name: str, log: Path) -> None:
        """While `name` is not ready, as often as one likes. log: where it says what it does."""
        if not self._is_tty and self._clock() - self._said < EVERY_S:
            return
        self._said = self._clock()
        words = last_words(log) or "starting"
        text = f"  {name:<13} {self._said - self._begun:4.0f} s  {words}"
        if self._is_tty:
            text = text[: shutil.get_terminal_size((WIDTH + 1, 24)).columns - 1]
        if not self._is_tty:
            self._stream.write(text.rstrip() + "\n")
        elif text != self._shown:
            self._stream.write(f"\r{text}\x1b[K")
        self._shown = text
        self._stream.flush()

    def clear(self) -> None:
        if self._is_tty and self._shown:
            self._stream.write("\r\x1b[K")
        self._shown = ""

    def line(self, text: str) -> None:
        """One that stays."""
        self.clear()
        self._stream.write(text + "\n")
        self._stream.flush()


def last_words(log: Path) -> str:
    """What the last whole line of a log of JSON objects says; "" where there is none. A progress is a bar."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return ""
    said = next((text for text in map(_words, reversed(lines)) if text), "")
    found = progress.read(said)
    return found.bar() if found is not None else said


def _words(line: bytes) -> str:
    """A line that is no JSON is a library's own, and not shown."""
    try:
        record = json.loads(line)
    except ValueError:
        return ""
    return str(record.get("msg", "")) if isinstance(record, dict) else ""
