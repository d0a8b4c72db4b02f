"""Cost of deterministic mode on a GPU: python -m tests.benchmarks.gpu.deterministic."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.benchmarks.gpu.batches import journal_timing, timed
from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.decoding import Decoding, output_of
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import Wanted, serving_of
from tests.benchmarks.gpu.workloads import fixed

HOW = (
    "All requests are submitted at the start; random ids, greedy, end of sequence ignored. Wall time from the first submit to the"
    " last token on the host, median of the rounds. Each mode has its own executor, one after the other. Cost: seconds with the"
    " mode divided by seconds without. The profile shows decode steps with the mode."
)
MODEL = "qwen3-0.6b"
LOADS = ((1, 256, 64), (8, 256, 64), (32, 256, 64), (1, 4032, 64))  # requests, tokens in, tokens out
TOYS = ((1, 12, 6), (2, 12, 6), (3, 12, 6), (1, 24, 6))  # toy sizes of each load
ROUNDS = 5
PROFILED_STEPS = 20


def measure(setting: Setting, journal: Journal) -> None:
    loads = TOYS if setting.toy else LOADS
    found: dict[bool, list[float]] = {}
    rows, prompt_len = max(load[0] for load in loads), loads[0][1]
    context = max(*(sum(load[1:]) for load in loads), prompt_len + output_of(rows, PROFILED_STEPS + 4))
    for mode in (False, True):
        name = "on" if mode else "off"
        found[mode] = []
        with serving_of(Wanted(MODEL, rows, context, deterministic=mode), setting) as model:
            for load in loads:
                warm, workload = (fixed(*load, model.vocab, seed=seed) for seed in (1, 0))
                timings = sorted((timed(model, warm, workload) for _ in range(ROUNDS)), key=lambda timing: timing.seconds)
                found[mode].append(timings[ROUNDS // 2].seconds)
                words = f"{load[0]} × {load[1]}/{load[2]}"
                journal_timing(journal, f"deterministic mode {name}", words, workload, timings[ROUNDS // 2])
            if mode:
                decoding = Decoding(model.serving, rows, prompt_len, PROFILED_STEPS + 4, model.vocab)
                decoding.journal_profile(journal, MODEL, PROFILED_STEPS, setting.on_gpu)
                decoding.close()
    for (count, prompt_len, new_tokens), on, off in zip(LOADS, found[True], found[False], strict=True):
        columns = ("workload", "on, s", "off, s", "on / off")
        journal.row("deterministic mode", columns, (f"{count} × {prompt_len}/{new_tokens}", on, off, on / off))
        journal.figure(f"{MODEL}.cost_{count}x{prompt_len}", on / off, "×")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
