"""python -m tests.groups [--processes N]: the whole suite in groups. All of them run; status 1 if one has failed."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

# Tests that fill the machine by themselves, or count seconds of it.
CROWDED = (
    "tests/e2e/test_fleet_faults.py",
    "tests/e2e/test_fleet_scale.py",
    "tests/e2e/test_fleet_soak.py",
    "tests/e2e/test_random_weights.py",
)


def groups(processes: int) -> dict[str, list[str]]:
    """Arguments of pytest by group's name. processes: each with a file at a time, in the order of tests/conftest.py; one more of
    them than that where tests wait for something for a quarter of their time."""
    more = processes + 1 if processes > 1 else 1
    return {
        "by parts": ["tests", "--ignore", "tests/e2e", *_spread(more)],
        "end to end, one at a time": [*CROWDED],
        "end to end": ["tests/e2e", *(word for path in CROWDED for word in ("--ignore", path)), *_spread(more)],
    }


def _spread(processes: int) -> list[str]:
    return ["--numprocesses", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"] if processes > 1 else []


def run(commands: Mapping[str, Sequence[str]]) -> int:
    """Runs each command, whatever became of those before it, and says at the end how each ended."""
    ends: list[tuple[str, int, float]] = []
    for name, command in commands.items():
        print(f"\n=== {name}", flush=True)
        begun = time.monotonic()
        ends.append((name, subprocess.run(command, check=False).returncode, time.monotonic() - begun))
    print()
    for name, status, seconds in ends:
        print(f"group {name}: {f'failed ({status})' if status else 'passed'}, {seconds:.0f} s", flush=True)
    return int(any(status for _, status, _ in ends))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="of pytest, side by side where tests allow it")
    asked = groups(parser.parse_args().processes)
    return run({name: [sys.executable, "-m", "pytest", *arguments] for name, arguments in asked.items()})


if __name__ == "__main__":
    sys.exit(main())
