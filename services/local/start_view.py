"""Shows the progress of a start: on a terminal in one line that is rewritten, otherwise in a new line every EVERY_S seconds.

The text comes from the logs of the processes. Shown records are steps (progress.step()), progress bars (progress.Progress), and
warnings about the model or its device. Other records stay in the log. For example, services log failed connections to services
that start later, which are not faults.
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

EVERY_S = 5.0  # seconds between two progress lines if the output is not a terminal
WIDTH = 78  # characters of a line if the terminal's width is unknown
LOADERS = (
    "rootstock_llm.kernels",
    "rootstock_llm.services.worker.engine",
    "rootstock_llm.services.worker.exec",
)  # loggers of the model and its kernels


@dataclass(frozen=True, slots=True)
class UserRecord:
    """A log record that is shown to the user."""

    text: str
    is_warning: bool = False  # whether the record is a warning; otherwise it is a step of the start
    is_bar: bool = False  # whether the text is a progress bar


class LogReader:
    """Reads a growing log of JSON lines. Each call of news() reads the lines after those of the last call."""

    def __init__(self, log: Path) -> None:
        self._log, self._position = log, 0
        self.last_step = ""

    def news(self) -> list[UserRecord]:
        """Returns the records since the last call that the console shows. An incomplete line is read by a later call."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._position)
                text, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._position += len(text) + len(end)
        found = [item for item in map(_user_record, text.splitlines()) if item is not None]
        self.last_step = next((item.text for item in reversed(found) if not item.is_warning), self.last_step)
        return found


class StartView:
    """The progress display of a start. On a terminal, it rewrites one line until clear()."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._is_tty = stream.isatty()
        self._written_at, self._begun = clock(), clock()
        self._shown = ""
        self._logs: dict[Path, LogReader] = {}
        self._printed: set[str] = set()  # texts of permanent lines; several workers can log the same text

    def waiting(self, name: str, log: Path) -> None:
        """Shows the progress of a process that is not ready. The caller may poll at any rate."""
        reader = self._logs.setdefault(log, LogReader(log))
        for item in reader.news():
            if item.is_warning or not (self._is_tty or item.is_bar):
                self._print_once(f"  {name:<13} ", item.text)
        if not self._is_tty and self._clock() - self._written_at < EVERY_S:
            return
        self._written_at = self._clock()
        text = f"  {name:<13} {self._written_at - self._begun:4.0f} s  {reader.last_step or 'starting'}"
        if not self._is_tty:
            self._stream.write(f"{text}\n")
        elif (cut := text[: shutil.get_terminal_size((WIDTH + 1, 24)).columns - 1]) != self._shown:
            self._stream.write(f"\r{cut}\x1b[K")
            self._shown = cut
        self._stream.flush()

    def _print_once(self, head: str, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
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
        self._written_at = self._clock()


def _user_record(line: bytes) -> UserRecord | None:
    """Returns the record that the console shows for a log line: a progress bar, a loader's warning, or a step.

    None for all other lines. Lines that are not JSON come from libraries.
    """
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    text = str(record.get("msg", ""))
    if (found := progress.read(text)) is not None:
        return UserRecord(found.bar(), is_bar=True)
    if record.get("level") == "warning" and str(record.get("logger", "")).startswith(LOADERS):
        return UserRecord(text, is_warning=True)
    return UserRecord(text) if record.get(progress.STEP) else None
