"""Launches steps without requests: to measure memory, to compile kernels and to time decode steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.sample_ops import NO_SLOT
from rootstock_llm.services.worker.exec.attention.backend import AttentionBackend, AttentionBatch
from rootstock_llm.services.worker.exec.contracts.step_data import ForwardBatch, SampleBatch
from rootstock_llm.services.worker.exec.contracts.step_parts import StepSampler
from rootstock_llm.services.worker.exec.step.passes import ForwardPass
from rootstock_llm.services.worker.exec.streams.cuda_streams import Streams


class StepLauncher(Protocol):
    """The attributes of a DeviceRunner that an idle step uses."""

    streams: Streams
    passes: ForwardPass
    attention: AttentionBackend
    sampler: StepSampler


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The limits of all steps."""

    max_tokens: int  # largest number of tokens of one step
    max_slots: int  # largest number of sampled rows of one step without draft tokens
    context_len: int  # largest number of tokens of one row
    generates: bool  # whether the model has a vocabulary projection


def largest_step(runner: StepLauncher, bounds: StepBounds, start: int = 0) -> None:
    """Launches a step with max_tokens prompt tokens and max_slots sampled rows.

    The prompt tokens form one row, or several rows if they exceed context_len. All rows use page 0, and none reads or writes a
    state. Afterwards, the page tables are empty.

    Args:
        start: position of each row's first token, below context_len.
    """
    max_tokens, max_slots = bounds.max_tokens, bounds.max_slots
    passes, streams = runner.passes, runner.streams
    count = min(max_tokens, bounds.context_len - start)
    rows = -(-max_tokens // count)
    counts = np.full(rows, count, dtype=np.int32)
    counts[-1] = max_tokens - count * (rows - 1)
    nobody, zeros = np.full(max_slots, NO_SLOT, dtype=np.int32), np.zeros(max_slots, dtype=np.int32)
    assert counts.min() > 0 and int(counts.sum()) == max_tokens, "the rows together have max_tokens tokens"
    slots = np.arange(rows, dtype=np.int32) % len(passes.table)
    offsets = (np.arange(rows) * count).astype(np.int32)
    starts = np.full(rows, start, dtype=np.int32)
    columns = ForwardBatch(rows, slots, starts, counts, offsets, np.arange(0), nobody, zeros, zeros, start + count, count)
    with streams.on_forward():
        tables = [table for table in (passes.table, passes.window_table) if table is not None]
        for table in tables:
            table.fill_(0)
        words = torch.from_numpy(columns.words()).to(passes.device)
        ids, ragged = passes.fresh_rows(columns, words)
        extend_ids = torch.zeros(columns.total, dtype=torch.int32, device=passes.device)
        runner.attention.plan(AttentionBatch(columns.starts, columns.num_tokens, rows, ragged))
        passes.run(ids, ragged, columns, extend_ids)
        sample_slots, positions, indices = columns.sample_columns(words)
        if bounds.generates:
            logits = passes.model.logits(indices.long())
            runner.sampler.run_kernels(SampleBatch.idle(logits, runner.sampler.step_inputs(sample_slots, positions)))
        else:
            passes.model.states(indices.long())
        for table in tables:
            table.fill_(-1)


def idle_decode(runner: StepLauncher, rows: int, words: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Launches the forward pass of a decode step that has only padding rows, without a graph.

    Args:
        words: the columns of the step on the device, ForwardBatch.idle(...).words(). None: they are copied from unpinned memory,
            so that the call waits for the device.

    Returns:
        Slots and positions of the sampled tokens, int32[rows] each.
    """
    passes, columns = runner.passes, ForwardBatch.idle(runner.passes.capacity, rows)
    if words is None:
        words = torch.from_numpy(columns.words()).to(passes.device)
    ids, ragged = passes.fresh_rows(columns, words)
    runner.attention.plan(AttentionBatch(columns.starts, columns.num_tokens, 0, ragged))
    passes.run(ids, ragged, columns, None)
    slots, positions, _ = columns.sample_columns(words)
    return slots, positions
