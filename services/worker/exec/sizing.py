"""How many pages of KV a device holds: measured by running the largest step and capturing graphs over a pool of one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.exec.activation_peak import profile_peak
from services.worker.exec.attention.backend import AttentionBatch
from services.worker.exec.memory_budget import DeviceMemoryUse, describe, kv_pool_bytes, kv_pool_pages
from services.worker.exec.memory_parts import return_memory
from services.worker.exec.pools import layer_kv
from services.worker.exec.pools.layer_kv import LayerKV
from services.worker.exec.step.forward_batch import NOBODY, DeviceColumns, StepColumns
from services.worker.exec.step.model_runner import DeviceRunner

RESERVE = 512 << 20  # bytes of the device that stay free: libraries take some at times of their own choosing


@dataclass(frozen=True, slots=True)
class PoolNeeds:
    """Of one executor. weight_bytes: resident; fixed_bytes: of the buffers that are kept from step to step."""

    layers: Sequence[LayerKV]
    dtype: torch.dtype
    page_size: int
    context_len: int
    weight_bytes: int
    fixed_bytes: int

    @property
    def page_bytes(self) -> int:
        return layer_kv.bytes_per_token(self.layers, self.dtype) * self.page_size


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Of one step: tokens, sampled rows, tokens of one row. generates: there is a vocabulary to sample from."""

    max_tokens: int
    max_slots: int
    context_len: int
    generates: bool


def largest_step(runner: DeviceRunner, bounds: StepBounds) -> None:
    """A prompt of max_tokens, or as many as that takes, and max_slots tokens sampled behind it; over page 0 alone."""
    max_tokens, max_slots = bounds.max_tokens, bounds.max_slots
    passes, streams = runner.passes, runner.streams
    count = min(max_tokens, bounds.context_len)
    rows = -(-max_tokens // count)
    counts = np.full(rows, count, dtype=np.int32)
    counts[-1] = max_tokens - count * (rows - 1)
    nobody, zeros = np.full(max_slots, NOBODY, dtype=np.int32), np.zeros(max_slots, dtype=np.int32)
    slots = np.arange(rows, dtype=np.int32) % len(passes.table)
    offsets = (np.arange(rows) * count).astype(np.int32)
    starts = np.zeros(rows, dtype=np.int32)
    columns = StepColumns(rows, slots, starts, counts, offsets, np.arange(0), nobody, zeros, zeros, count, count)
    with streams.on_forward():
        passes.table.fill_(0)
        device = DeviceColumns.of(torch.from_numpy(columns.words()).to(passes.device), rows)
        ids, ragged = passes.fresh_rows(columns, device)
        given = torch.zeros(columns.total, dtype=torch.int32, device=passes.device)
        runner.attention.plan(AttentionBatch(columns.starts, columns.num_tokens, rows, ragged))
        passes.run(ids, ragged, columns, given)
        if bounds.generates:
            logits = passes.model.logits(device.sample_indices.long())
            runner.sampler.run_kernels(logits, runner.sampler.passing_space(device.sample_slots, device.sample_positions))
        else:
            passes.model.states(device.sample_indices.long())
        passes.table.fill_(-1)


def pages_of_device(
    runner: DeviceRunner,
    needs: PoolNeeds,
    mem_fraction_static: float,
    largest: Callable[[], None],
    graph_bytes: Callable[[], int],
    progress: Callable[[str], None],
) -> int:
    """The runner holds a pool of one page. Raises PoolTooSmall."""
    device = runner.streams.device
    peak = profile_peak(largest, device)
    return_memory(device)
    graphs = graph_bytes()
    return_memory(device)
    free, total = torch.cuda.mem_get_info(device)
    use = DeviceMemoryUse(
        total=total,
        free_now=free,
        weights=needs.weight_bytes,
        activation_peak=peak,
        graphs=graphs,
        workspace=needs.fixed_bytes,
        held_now=("weights", "workspace"),
    )
    pages = kv_pool_pages(use, mem_fraction_static, RESERVE, needs.page_bytes, needs.page_size, needs.context_len)
    progress(f"memory: {describe(use, mem_fraction_static, RESERVE, kv_pool_bytes(use, mem_fraction_static, RESERVE))}")
    return pages
