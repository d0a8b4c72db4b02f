"""Decoding speed of a single request against the memory bandwidth: python -m tests.benchmarks.gpu.single_stream."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.benchmarks.gpu.ceilings import Bandwidth, bandwidth
from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.decoding import Decoding, output_of
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import Wanted, serving_of

HOW = (
    "One request decodes greedily with a short context. The time per token is the median time between two tokens on the host."
    " GB per token are the weights that a step reads, without keys and values. The measured bandwidth is the larger one of copy"
    " and sum in this run (see tests.benchmarks.gpu.ceilings)."
)
MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-14b")
COLUMNS = ("model", "ms per token", "tokens/s", "GB per token", "GB/s", "share of measured bandwidth")
PROFILED_STEPS = 20  # steps that are profiled after the measured steps


def measure(setting: Setting, journal: Journal) -> None:
    limit = bandwidth(setting)
    journal.note(f"Measured bandwidth: copy {limit.copy / 1e9:.0f} GB/s, read {limit.read / 1e9:.0f} GB/s.")
    for name in MODELS[:1] if setting.toy else MODELS:
        with journal.apart(name):
            _measure_one(name, limit, setting, journal)


def _measure_one(name: str, limit: Bandwidth, setting: Setting, journal: Journal) -> None:
    prompt_len, steps = (8, 6) if setting.toy else (128, 256)
    turns = steps + PROFILED_STEPS + 4  # a few spare steps, so that the request does not end before the profile
    with serving_of(Wanted(name, 1, prompt_len + output_of(1, turns)), setting) as model:
        decoding = Decoding(model.serving, 1, prompt_len, turns, model.vocab)
        median, _ = decoding.step_s(steps)
        rate = model.read_bytes / median
        share = rate / limit.best
        journal.row("single stream", COLUMNS, (name, median * 1e3, 1 / median, model.read_bytes / 1e9, rate / 1e9, share))
        journal.figure(f"{name}.tokens_per_s", 1 / median, "tok/s")
        journal.figure(f"{name}.bandwidth_share", share)
        decoding.journal_profile(journal, name, PROFILED_STEPS, setting.on_gpu)
        decoding.close()


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
