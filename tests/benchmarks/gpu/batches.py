"""Runs a whole workload after a warm-up and journals its times."""

from __future__ import annotations

from dataclasses import replace

from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import Model
from tests.benchmarks.gpu.serving import Timing
from tests.benchmarks.gpu.workloads import Workload

COLUMNS = ("workload", "seconds", "output tok/s", "total tok/s", "steps", "median ms between steps")
WARM_TOKENS = 16  # largest number of output tokens of a request in the warm-up


def timed(model: Model, warm: Workload, workload: Workload) -> Timing:
    """Runs `warm` with short outputs, then measures `workload`. Their token ids must differ, so that they share no prefix."""
    short = replace(warm, new_tokens=tuple(min(count, WARM_TOKENS) for count in warm.new_tokens))
    model.serving.run(short)
    model.serving.forget()
    timing = model.serving.run(workload)
    model.serving.forget()
    return timing


def journal_timing(journal: Journal, title: str, name: str, workload: Workload, timing: Timing) -> None:
    total = (workload.input_tokens + workload.output_tokens) / timing.seconds
    journal.row(title, COLUMNS, (name, timing.seconds, timing.tokens_per_s, total, timing.steps, timing.step_s() * 1e3))
