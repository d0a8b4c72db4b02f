"""Time of decode steps with and without CUDA graphs: python -m tests.benchmarks.gpu.graphs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import Wanted
from tests.benchmarks.gpu.variants import COLUMNS, measure_variant

HOW = (
    "Greedy decode steps with the number of rows in the first column, from a context of 256 tokens on, with overlap. Median and"
    " mean wall time between the tokens of two steps on the host. Each variant has its own executor, one after the other."
)
MODEL = "qwen3-0.6b"
ROWS = (1, 8, 64, 256)


def measure(setting: Setting, journal: Journal) -> None:
    rows = (1, 2) if setting.toy else ROWS
    found = {}
    for graphs in (True, False):
        name = "on" if graphs else "off"
        found[graphs] = measure_variant(Wanted(MODEL, max(rows), 0, cuda_graphs=graphs), name, rows, setting, journal)
    for count in rows:
        on, off = found[True][count], found[False][count]
        journal.row("CUDA graphs", COLUMNS, (count, on * 1e3, off * 1e3, off / on))
        journal.figure(f"{MODEL}.speedup_{count}_rows", off / on, "×")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
