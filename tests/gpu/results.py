"""The results of all parts, stored in one JSON file, from which the next check continues after an interruption.

The JSON report has the same data, so a check can also continue from a report.
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
    SKIPPED = "skipped"  # all tests were skipped
    PARTLY = "partly"  # some measurements of a benchmark failed; its other figures are stored
    CUT_OFF = "cut off"  # the time limit of the whole check ended the part; its figures so far are stored


DONE = (Status.PASSED, Status.SKIPPED)
Key = tuple[str, str, str]  # part, flags, device


@dataclass(frozen=True, slots=True)
class Source:
    """The code that a part has run."""

    commit: str  # commit id, with "+" at the end if files differ from the commit; "unknown" without a repository
    digest: str  # digest of the files that determine the results


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a part."""

    part: str
    status: Status
    seconds: float  # wall time
    source: Source
    device: str  # name of the GPU
    ended: str  # time of the end in ISO 8601, UTC
    counts: dict[str, int] = field(default_factory=dict)  # number of tests by outcome
    tail: str = ""  # last lines of the first failed test, then last lines of the output; "" if the part passed
    outcome: dict[str, Any] = field(default_factory=dict)  # JSON of a benchmark
    command: str = ""  # command of the part
    versions: dict[str, str] = field(default_factory=dict)  # installed packages
    flags: str = ""  # see Part

    @property
    def key(self) -> Key:
        return self.part, self.flags, self.device

    @property
    def label(self) -> str:
        return label_of(self.part, self.flags)

    @property
    def measured(self) -> int:
        """Number of figures, table rows and kernels in the outcome."""
        figures, tables = self.outcome.get("figures", {}), self.outcome.get("tables", [])
        return len(figures) + sum(len(table["rows"]) for table in tables) + len(self.outcome.get("kernels", []))


def label_of(part: str, flags: str) -> str:
    return f"{part} {flags}".rstrip()


@dataclass(slots=True)
class State:
    """The results of a check. Only the process of the check writes its file."""

    path: Path
    begun: str  # UTC date of the check, which is in the names of its reports
    results: dict[Key, Result] = field(default_factory=dict)  # one per part, flags and device

    def of(self, part: Part, facts: Mapping[str, Any]) -> Result | None:
        return self.results.get((part.name, part.flags, facts["device"]))

    def on(self, device: str) -> list[Result]:
        return [result for result in self.results.values() if result.device == device]

    def put(self, result: Result) -> Result:
        """Stores a result and writes the file atomically.

        Returns:
            The stored result: `result` or the earlier one. The earlier one stays if all of this is true: it is PARTLY,
            it has more figures, `result` is not PASSED, and both have the same code, packages and command.
        """
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
        """Returns whether the part is done with its present command.

        Args:
            facts: facts of the machine (tests.gpu.machine).
            keep: whether results that were measured with other files or package versions count.
        """
        return self._is_current(part, DONE, source, facts, keep)

    def is_kept(self, part: Part, source: Source, facts: Mapping[str, Any], keep: bool) -> bool:
        """Returns whether a benchmark failed but has some figures. Such parts run again after all others.

        The arguments are those of is_done().
        """
        return self._is_current(part, (Status.PARTLY,), source, facts, keep)

    def _is_current(self, part: Part, statuses: Collection[Status], source: Source, facts: Mapping[str, Any], keep: bool) -> bool:
        result = self.of(part, facts)
        if result is None or result.status not in statuses or result.command != command_of(part):
            return False
        return keep or (result.source, result.versions) == (source, facts["versions"])


def command_of(part: Part) -> str:
    return " ".join(part.command)


def load_state(path: Path, today: str, fresh: bool, earlier: Path | None = None) -> State:
    """Loads the state of an earlier check, or returns an empty one.

    Args:
        path: file of the state.
        fresh: whether earlier results are ignored.
        earlier: a JSON report or another state that replaces the file at `path`.

    Raises:
        ValueError: `earlier` does not exist, or the file is not a state or report.
    """
    if earlier is not None and not earlier.is_file():
        raise ValueError(f"{earlier} does not exist, so the check cannot continue from it")
    begin = earlier or path
    if fresh or not begin.is_file():
        return State(path, today)
    try:
        saved = json.loads(begin.read_text())
        results = [_result(entry) for entry in saved["parts"]]
        return State(path, saved["date"], {result.key: result for result in results})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the state {begin} cannot be read ({error!r}); start again with --fresh") from error


def _result(entry: dict[str, Any]) -> Result:
    return Result(**{**entry, "status": Status(entry["status"]), "source": Source(**entry["source"])})
