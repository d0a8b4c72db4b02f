"""What a benchmark has found so far: printed as it comes, and kept in a file that is whole at every moment."""

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
    """how: what is measured, in what way, median or single run. path: None to print only.

    File: how; tables: [{title, columns, rows}]; figures: {name: {value, unit}}, names begin with the model's or workload's;
    profiles: {model or workload: see profile.Profile}; notes: sentences; failed: pieces without figures, see apart().
    """

    how: str
    path: Path | None = None
    tables: dict[str, tuple[Sequence[str], list[Sequence[Any]]]] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def row(self, title: str, columns: Sequence[str], values: Sequence[Any]) -> None:
        """One more row of the table of that title."""
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
        """A file of that name next to the journal's own; None where it is kept nowhere."""
        return None if self.path is None else self.path.with_name(f"{self.path.stem}.{name}")

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)
        print(sentence, flush=True)
        self._save()

    def say(self, line: str) -> None:
        """Printed; which attention runs, and why, is kept, for figures depend on it."""
        print(f"  {line}", flush=True)
        if line.startswith("attention:") and line not in self.notes:
            self.notes.append(line)

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """A piece whose failure leaves the others to be measured: it is told, kept, and seen in the exit status."""
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
