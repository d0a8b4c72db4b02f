"""python -m tests.mutants [AREA ...] [--beside REVISION]: checks whether the tests find faults that are seeded into the code.

The run uses a copy of the working tree. For each fault, it changes the code, runs the test files of the fault's area until a test
fails, and restores the code. The exit status is 1 in three cases:

- The tests of an area fail without a seeded fault; no fault is then tried. With --known-good, this is not checked.
- The tests do not find a fault. With --beside, the tests of REVISION then run too, and the status is 1 only if these tests find
  the fault.
- A fault cannot be tried. Either its text does not occur exactly once in the code, or the changed code does not compile.

Two hundred faults take about forty minutes on two cores, so no other command runs this.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.mutants.areas import AREAS, FAULTS
from tests.mutants.fault import Fault

# Modules that are imported before the test processes are forked, so that the processes share them. Helm's library is not among
# them, because the Go runtime does not work after a fork.
SHARED = (torch,)
ROOT = Path(__file__).resolve().parents[2]
FORKED = multiprocessing.get_context("fork")
SECONDS = 900  # time limit for the test files of an area; if it is exceeded, the fault counts as found


class Unusable(Exception):
    """Raised if a fault cannot be tried. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Copy of the repository with the present code and the tests of one revision."""

    name: str  # name of the revision in the output
    root: Path  # folder of the copy

    @property
    def log(self) -> Path:
        return self.root.with_suffix(".log")

    def finds_fault(self, files: Sequence[str]) -> bool:
        """Returns whether the test files find the fault. Raises Unusable if the C++ kernels do not compile."""
        there = [file for file in files if (self.root / file).is_file()]
        child = FORKED.Process(target=run_pytest, args=(self.root, self.log, there))
        child.start()
        child.join(SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
        if "BuildFailed" in self.log.read_text():
            raise Unusable("the C++ kernels do not compile with this fault")
        return child.exitcode != 0


def run_pytest(root: Path, log: Path, files: Sequence[str]) -> None:
    """Runs pytest on `files` in this forked process, and exits with pytest's status.

    Libraries that the parent has imported stay loaded. The packages `tests` and `rootstock_llm` are reloaded from `root`.
    """
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "rootstock_llm")]:
        del sys.modules[name]
    status = pytest.main([*files, "-x", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"])
    sys.stdout.flush()
    os._exit(int(status))


def copy_of_the_tree(target: Path) -> None:
    """Copies the tracked files with their local changes, and the generated protos."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    shutil.copytree(ROOT / "rootstock_llm", target / "rootstock_llm", symlinks=True, dirs_exist_ok=True)


def tests_of(revision: str, target: Path) -> None:
    """Replaces the folder `tests` in `target` by that of a revision. Raises CalledProcessError for an unknown revision."""
    archive = subprocess.run(["git", "archive", revision, "tests"], cwd=ROOT, capture_output=True, check=True).stdout
    shutil.rmtree(target / "tests")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(target, filter="data")


@contextmanager
def put_into(fault: Fault, roots: Sequence[Path]) -> Iterator[None]:
    right = (roots[0] / fault.path).read_text() if (roots[0] / fault.path).is_file() else ""
    if right.count(fault.right) != 1:
        raise Unusable(f"the fault's text occurs {right.count(fault.right)} times in {fault.path}; it must occur once")
    try:
        for root in roots:
            (root / fault.path).write_text(right.replace(fault.right, fault.wrong))
        yield
    finally:
        for root in roots:
            (root / fault.path).write_text(right)


def files_of(fault: Fault) -> list[str]:
    return [file for file in AREAS[fault.area] if fault.only in file]


def try_fault(fault: Fault, suites: Sequence[Suite]) -> tuple[str, bool]:
    """Runs one suite after another until one finds the fault. Returns the outcome, and whether it makes the exit status 1."""
    with put_into(fault, [suite.root for suite in suites]):
        for suite in suites:
            if suite.finds_fault(files_of(fault)):
                return f"noticed ({suite.name})", suite is not suites[0]
    return "not found", len(suites) == 1


def report(faults: Sequence[Fault], suites: Sequence[Suite]) -> int:
    """Tries all faults and prints a row for each. Returns the number of rows that make the exit status 1."""
    bad = 0
    print("| fault | outcome | s |\n|---|---|---|", flush=True)
    for fault in faults:
        begun = time.monotonic()
        try:
            outcome, wrong = try_fault(fault, suites)
        except Unusable as error:
            outcome, wrong = str(error), True
        bad += wrong
        print(f"| {fault.name.replace('|', chr(92) + '|')} | {outcome} | {time.monotonic() - begun:.0f} |", flush=True)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"one of {', '.join(AREAS)}; default: all")
    parser.add_argument("--beside", metavar="REVISION", help="revision whose tests run if the present tests do not find a fault")
    parser.add_argument("--match", default="", metavar="TEXT", help="only faults whose row contains this text")
    parser.add_argument(
        "--known-good", action="store_true", help="skip the first run, which checks that all tests pass without a fault"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.areas) - AREAS.keys():
        parser.error(f"unknown areas: {', '.join(sorted(unknown))}")
    areas = arguments.areas or list(AREAS)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        suites = [Suite("today", Path(name) / "today")]
        copy_of_the_tree(suites[0].root)
        if arguments.beside:
            suites.append(Suite("beside", Path(name) / "beside"))
            copy_of_the_tree(suites[1].root)
            tests_of(arguments.beside, suites[1].root)
            for suite in suites:  # both copies share one build folder, so that the kernels are compiled only once
                (suite.root / "build").symlink_to(Path(name))
        for area in areas if not arguments.known_good else ():  # the first run: the tests must pass without a fault
            if suites[0].finds_fault(AREAS[area]):
                raise SystemExit(f"{area}: the tests fail without a fault; repair them first\n{suites[0].log.read_text()}")
        chosen = [fault for fault in FAULTS if fault.area in areas and arguments.match in fault.name]
        return int(report(chosen, suites) > 0)


if __name__ == "__main__":
    sys.exit(main())
