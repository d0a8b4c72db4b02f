"""Runs one part as a process with a time limit, and reads its results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.parts import TESTS, Part
from tests.gpu.results import Status

TAIL_LINES = 60
FAILURE_LINES = 40  # lines of the first failed test that are reported
END_AFTER_S = 8.0  # seconds between two signals to a part that must end
FIGURES = ("figures", "tables", "kernels")  # measurements in a benchmark's JSON
# Runs a command with the default handler of SIGINT. A process that a shell starts in the background ignores SIGINT, and its
# children inherit this.
WITH_SIGINT = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
WAYS_TO_END = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGKILL,
)  # signals in the order in which they are sent; after SIGINT, pytest prints its summary and a benchmark its stack


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a part's process."""

    status: Status | None  # None if a time limit ended the process; the caller knows which limit, the part's or the check's
    seconds: float  # wall time
    counts: dict[str, int]  # number of tests by outcome
    tail: str  # last lines of the first failed test, then last lines of the output
    outcome: dict[str, Any]  # JSON of a benchmark


Wait = Callable[[subprocess.Popen[bytes], float], int | None]
"""Waits for a process: (process, limit in seconds) → its exit status, or None if it runs longer than the limit."""


def wait_for(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None


def run_part(part: Part, folder: Path, root: Path, limit_s: float, environment: dict[str, str], wait: Wait = wait_for) -> Ran:
    """Runs a part with its output in folder/NAME.log."""
    out = folder / f"{part.stem}.{'xml' if part.kind == TESTS else 'json'}"
    log = folder / f"{part.stem}.log"
    out.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-c",
        WITH_SIGINT,
        sys.executable,
        *(word.replace("{out}", str(out)) for word in part.command),
    ]
    begun = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=root,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = wait(process, limit_s)
        finally:
            end(process)
    seconds = time.monotonic() - begun
    cases = _cases(out) if part.kind == TESTS else []
    outcome = _outcome(out) if part.kind != TESTS else {}
    counts = dict(Counter(map(_outcome_of, cases)))
    status = None if code is None else _status(part, code, counts, outcome)
    return Ran(status, seconds, counts, _first_failure(cases) + tail_of(log), outcome)


def tail_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])


def _status(part: Part, code: int, counts: dict[str, int], outcome: dict[str, Any]) -> Status:
    if part.kind == TESTS:
        if code != 0 or not counts:
            return Status.FAILED
        return Status.PASSED if counts.get("passed") else Status.SKIPPED
    if code == 0 and outcome:
        return Status.PASSED
    return Status.PARTLY if any(outcome.get(name) for name in FIGURES) else Status.FAILED


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its children, which form a process group."""
    for word in WAYS_TO_END:
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):  # the process may have just ended
            os.killpg(process.pid, word)
        try:
            process.wait(timeout=END_AFTER_S)
        except subprocess.TimeoutExpired:
            continue
    with contextlib.suppress(ProcessLookupError):  # all processes of the group may have ended
        os.killpg(process.pid, signal.SIGKILL)


def _cases(out: Path) -> list[ElementTree.Element]:
    """Returns the tests that ran, from pytest's JUnit XML; empty if pytest was ended before it wrote the file."""
    if not out.is_file():
        return []
    try:
        return list(ElementTree.parse(out).iter("testcase"))
    except ElementTree.ParseError:  # pytest was ended during the write
        return []


def _outcome_of(case: ElementTree.Element) -> str:
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def _first_failure(cases: list[ElementTree.Element]) -> str:
    """Returns the last lines of the first failed test, or "" if no test failed.

    The first failure often explains the later ones, but is not in the last lines of the output.
    """
    for case in cases:
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                lines = (found.text or found.get("message") or "").splitlines()[-FAILURE_LINES:]
                return "\n".join([f"First failed test: {case.get('classname')}.{case.get('name')}", *lines, "", ""])
    return ""


def _outcome(out: Path) -> dict[str, Any]:
    """Returns the JSON of a benchmark. A list is returned as {"rows": list}. Without a complete file, returns {}."""
    if not out.is_file():
        return {}
    try:
        found = json.loads(out.read_text())
    except ValueError:  # the benchmark was ended while it wrote the file
        return {}
    return found if isinstance(found, dict) else {"rows": found}
