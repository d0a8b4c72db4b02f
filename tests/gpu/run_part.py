"""Runs one part as a process with a time limit, and reads what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.parts import TESTS, Part
from tests.gpu.results import Status

TAIL_LINES = 60
KILL_AFTER_S = 10.0  # from the request to end to the end by force


@dataclass(frozen=True, slots=True)
class Ran:
    """status is None where the limit has ended it: whose limit it was is the caller's to say."""

    status: Status | None
    seconds: float
    counts: dict[str, int]
    tail: str
    outcome: dict[str, Any]


def run_part(part: Part, folder: Path, root: Path, limit_s: float, environment: dict[str, str]) -> Ran:
    """Its output goes to folder/NAME.log and to stdout."""
    out = folder / f"{part.name}.{'xml' if part.kind == TESTS else 'json'}"
    log = folder / f"{part.name}.log"
    out.unlink(missing_ok=True)
    command = [sys.executable, *(word.replace("{out}", str(out)) for word in part.command)]
    begun = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=root, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    seconds = time.monotonic() - begun
    counts = _counts(out) if part.kind == TESTS else {}
    outcome = _outcome(out) if part.kind != TESTS else {}
    status = None if code is None else _status(part, code, counts, outcome)
    return Ran(status, seconds, counts, tail_of(log), outcome)


def tail_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])


def _status(part: Part, code: int, counts: dict[str, int], outcome: dict[str, Any]) -> Status:
    if part.kind == TESTS:
        if code != 0 or not counts:
            return Status.FAILED
        return Status.PASSED if counts.get("passed") else Status.SKIPPED
    return Status.PASSED if code == 0 and outcome else Status.FAILED


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started, which is its own group."""
    for word, wait_s in ((signal.SIGTERM, KILL_AFTER_S), (signal.SIGKILL, KILL_AFTER_S)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, word)
        try:
            process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            continue


def _counts(out: Path) -> dict[str, int]:
    """Tests by outcome; empty where pytest did not come to its end."""
    if not out.is_file():
        return {}
    counts: dict[str, int] = {}
    for case in ElementTree.parse(out).iter("testcase"):
        outcome = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")
        counts[outcome] = counts.get(outcome, 0) + 1
    return counts


def _outcome(out: Path) -> dict[str, Any]:
    """A list stands for a benchmark that gives rows alone."""
    if not out.is_file():
        return {}
    try:
        found = json.loads(out.read_text())
    except ValueError:  # ended in the middle of a write that was not ours
        return {}
    return found if isinstance(found, dict) else {"rows": found}
