"""SGLang's metrics and what says the same here, read from the table beside this file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, slots=True)
class Counterpart:
    """theirs, ours: names of series, of a histogram without its endings. ours: "" where there is none, for the reason `why`."""

    theirs: str
    ours: str
    why: str = ""


def counterparts() -> list[Counterpart]:
    """By their name."""
    table = tomllib.loads(TABLE.read_text())
    rows = [Counterpart(name, name) for name in table["same"]]
    rows += [Counterpart(name, ours) for name, ours in table["named"].items()]
    rows += [Counterpart(name, "", group["why"]) for group in table["absent"] for name in group["names"]]
    return sorted(rows, key=lambda row: row.theirs)


def section() -> str:
    """Of docs/reference/metrics.md."""
    lines = ["| SGLang | here |", "| --- | --- |"]
    for row in counterparts():
        ours = "the same" if row.ours == row.theirs else f"`{row.ours}`" if row.ours else f"– {row.why}"
        lines.append(f"| `{row.theirs}` | {ours} |")
    return "\n".join(lines) + "\n"
