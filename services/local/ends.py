"""Explains why a process ended, from its exit code, the last error in its log, and the free memory of the machine."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
PREFIXES = (
    "cannot serve: ",
    "cannot start: ",
)  # removed from a log message that an explanation quotes: the explanation already says that the process ended
# A log line of Redis or Valkey: process, role, time, level. The level # is a warning or an error.
REDIS_LINE = re.compile(r"^\d+:[A-Z] \d+ \w+ \d{4} [\d:.]+ (?P<level>[.*#-]) (?P<text>.+)$")
OUT_OF_MEMORY = re.compile(r"MemoryError|can(?:no|')t allocate memory|bad_alloc|out of memory", re.IGNORECASE)
ERRORS = ("error", "critical")
MOST_CHARS = 400  # largest length of a cause in the explanation


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of the machine and the size of the model when the launcher was started."""

    model_bytes: int  # size of the weights' files; 0 for a process without weights
    free_bytes: int  # memory that a process could allocate
    kills: int  # number of processes that the kernel had killed because memory ran out

    def sentence(self) -> str:
        if not self.model_bytes:
            return f"{_gb(self.free_bytes)} of memory was free at the start. End other programs, or choose a smaller model."
        return (
            f"The model's weights take {_gb(self.model_bytes)}, and {_gb(self.free_bytes)} of memory was free at the start."
            " Choose a smaller model, or give each worker a smaller KV pool: RUN_FLAGS='--max-total-tokens 8192'."
        )


def num_memory_kills(vmstat: Path = VMSTAT) -> int:
    """Returns the number of processes that the kernel has killed because memory ran out; 0 if the kernel does not count them."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def why_it_ended(name: str, code: int, output: str, log: Path, memory: Memory, kills: int) -> str:
    """Returns a message of two to four sentences: the process and its end, the cause, the remedy, and the log.

    Args:
        code: exit status; negative: the number of the signal.
        output: the log since the process was started.
        kills: num_memory_kills() after the process has ended.
    """
    fault = cause(output)
    where = f"Its log is {log}."
    if code == -signal.SIGKILL and kills > memory.kills:
        return f"{name} was killed by the system because memory ran out. {memory.sentence()} {where}"
    if OUT_OF_MEMORY.search(fault):
        return f"{name} ended because memory ran out: {_with_full_stop(fault)} {memory.sentence()} {where}"
    if code == -signal.SIGKILL:
        about_memory = f" {memory.sentence()}" if memory.model_bytes else ""
        return f"{name} was killed by SIGKILL, for example by `kill -9` or because memory ran out.{about_memory} {where}"
    how = f"ended by {_signal(-code)}" if code < 0 else f"ended with status {code}"
    return f"{name} {how}: {_with_full_stop(fault)} {where}" if fault else f"{name} {how}. {where}"


def cause(output: str) -> str:
    """Returns the last error record in JSON, else the last error line of Redis, else the last plain line, else ""."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for error_in in (_json_error, _redis_error, _plain_line):
        fault = next(filter(None, map(error_in, reversed(lines))), "")
        if fault:
            return shortened(fault)
    return ""


def shortened(text: str) -> str:
    """Returns the text on one line. If it is longer than MOST_CHARS, cuts it after the last complete sentence."""
    line = " ".join(text.split())
    if len(line) <= MOST_CHARS:
        return line
    return f"{line[:MOST_CHARS].rpartition('. ')[0] or line[:MOST_CHARS]} …"


def _json_error(line: str) -> str:
    record = _record(line)
    if record is None or record.get("level") not in ERRORS:
        return ""
    message = str(record.get("msg", ""))
    for prefix in PREFIXES:
        message = message.removeprefix(prefix)
    return message


def _redis_error(line: str) -> str:
    found = REDIS_LINE.match(line)
    return found["text"] if found and found["level"] == "#" else ""


def _plain_line(line: str) -> str:
    """Returns the line if it is plain text, such as the last line of a traceback; otherwise an empty string."""
    return "" if _record(line) is not None or REDIS_LINE.match(line) else line


def _record(line: str) -> dict[str, object] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _with_full_stop(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
