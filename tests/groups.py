"""python -m tests.groups [--processes N] [--only GROUP]: runs the whole suite in groups. The status is 1 if a group has failed.

All groups run even if one fails. By night (tests/night.py) there are more groups, so that an interrupted group can be repeated
alone. The output of a nightly group is also written to a file in build/nightly while it runs, with each failure when it happens
(tests/as_it_goes.py). summary.txt in this folder has the groups' results of all runs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.night import NIGHTLY

LOGS = Path(__file__).resolve().parents[1] / "build" / "nightly"
# Tests that use the whole machine, or measure time.
CROWDED = (
    "tests/e2e/test_fleet_faults.py",
    "tests/e2e/test_fleet_scale.py",
    "tests/e2e/test_fleet_soak.py",
)
# Tests that fill the machine's memory or cores by night, and check the memory of services.
MEASURED = (
    "tests/e2e/test_fuzz.py",
    "tests/services/gateway/http/test_body_budget.py",
    "tests/services/tokenizer/test_long_requests.py",
    "tests/services/worker/control/test_control_process.py",
)
# Groups of folders by night. All other folders except tests/e2e are one more group.
PARTS = {
    "scheduler": ("tests/core", "tests/sim"),
    "executor": ("tests/exec", "tests/kernels", "tests/gpu"),
    "services": ("tests/services", "tests/grammar"),
}
# By night, a test without a separate time limit may run for 4 hours.
AT_NIGHT = ("-ra", "--durations", "50", "--timeout", str(4 * 3600), "-p", "tests.as_it_goes")


def groups(processes: int, night: bool) -> dict[str, list[str]]:
    """Returns the arguments of pytest by the name of each group.

    Args:
        processes: number of pytest processes. Each runs one file at a time (tests/spread.py), in the order of tests/conftest.py.
            By day, `by parts` gets two more processes and `end to end` gets one more, because waiting tests leave cores idle.
            Measured on two cores with three processes: cores are idle for a fifth of the time in `by parts`, and for less than a
            tenth in `end to end`.
        night: whether to return the groups of a nightly run.
    """
    side_by_side = _spread(processes)
    if not night:
        more = int(processes > 1)
        return {
            "by parts": ["tests", *_without("tests/e2e"), *_spread(processes + 2 * more)],
            "end to end, one at a time": [*CROWDED],
            "end to end": ["tests/e2e", *_without(*CROWDED), *_spread(processes + more)],
        }
    listed = [folder for folders in PARTS.values() for folder in folders]
    split = {
        **{
            f"by parts, {name}": [*folders, *_without(*_inside(folders, MEASURED)), *side_by_side]
            for name, folders in PARTS.items()
        },
        "by parts, all others": ["tests", *_without("tests/e2e", *listed), *side_by_side],
        "measured, one at a time": [*MEASURED],
        "end to end, one at a time": [*CROWDED],
        "end to end": ["tests/e2e", *_without(*CROWDED, *_inside(["tests/e2e"], MEASURED)), *side_by_side],
    }
    return {name: [*arguments, *AT_NIGHT] for name, arguments in split.items()}


def chosen(asked: Mapping[str, Sequence[str]], only: Sequence[str]) -> dict[str, Sequence[str]]:
    """Returns the selected groups.

    Args:
        asked: arguments of pytest by the name of each group.
        only: names of groups, or beginnings of names; empty for all groups.

    Raises:
        ValueError: a name in `only` is not the beginning of any group's name.
    """
    for prefix in only:
        if not any(name.startswith(prefix) for name in asked):
            raise ValueError(f"no group has a name that begins with {prefix!r}; the groups are: {'; '.join(asked)}")
    meant = {name for prefix in only for name in asked if name == prefix or (prefix not in asked and name.startswith(prefix))}
    return {name: words for name, words in asked.items() if name in meant}


def _spread(processes: int) -> list[str]:
    if processes <= 1:
        return []
    return ["-p", "tests.spread", "--numprocesses", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"]


def _without(*paths: str) -> list[str]:
    return [word for path in paths for word in ("--ignore", path)]


def _inside(folders: Sequence[str], files: Sequence[str]) -> list[str]:
    return [file for file in files if file.startswith(tuple(folders))]


def run(commands: Mapping[str, Sequence[str]], logs: Path | None = None) -> int:
    """Runs all commands and finally prints the result of each. Returns 1 if a command failed, and 0 otherwise.

    Args:
        logs: folder for the output and the result of each command; None to write no files.
    """
    ends: list[str] = []
    failed = False
    for name, command in commands.items():
        print(f"\n=== {name}", flush=True)
        begun = time.monotonic()
        status = _run(command, logs / f"{re.sub('[^a-z]+', '-', name)}.txt" if logs else None)
        ends.append(f"group {name}: {f'failed ({status})' if status else 'passed'}, {time.monotonic() - begun:.0f} s")
        failed |= status != 0
        if logs:
            with (logs / "summary.txt").open("a") as summary:
                print(time.strftime("%Y-%m-%d %H:%M"), ends[-1], file=summary)
    print("", *ends, sep="\n", flush=True)
    return int(failed)


def _run(command: Sequence[str], log: Path | None) -> int:
    """Runs a command and returns its status. Copies each line of its output to stdout and to the log."""
    if log is None:
        return subprocess.run(command, check=False).returncode
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        assert child.stdout is not None
        for line in child.stdout:
            for target in (file, sys.stdout.buffer):
                target.write(line)
                target.flush()
    return child.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="number of pytest processes for groups that can run in parallel")
    parser.add_argument(
        "--only", action="append", metavar="GROUP", help="name of a group to run, or the beginning of names; may be repeated"
    )
    arguments = parser.parse_args()
    try:
        asked = chosen(groups(arguments.processes, NIGHTLY), arguments.only or [""])
    except ValueError as error:
        parser.error(str(error))
    return run({name: [sys.executable, "-m", "pytest", *words] for name, words in asked.items()}, LOGS if NIGHTLY else None)


if __name__ == "__main__":
    sys.exit(main())
