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

EVERY_S = 5.0  # seconds between two progress lines if the output is not a terminal and nothing changes
WIDTH = 78
LOADERS = (
    "rootstock_llm.kernels",
    "rootstock_llm.services.worker.engine",
    "rootstock_llm.services.worker.exec",
)  # loggers of the model and its kernels


@dataclass(frozen=True, slots=True)
class Told:
    """A log record that is shown to the user."""

    text: str
    is_warning: bool = False  # whether the record is a warning; otherwise it is a step of the start
    is_bar: bool = False  # whether the text is a progress bar


class LogReader:
    """Reads a growing log of JSON lines. Each call of news() reads the lines after those of the last call."""

    def __init__(self, log: Path) -> None:
        self._log, self._position = log, 0
        self.last_step = ""

    def news(self) -> list[Told]:
        """Returns the records for users since the last call. An incomplete line is read by a later call."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._position)
                text, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._position += len(text) + len(end)
        found = [item for item in map(_told, text.splitlines()) if item is not None]
        self.last_step = next((item.text for item in reversed(found) if not item.is_warning), self.last_step)
        return found


class StartView:
    """The progress display of a start. On a terminal, it rewrites one line until clear()."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._is_tty = stream.isatty()
        self._said, self._begun = clock(), clock()
        self._shown = ""
        self._logs: dict[Path, LogReader] = {}
        self._told: set[str] = set()  # texts that were printed permanently; several workers log the same text

    def waiting(self, name: str, log: Path) -> None:
        """Shows the progress of a process that is not ready. May be called as often as wanted."""
        reader = self._logs.setdefault(log, LogReader(log))
        for item in reader.news():
            if item.is_warning or not (self._is_tty or item.is_bar):
                self._stays(f"  {name:<13} ", item.text)
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
        """Prints a permanent line."""
        self.clear()
        self._stream.write(text + "\n")
        self._stream.flush()
        self._said = self._clock()


def _told(line: bytes) -> Told | None:
    """Returns the record for users in a log line, or None. Lines that are not JSON come from libraries and are not shown."""
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
