"""Reads the tables of types in docs/design/life-of-a-request.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/design/life-of-a-request.md"
CODE = re.compile(r"`([^`]+)`")
TOP = ("services/", "kernels/")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: types and the files that define them."""

    section: str  # heading above the table
    types: tuple[str, ...]  # class names without a leading underscore
    files: tuple[Path, ...]  # relative to the root of the repository; the page itself shortens the gateway's paths


def rows() -> list[Row]:
    section, found = "", []
    for line in PAGE.read_text().partition("## Types")[2].splitlines():
        if line.startswith("### "):
            section = line.removeprefix("### ")
        elif line.startswith("| `"):
            types, files, *_ = line.strip("| ").split(" | ")
            found.append(Row(section, tuple(CODE.findall(types)), tuple(_path(section, each) for each in CODE.findall(files))))
    return found


def _path(section: str, written: str) -> Path:
    return Path(written if written.startswith(TOP) or section != "Gateway" else f"services/gateway/{written}")
