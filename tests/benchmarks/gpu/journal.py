"""Results of a benchmark. Each result is printed immediately and saved in a JSON file."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Journal:
    """Results of a benchmark. Each new result replaces the file atomically, so that the file is always complete.

    The file is a JSON object with the fields how, tables, figures, profiles, notes and failed. A table is {title, columns, rows}.
    """

    how: str  # description of the measurement
    path: Path | None = None  # file for the results; None: the results are only printed
    tables: dict[str, tuple[Sequence[str], list[Sequence[Any]]]] = field(default_factory=dict)  # columns and rows, by title
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)  # value and unit; names begin with the model or workload
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)  # fields of a profile.Profile, by model or workload
    notes: list[str] = field(default_factory=list)  # sentences for the report, such as the attention backend
    failed: list[str] = field(default_factory=list)  # names of the parts that raised an error, see apart()

    def row(self, title: str, columns: Sequence[str], values: Sequence[Any]) -> None:
        """Adds a row to the table with that title."""
        if title not in self.tables:
            self.tables[title] = (columns, [])
            print(f"\n{title}\n{' | '.join(columns)}", flush=True)
        self.tables[title][1].append(values)
        print(" | ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values), flush=True)
        self._save()

    def figure(self, name: str, value: float, unit: str = "") -> None:
        self.figures[name] = {"value": value, "unit": unit}
        self._save()

    def profile(self, name: str, profile: dict[str, Any]) -> None:
        self.profiles[name] = profile
        self._save()

    def beside(self, name: str) -> Path | None:
        """Returns a path next to the journal's file, such as OUT.NAME for NAME; None if the journal has no file."""
        return None if self.path is None else self.path.with_name(f"{self.path.stem}.{name}")

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)
        print(sentence, flush=True)
        self._save()

    def say(self, line: str) -> None:
        """Prints a line. A line about the attention backend is also saved as a note, because figures depend on it."""
        print(f"  {line}", flush=True)
        if line.startswith("attention:") and line not in self.notes:
            self.notes.append(line)

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Runs a part of the benchmark. If it raises, prints and notes the error; the other parts still run.

        A failed part makes the exit status 1.
        """
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            self.note(f"{name} failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")

    def _save(self) -> None:
        if self.path is None:
            return
        tables = [{"title": title, "columns": list(columns), "rows": rows} for title, (columns, rows) in self.tables.items()]
        found = {"how": self.how, "tables": tables, "figures": self.figures, "profiles": self.profiles}
        found |= {"notes": self.notes, "failed": self.failed}
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps(found, indent=1))
        os.replace(new, self.path)
