"""The type of a seeded fault. `python -m tests.mutants` tries one fault at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: a text in a file of the product and the wrong text that replaces it."""

    area: str  # key of AREAS, whose tests must find the fault
    path: str  # file relative to the repository
    right: str  # text that occurs exactly once in the file
    wrong: str  # text that replaces `right`
    only: str = ""  # text in the names of the test files that run; "": all files of the area

    @property
    def name(self) -> str:
        return f"{self.path}: {' '.join(self.right.split())[:48]} → {' '.join(self.wrong.split())[:48]}"


def of(area: str, path: str, *changes: tuple[str, str], only: str = "") -> tuple[Fault, ...]:
    return tuple(Fault(area, path, right, wrong, only) for right, wrong in changes)
