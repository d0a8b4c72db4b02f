"""Measures decode steps with and without a feature, such as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.benchmarks.gpu.command import Setting
from tests.benchmarks.gpu.decoding import Decoding, output_of
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import Wanted, serving_of

COLUMNS = ("rows", "on, ms per step", "off, ms per step", "off / on")
PROFILED_STEPS = 20


def measure_variant(wanted: Wanted, name: str, rows: Sequence[int], setting: Setting, journal: Journal) -> dict[int, float]:
    """Measures one variant, and stores a profile in the journal under `name`.

    The profile has decode steps with that number in `rows` which is nearest to 64.

    Returns:
        Mean seconds of a decode step by number of rows.
    """
    prompt_len, steps = (8, 4) if setting.toy else (256, 200)
    turns = steps + PROFILED_STEPS + 4
    context = prompt_len + output_of(max(rows), turns)
    found = {}
    with serving_of(replace(wanted, context=context), setting) as model:
        for count in rows:
            decoding = Decoding(model.serving, count, prompt_len, turns, model.vocab)
            median, mean = decoding.step_s(steps)
            journal.row(f"{name}: decode steps", ("rows", "median ms", "mean ms"), (count, median * 1e3, mean * 1e3))
            found[count] = mean
            if count == min(rows, key=lambda value: abs(value - 64)):
                decoding.journal_profile(journal, name, PROFILED_STEPS, setting.on_gpu)
            decoding.close()
    return found
