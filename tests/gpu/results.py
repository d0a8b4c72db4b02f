"""What is known of each part, kept in one JSON file so that a check that was cut off goes on where it stopped.

The report in JSON holds the same and more, so that a check can go on from it where the file itself is lost.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.parts import Part


class Status(enum.StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    SKIPPED = "skipped"  # every test of it
    CUT_OFF = "cut off"  # by the limit of the whole check; what it had measured by then is kept


DONE = (Status.PASSED, Status.SKIPPED)


@dataclass(frozen=True, slots=True)
class Source:
    """What was run. commit: "unknown" outside a repository; "+" at its end where files differ from it. digest: of the files."""

    commit: str
    digest: str


@dataclass(frozen=True, slots=True)
class Result:
    """seconds: wall time. counts: tests by outcome. tail: the last lines of its output, with a failed test's own before them.
    outcome: a benchmark's JSON. command: the part's. versions: of the packages that were there."""

    part: str
    status: Status
    seconds: float
    source: Source
    device: str
    ended: str
    counts: dict[str, int] = field(default_factory=dict)
    tail: str = ""
    outcome: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class State:
    """Owned by the check's process. begun: the UTC date of the check, which names its report."""

    path: Path
    begun: str
    results: dict[str, Result] = field(default_factory=dict)

    def put(self, result: Result) -> None:
        """Written whole and renamed, so that a kill leaves the older or the newer file."""
        self.results[result.part] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"date": self.begun, "parts": [asdict(r) for r in self.results.values()]}, indent=1))
        os.replace(new, self.path)

    def is_done(self, part: Part, source: Source, facts: Mapping[str, Any], keep: bool) -> bool:
        """With that very command. facts: of the machine. keep: results of other sources and versions count too."""
        result = self.results.get(part.name)
        if result is None or result.status not in DONE:
            return False
        if (result.device, result.command) != (facts["device"], command_of(part)):
            return False
        return keep or (result.source, result.versions) == (source, facts["versions"])


def command_of(part: Part) -> str:
    return " ".join(part.command)


def load_state(path: Path, today: str, fresh: bool, earlier: Path | None = None) -> State:
    """fresh: what an earlier check left is forgotten. earlier: a report, JSON, or another state to go on from, in place of path.
    Raises ValueError where the file is not one of ours."""
    if earlier is not None and not earlier.is_file():
        raise ValueError(f"there is no {earlier} to go on from")
    begin = earlier or path
    if fresh or not begin.is_file():
        return State(path, today)
    try:
        saved = json.loads(begin.read_text())
        results = [_result(entry) for entry in saved["parts"]]
        return State(path, saved["date"], {result.part: result for result in results})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{begin} cannot be read ({error!r}); begin anew with --fresh") from error


def _result(entry: dict[str, Any]) -> Result:
    return Result(**{**entry, "status": Status(entry["status"]), "source": Source(**entry["source"])})
