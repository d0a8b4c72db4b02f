"""Busy and idle time of the device while a batch decodes: python -m tests.benchmarks.gpu.timeline."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.decoding import Decoding, journal_profile, output_of
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import Wanted, serving_of
from tests.benchmarks.gpu.profile import Profile

HOW = (
    "50 decode steps under torch's profiler, greedy, with overlap and graphs. Idle: share of the time from the first to the last"
    " event in which the device runs nothing, either between two launches or inside the replay of a graph. Idle without the"
    " profiler: 1 minus the busy time of a step divided by its mean wall time over 200 steps that are not profiled."
)
MODELS = ("qwen3-0.6b", "qwen3-8b")
COLUMNS = (
    "model",
    "rows",
    "ms per step",
    "busy ms per step",
    "idle between launches",
    "idle inside graphs",
    "launches per step",
    "longest gap µs",
    "idle without the profiler",
)


def measure(setting: Setting, journal: Journal) -> None:
    for name in MODELS[:1] if setting.toy else MODELS:
        with journal.apart(name):
            _measure_one(name, setting, journal)


def _measure_one(name: str, setting: Setting, journal: Journal) -> None:
    rows, prompt_len, steps, profiled = (2, 8, 4, 3) if setting.toy else (64, 512, 200, 50)
    turns = steps + profiled + 4  # step_s() runs steps + 1; three spare steps, so that no row ends during the measurement
    with serving_of(Wanted(name, rows, prompt_len + output_of(rows, turns)), setting) as model:
        decoding = Decoding(model.serving, rows, prompt_len, turns, model.vocab)
        _, mean = decoding.step_s(steps)
        profile = decoding.profile(profiled, setting.on_gpu, journal.beside(f"{name}.trace.json.gz"))
        decoding.close()
    journal.row("time line of decode steps", COLUMNS, _row(name, rows, mean, profiled, profile))
    journal.figure(f"{name}.idle_share", profile.idle_share)
    journal.figure(f"{name}.idle_in_graphs_share", profile.idle_in_graphs_share)
    journal.figure(f"{name}.step_ms", mean * 1e3, "ms")
    journal_profile(journal, name, profile)


def _row(name: str, rows: int, mean_s: float, steps: int, profile: Profile) -> tuple[object, ...]:
    busy_s = profile.busy_us / 1e6 / steps
    return (
        name,
        rows,
        mean_s * 1e3,
        busy_s * 1e3,
        f"{profile.idle_share:.1%}",
        f"{profile.idle_in_graphs_share:.1%}",
        profile.launches / steps,
        profile.gaps_us[0] if profile.gaps_us else 0.0,
        f"{1 - busy_s / mean_s:.1%}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
