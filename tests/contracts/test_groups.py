"""`make test` runs every group, each test in one of them, and fails at its end if any has failed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG_FILES
from tests.groups import groups, run

ROOT = Path(__file__).resolve().parents[2]


def test_a_group_that_fails_ends_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    ends = {"first": 0, "second": 3, "third": 0}
    commands = {name: [sys.executable, "-c", f"print('ran {name}'); raise SystemExit({end})"] for name, end in ends.items()}
    assert run(commands) == 1
    said = capfd.readouterr().out
    assert all(f"ran {name}" in said for name in ends)
    closing = [line.rpartition(",")[0] for line in said.splitlines()[-3:]]
    assert closing == ["group first: passed", "group second: failed (3)", "group third: passed"]
    assert run({"first": commands["first"]}) == 0


def test_every_file_is_in_one_group() -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    taken: list[str] = []
    for arguments in groups(2).values():
        ignored = tuple(value for flag, value in itertools.pairwise(arguments) if flag == "--ignore")
        paths = tuple(word for word in arguments if word.startswith("tests") and word not in ignored)
        taken += [file for file in files if file.startswith(paths) and not (ignored and file.startswith(ignored))]
    assert sorted(taken) == sorted(files)


def test_what_is_run_first_is_there() -> None:
    assert {path.name for path in (ROOT / "tests").rglob("test_*.py")} >= LONG_FILES


@pytest.mark.parametrize("target", ["test", "nightly"])
def test_make_runs_the_groups(target: str) -> None:
    done = subprocess.run(["make", "-n", "-o", "env", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "-m tests.groups" in done.stdout
    assert ("ROOTSTOCK_TEST_NIGHTLY=1" in done.stdout) is (target == "nightly")
