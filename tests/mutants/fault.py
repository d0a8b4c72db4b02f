"""Small faults for `python -m tests.mutants`, which puts in one at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """A replacement of a text in a file."""

    area: str  # key of AREAS, whose tests must find the fault
    path: str  # file below the repository
    right: str  # text that is exactly once in the file
    wrong: str  # text that replaces `right`
    only: str = ""  # part of the names of the area's test files that run; empty: all of them

    @property
    def name(self) -> str:
        return f"{self.path}: {' '.join(self.right.split())[:48]} → {' '.join(self.wrong.split())[:48]}"


def of(area: str, path: str, *changes: tuple[str, str], only: str = "") -> tuple[Fault, ...]:
    return tuple(Fault(area, path, right, wrong, only) for right, wrong in changes)
