"""Shows a system that starts: on a terminal one line that changes, elsewhere a line for each step and now and then another one.

A process tells its user something by its log: a step (progress.step()), a bar (progress.Progress), or a warning about the model
or its device. All other records are for operators and stay in the log: a connection that is late is no fault of a start.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rootstock_llm.services.shared.observe import progress

EVERY_S = 5.0  # between two lines without news, if the output is no terminal
WIDTH = 78
LOADERS = (
    "rootstock_llm.kernels",
    "rootstock_llm.services.worker.engine",
    "rootstock_llm.services.worker.exec",
)  # loggers of the model and its kernels


@dataclass(frozen=True, slots=True)
class Told:
    """Something that a process tells its user."""

    text: str
    is_warning: bool = False
    is_bar: bool = False


class LogReader:
    """Reads a log of JSON objects that grows, from its beginning or from where the last call of news() ended."""

    def __init__(self, log: Path) -> None:
        self._log, self._position = log, 0
        self.last_step = ""

    def news(self) -> list[Told]:
        """Returns the news for users since the last call. A line without its end is read by a later call."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._position)
                text, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._position += len(text) + len(end)
        found = [told for told in map(_told, text.splitlines()) if told is not None]
        self.last_step = next((told.text for told in reversed(found) if not told.is_warning), self.last_step)
        return found


class StartView:
    """Owns the line of a terminal until clear()."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._is_tty = stream.isatty()
        self._said, self._begun = clock(), clock()
        self._shown = ""
        self._logs: dict[Path, LogReader] = {}
        self._told: set[str] = set()  # texts that stay on the screen: workers tell the same

    def waiting(self, name: str, log: Path) -> None:
        """Shows the news of a process that is not ready. May be called at any rate."""
        reader = self._logs.setdefault(log, LogReader(log))
        for told in reader.news():
            if told.is_warning or not (self._is_tty or told.is_bar):
                self._stays(f"  {name:<13} ", told.text)
        if not self._is_tty and self._clock() - self._said < EVERY_S:
            return
        self._said = self._clock()
        text = f"  {name:<13} {self._said - self._begun:4.0f} s  {reader.last_step or 'starting'}"
        if not self._is_tty:
            self._stream.write(f"{text}\n")
        elif (cut := text[: shutil.get_terminal_size((WIDTH + 1, 24)).columns - 1]) != self._shown:
            self._stream.write(f"\r{cut}\x1b[K")
            self._shown = cut
        self._stream.flush()

    def _stays(self, head: str, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.line(head + text)

    def clear(self) -> None:
        if self._is_tty and self._shown:
            self._stream.write("\r\x1b[K")
        self._shown = ""

    def line(self, text: str) -> None:
        """Shows a line that stays."""
        self.clear()
        self._stream.write(text + "\n")
        self._stream.flush()
        self._said = self._clock()


def _told(line: bytes) -> Told | None:
    """Returns the news in a line of a log. Lines that are not JSON are output of libraries, and are not shown."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    text = str(record.get("msg", ""))
    if (found := progress.read(text)) is not None:
        return Told(found.bar(), is_bar=True)
    if record.get("level") == "warning" and str(record.get("logger", "")).startswith(LOADERS):
        return Told(text, is_warning=True)
    return Told(text) if record.get(progress.STEP) else None
