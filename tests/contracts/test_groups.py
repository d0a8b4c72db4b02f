"""`make test` runs every group of tests, each test file is in exactly one group, and the run fails if a group fails."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG_FILES
from tests.groups import chosen, groups, run
from tests.spread import EVERY_RELEASE

ROOT = Path(__file__).resolve().parents[2]


def test_run_starts_all_groups_and_returns_1_when_one_group_fails(capfd: pytest.CaptureFixture[str]) -> None:
    ends = {"first": 0, "second": 3, "third": 0}
    commands = {name: [sys.executable, "-c", f"print('ran {name}'); raise SystemExit({end})"] for name, end in ends.items()}
    assert run(commands) == 1
    output = capfd.readouterr().out
    assert all(f"ran {name}" in output for name in ends)
    closing = [line.rpartition(",")[0] for line in output.splitlines()[-3:]]
    assert closing == ["group first: passed", "group second: failed (3)", "group third: passed"]
    assert run({"first": commands["first"]}) == 0


def test_run_writes_the_output_and_a_summary_of_the_groups(tmp_path: Path) -> None:
    """The output is written while a group runs, so that the output of an interrupted group is not lost."""
    child = f"import pathlib; print(pathlib.Path({str(tmp_path / 'one-at-a-time.txt')!r}).read_text().upper())"
    parent = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    commands = {"one, at a time": [sys.executable, "-c", parent], "another": [sys.executable, "-c", "raise SystemExit(3)"]}
    assert run(commands, tmp_path) == 1
    assert (tmp_path / "one-at-a-time.txt").read_text().split() == ["begun", "BEGUN"]
    ends = [line.partition("group ")[2].rpartition(",")[0] for line in (tmp_path / "summary.txt").read_text().splitlines()]
    assert ends == ["one, at a time: passed", "another: failed (3)"]


def test_failure_is_printed_before_the_run_ends(tmp_path: Path) -> None:
    """The second test ends the process abruptly, like an interruption of the nightly run."""
    file = tmp_path / "test_two.py"
    file.write_text("import os\ndef test_one():\n    assert 1 + 1 == 3, 'sums'\ndef test_two():\n    os._exit(7)\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:schemathesis",
        "-p",
        "tests.as_it_goes",
        "--rootdir",
        str(tmp_path),
        str(file),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7
    assert "FAILED (call) test_two.py::test_one" in done.stdout and "AssertionError: sums" in done.stdout


@pytest.mark.parametrize("night", [False, True], ids=["by day", "by night"])
def test_each_test_file_is_in_one_group(night: bool) -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    taken: list[str] = []
    for arguments in groups(2, night).values():
        ignored = tuple(value for flag, value in itertools.pairwise(arguments) if flag == "--ignore")
        paths = tuple(word for word in arguments if (ROOT / word).exists() and word not in ignored)
        taken += [file for file in files if file.startswith(paths) and not (ignored and file.startswith(ignored))]
    assert sorted(taken) == sorted(files)


@pytest.mark.parametrize(
    ("only", "ran"),
    [(["end to end"], ["end to end"]), (["end", "by"], None), (["end to end, one"], ["end to end, one at a time"])],
)
def test_groups_are_selected_by_name(only: list[str], ran: list[str] | None) -> None:
    assert list(chosen(groups(2, night=False), only)) == (ran or [*groups(2, night=False)])


def test_error_for_an_unknown_group_lists_the_groups() -> None:
    with pytest.raises(ValueError, match="end to end, one at a time"):
        chosen(groups(2, night=True), ["by parts", "parts"])


def test_files_named_in_groups_exist() -> None:
    assert {path.name for path in (ROOT / "tests").rglob("test_*.py")} >= LONG_FILES
    assert all((ROOT / file).exists() for file in EVERY_RELEASE)


@pytest.mark.parametrize("target", ["test", "nightly"])
def test_make_targets_run_the_test_groups(target: str) -> None:
    done = subprocess.run(["make", "-n", "-o", "env", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "-m tests.groups" in done.stdout
    assert ("ROOTSTOCK_TEST_NIGHTLY=1" in done.stdout) is (target == "nightly")
