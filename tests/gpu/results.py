"""What is known of each part, kept in one JSON file so that a check that was cut off goes on where it stopped.

The report in JSON holds the same and more, so that a check can go on from it where the file itself is lost.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.parts import Part


class Status(enum.StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    SKIPPED = "skipped"  # every test of it
    PARTLY = "partly"  # a benchmark of which a piece failed; it kept the figures of the others
    CUT_OFF = "cut off"  # by the limit of the whole check; what it had measured by then is kept


DONE = (Status.PASSED, Status.SKIPPED)
Key = tuple[str, str, str]  # part, flags, device


@dataclass(frozen=True, slots=True)
class Source:
    """What was run. commit: "unknown" outside a repository; "+" at its end where files differ from it. digest: of the files."""

    commit: str
    digest: str


@dataclass(frozen=True, slots=True)
class Result:
    """seconds: wall time. counts: tests by outcome. tail: of what has not passed, the last lines of its output, with a failed
    test's own before them. outcome: a benchmark's JSON. command: the part's. versions: of the packages that were there. flags:
    those that the benchmarks were given, see Part."""

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
    flags: str = ""

    @property
    def key(self) -> Key:
        return self.part, self.flags, self.device

    @property
    def label(self) -> str:
        return label_of(self.part, self.flags)

    @property
    def measured(self) -> int:
        """How much there is in it of figures and rows."""
        figures, tables = self.outcome.get("figures", {}), self.outcome.get("tables", [])
        return len(figures) + sum(len(table["rows"]) for table in tables) + len(self.outcome.get("kernels", []))


def label_of(part: str, flags: str) -> str:
    return f"{part} {flags}".rstrip()


@dataclass(slots=True)
class State:
    """Owned by the check's process. begun: the UTC date of the check, which names its report. results: what was measured with
    other flags or on another device stands beside it."""

    path: Path
    begun: str
    results: dict[Key, Result] = field(default_factory=dict)

    def of(self, part: Part, facts: Mapping[str, Any]) -> Result | None:
        return self.results.get((part.name, part.flags, facts["device"]))

    def on(self, device: str) -> list[Result]:
        return [result for result in self.results.values() if result.device == device]

    def put(self, result: Result) -> Result:
        """Written whole and renamed, so that a kill leaves the older or the newer file. Returns what is kept: an earlier result
        where the same files left more figures then than they did when they failed again."""
        earlier = self.results.get(result.key)
        if earlier is not None and earlier.status is Status.PARTLY and result.status is not Status.PASSED:
            same = (earlier.source, earlier.versions, earlier.command) == (result.source, result.versions, result.command)
            result = earlier if same and earlier.measured > result.measured else result
        self.results[result.key] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"date": self.begun, "parts": [asdict(r) for r in self.results.values()]}, indent=1))
        os.replace(new, self.path)
        return result

    def is_done(self, part: Part, source: Source, facts: Mapping[str, Any], keep: bool) -> bool:
        """With that very command. facts: of the machine. keep: results of other sources and versions count too."""
        return self._stands(part, DONE, source, facts, keep)

    def is_kept(self, part: Part, source: Source, facts: Mapping[str, Any], keep: bool) -> bool:
        """As is_done(), of a benchmark that failed in part: it is run again when everything else is done."""
        return self._stands(part, (Status.PARTLY,), source, facts, keep)

    def _stands(self, part: Part, statuses: Collection[Status], source: Source, facts: Mapping[str, Any], keep: bool) -> bool:
        result = self.of(part, facts)
        if result is None or result.status not in statuses or result.command != command_of(part):
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
        return State(path, saved["date"], {result.key: result for result in results})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{begin} cannot be read ({error!r}); begin anew with --fresh") from error


def _result(entry: dict[str, Any]) -> Result:
    return Result(**{**entry, "status": Status(entry["status"]), "source": Source(**entry["source"])})
