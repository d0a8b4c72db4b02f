"""Time of decode steps with and without the overlap of host and device work: python -m tests.benchmarks.gpu.overlap."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import Wanted
from tests.benchmarks.gpu.variants import COLUMNS, measure_variant

HOW = (
    "Greedy decode steps with the number of rows in the first column, from a context of 256 tokens on. Median and mean wall time"
    " between the tokens of two steps on the host. Each variant has its own executor, one after the other. Speedup: mean step"
    " without overlap / mean step with it, at 64 rows."
)
MODEL = "qwen3-0.6b"
ROWS = (1, 8, 64, 256)


def measure(setting: Setting, journal: Journal) -> None:
    rows = (1, 2) if setting.toy else ROWS
    found = {}
    for overlap in (True, False):
        name = "on" if overlap else "off"
        found[overlap] = measure_variant(Wanted(MODEL, max(rows), 0, overlap=overlap), name, rows, setting, journal)
    for count in rows:
        journal.row(
            "overlap",
            COLUMNS,
            (count, found[True][count] * 1e3, found[False][count] * 1e3, found[False][count] / found[True][count]),
        )
    judged = 64 if 64 in rows else rows[-1]
    journal.figure(f"{MODEL}.speedup", found[False][judged] / found[True][judged], "×")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
