"""Why a process ended: its exit code, the last error in its log, and the memory that the machine had."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
PREFIXES = ("cannot serve: ", "cannot start: ")  # of messages that are quoted
# A log line of Redis or Valkey: process, role, time, level. The level # is a warning or an error.
REDIS_LINE = re.compile(r"^\d+:[A-Z] \d+ \w+ \d{4} [\d:.]+ (?P<level>[.*#-]) (?P<text>.+)$")
OUT_OF_MEMORY = re.compile(r"MemoryError|can(?:no|')t allocate memory|bad_alloc|out of memory", re.IGNORECASE)
ERRORS = ("error", "critical")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the machine and of the model when the start began."""

    model_bytes: int  # of the weights' files; 0 for a process that loads none
    free_bytes: int  # that a process could take
    kills: int  # processes that the kernel had killed for want of memory

    def sentence(self) -> str:
        if not self.model_bytes:
            return f"{_gb(self.free_bytes)} of memory was free at the start. End other programs, or choose a smaller model."
        return (
            f"The model's weights take {_gb(self.model_bytes)}, and {_gb(self.free_bytes)} of memory was free at the start."
            " Choose a smaller model, or give each worker a smaller KV pool: RUN_FLAGS='--max-total-tokens 8192'."
        )


def num_memory_kills(vmstat: Path = VMSTAT) -> int:
    """Returns how many processes the kernel has killed for want of memory. 0 where the kernel does not count them."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def why_it_ended(name: str, code: int, output: str, log: Path, memory: Memory, kills: int) -> str:
    """Returns one or two sentences: the process, its end, the cause, the remedy, the log.

    Args:
        code: The exit status; negative for a signal.
        output: The log since the process was started.
        kills: num_memory_kills() after the end.
    """
    said = cause(output)
    where = f"Its log is {log}."
    if code == -signal.SIGKILL and kills > memory.kills:
        return f"{name} was killed by the system for want of memory. {memory.sentence()} {where}"
    if OUT_OF_MEMORY.search(said):
        return f"{name} ended for want of memory: {_ended(said)} {memory.sentence()} {where}"
    if code == -signal.SIGKILL:
        takes = f" {memory.sentence()}" if memory.model_bytes else ""
        return f"{name} was killed (SIGKILL), as by `kill -9` or by a system whose memory ran out.{takes} {where}"
    how = f"ended by {_signal(-code)}" if code < 0 else f"ended with status {code}"
    return f"{name} {how}: {_ended(said)} {where}" if said else f"{name} {how}. {where}"


def cause(output: str) -> str:
    """Returns the last error of a log: of JSON lines, of Redis, or the last line of any other program. "" for an empty log."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for found in (_json_error, _redis_error, _plain_line):
        said = next(filter(None, map(found, reversed(lines))), "")
        if said:
            return said
    return ""


def _json_error(line: str) -> str:
    record = _record(line)
    if record is None or record.get("level") not in ERRORS:
        return ""
    said = str(record.get("msg", ""))
    for prefix in PREFIXES:
        said = said.removeprefix(prefix)
    return said


def _redis_error(line: str) -> str:
    found = REDIS_LINE.match(line)
    return found["text"] if found and found["level"] == "#" else ""


def _plain_line(line: str) -> str:
    """A program's own last words: of a Python traceback its last line, the exception."""
    return "" if _record(line) is not None or REDIS_LINE.match(line) else line


def _record(line: str) -> dict[str, object] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
