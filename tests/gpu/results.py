"""What is known of each part, kept in one JSON file so that a check that was cut off goes on where it stopped."""

from __future__ import annotations

import enum
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


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
    """seconds: wall time. counts: tests by outcome. tail: the last lines of its output. outcome: a benchmark's JSON."""

    part: str
    status: Status
    seconds: float
    source: Source
    device: str
    ended: str
    counts: dict[str, int] = field(default_factory=dict)
    tail: str = ""
    outcome: dict[str, Any] = field(default_factory=dict)


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
        new.write_text(json.dumps({"begun": self.begun, "results": [asdict(r) for r in self.results.values()]}, indent=1))
        os.replace(new, self.path)

    def is_done(self, part: str, source: Source, device: str, keep: bool) -> bool:
        """keep: results of other sources count too."""
        result = self.results.get(part)
        if result is None or result.status not in DONE or result.device != device:
            return False
        return keep or result.source == source


def load_state(path: Path, today: str, fresh: bool) -> State:
    """fresh: what an earlier check left is forgotten. Raises ValueError where the file is not one of ours."""
    if fresh or not path.is_file():
        return State(path, today)
    try:
        saved = json.loads(path.read_text())
        results = [_result(entry) for entry in saved["results"]]
        return State(path, saved["begun"], {result.part: result for result in results})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}); begin anew with --fresh") from error


def _result(entry: dict[str, Any]) -> Result:
    return Result(**{**entry, "status": Status(entry["status"]), "source": Source(**entry["source"])})
