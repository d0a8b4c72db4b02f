"""A small fault, to be put in alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """right: text that is in the file once; wrong: what takes its place. only: the one of its area's files that is about it."""

    area: str
    path: str
    right: str
    wrong: str
    only: str = ""

    @property
    def name(self) -> str:
        return f"{self.path}: {' '.join(self.right.split())[:48]} → {' '.join(self.wrong.split())[:48]}"


def of(area: str, path: str, *changes: tuple[str, str], only: str = "") -> tuple[Fault, ...]:
    return tuple(Fault(area, path, right, wrong, only) for right, wrong in changes)
