"""Launches one of every kind of step before there are requests, so that kernels are compiled and libraries have chosen theirs."""

from __future__ import annotations

from dataclasses import replace

import torch

from services.shared.limits import MAX_TOP_LOGPROBS
from services.worker.exec.attention.backend import AttentionBatch
from services.worker.exec.device.runner import DeviceRunner
from services.worker.exec.device.sizing import StepBounds, largest_step
from services.worker.exec.device.step_columns import DeviceColumns, StepColumns

PROMPTS = (1, 20, 100, 1000)  # tokens: kernels are chosen by how many there are
DECODES = (1, 40)  # rows of steps that no graph holds


def warm_up(runner: DeviceRunner, bounds: StepBounds) -> None:
    """On the forward stream. Leaves the page table empty and the pool's first pages undefined."""
    for tokens in PROMPTS:
        some = replace(bounds, max_tokens=min(tokens, bounds.max_tokens), max_slots=min(tokens, bounds.max_slots))
        largest_step(runner, some)
    for rows in DECODES:
        _decode(runner, min(rows, bounds.max_slots))
    if bounds.generates:
        _logprobs(runner)


def _decode(runner: DeviceRunner, rows: int) -> None:
    passes, columns = runner.passes, StepColumns.idle(runner.passes.capacity, rows)
    device = DeviceColumns.of(torch.from_numpy(columns.words()).to(passes.device), rows)
    ids, ragged = passes.fresh_rows(columns, device)
    runner.attention.plan(AttentionBatch(columns.starts, columns.num_tokens, 0, ragged))
    passes.run(ids, ragged, columns, given=None)


def _logprobs(runner: DeviceRunner) -> None:
    logits = runner.passes.all_logits(1)
    rows = torch.zeros(1, dtype=torch.int32, device=runner.passes.device)
    for num_top in (0, MAX_TOP_LOGPROBS):
        runner.sampler.wishes.measure(logits, rows, rows, num_top)
