"""python -m tests.mutants [AREA ...] [--beside REVISION]: whether the tests notice faults that are put into what they test.

Works in a copy of the tree. Each fault is put in alone, the test files of its area run until one fails, and the fault is taken
out. A fault that no test notices ends the run with status 1, and so does one whose place is not in the code once: it is to be
written again. --beside: where today's tests do not notice a fault, those of a revision are asked; then only what they noticed is
status 1. By hand: on two cores, two hundred faults take about forty minutes.
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

SHARED = (torch,)  # imported here, so that no process that runs tests has to. Helm cannot be: Go does not survive a fork
ROOT = Path(__file__).resolve().parents[2]
FORKED = multiprocessing.get_context("fork")
SECONDS = 900  # for the files of an area; what hangs was noticed


class Unusable(Exception):
    """The fault cannot be tried: the message says why."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Test files of one revision beside the code of today."""

    name: str
    root: Path

    @property
    def log(self) -> Path:
        return self.root.with_suffix(".log")

    def noticed(self, files: Sequence[str]) -> bool:
        """Raises Unusable where the C++ kernels cannot be built: what is no program is no fault."""
        there = [file for file in files if (self.root / file).is_file()]
        child = FORKED.Process(target=run_pytest, args=(self.root, self.log, there))
        child.start()
        child.join(SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
        if "BuildFailed" in self.log.read_text():
            raise Unusable("does not compile")
        return child.exitcode != 0


def run_pytest(root: Path, log: Path, files: Sequence[str]) -> None:
    """In a process of its own, with this one's libraries and the root's modules. Ends it with pytest's status."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "services", "kernels", "rootstock")]:
        del sys.modules[name]
    status = pytest.main([*files, "-x", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"])
    sys.stdout.flush()
    os._exit(int(status))


def copy_of_the_tree(target: Path) -> None:
    """What git tracks, as it lies here, and the generated protos."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    shutil.copytree(ROOT / "rootstock", target / "rootstock", dirs_exist_ok=True)


def tests_of(revision: str, target: Path) -> None:
    """Puts them in place of the target's. Raises CalledProcessError for a revision that is none."""
    archive = subprocess.run(["git", "archive", revision, "tests"], cwd=ROOT, capture_output=True, check=True).stdout
    shutil.rmtree(target / "tests")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(target, filter="data")


@contextmanager
def put_into(fault: Fault, roots: Sequence[Path]) -> Iterator[None]:
    right = (roots[0] / fault.path).read_text() if (roots[0] / fault.path).is_file() else ""
    if right.count(fault.right) != 1:
        raise Unusable(f"its place is there {right.count(fault.right)} times")
    try:
        for root in roots:
            (root / fault.path).write_text(right.replace(fault.right, fault.wrong))
        yield
    finally:
        for root in roots:
            (root / fault.path).write_text(right)


def files_of(fault: Fault) -> list[str]:
    return [file for file in AREAS[fault.area] if fault.only in file]


def tried(fault: Fault, suites: Sequence[Suite]) -> tuple[str, bool]:
    """What became of it, and whether that is bad. The suites in turn, until one notices it."""
    with put_into(fault, [suite.root for suite in suites]):
        for suite in suites:
            if suite.noticed(files_of(fault)):
                return f"noticed ({suite.name})", suite is not suites[0]
    return "noticed by none", len(suites) == 1


def report(faults: Sequence[Fault], suites: Sequence[Suite]) -> int:
    """Prints a row for each fault as it is tried. How many rows are bad."""
    bad = 0
    print("| fault | outcome | s |\n|---|---|---|", flush=True)
    for fault in faults:
        begun = time.monotonic()
        try:
            outcome, wrong = tried(fault, suites)
        except Unusable as error:
            outcome, wrong = str(error), True
        bad += wrong
        print(f"| {fault.name.replace('|', chr(92) + '|')} | {outcome} | {time.monotonic() - begun:.0f} |", flush=True)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)}; default: all")
    parser.add_argument("--beside", metavar="REVISION", help="whose tests run too")
    parser.add_argument("--match", default="", metavar="TEXT", help="only faults whose row would hold it")
    parser.add_argument("--known-good", action="store_true", help="do not run the tests without a fault first")
    arguments = parser.parse_args()
    if unknown := set(arguments.areas) - AREAS.keys():
        parser.error(f"no such area: {', '.join(sorted(unknown))}")
    areas = arguments.areas or list(AREAS)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        suites = [Suite("today", Path(name) / "today")]
        copy_of_the_tree(suites[0].root)
        if arguments.beside:
            suites.append(Suite("beside", Path(name) / "beside"))
            copy_of_the_tree(suites[1].root)
            tests_of(arguments.beside, suites[1].root)
            for suite in suites:  # kernels are built once for both
                (suite.root / "build").symlink_to(Path(name))
        for area in areas if not arguments.known_good else ():
            if suites[0].noticed(AREAS[area]):
                raise SystemExit(f"{area}: the tests fail where there is no fault\n{suites[0].log.read_text()}")
        chosen = [fault for fault in FAULTS if fault.area in areas and arguments.match in fault.name]
        return int(report(chosen, suites) > 0)


if __name__ == "__main__":
    sys.exit(main())
