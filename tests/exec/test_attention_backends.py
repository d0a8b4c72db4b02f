"""Our attention backends compute the reference's results for mixed batches and graphs over several steps."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the import of triton, which reads it

from rootstock_llm.kernels.contracts.ops import RaggedRows, ScoreRule
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.triton.attention.attention_plan import (
    DECODE_BLOCKS,
    HeadShape,
    plan_decode,
    plan_extend,
    plan_fixed,
    scratch_bounds,
)
from rootstock_llm.services.worker.exec.attention import triton_backend
from rootstock_llm.services.worker.exec.attention.backend import AttentionBackend, AttentionBatch, AttentionShape, KernelAttention
from rootstock_llm.services.worker.exec.attention.triton_backend import TritonAttention
from tests.all_pairs import each_pair

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, PAGE_SIZE, SLOTS, WIDTH = 4, 2, 16, 24, 4, 8, 160
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = AttentionShape(
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    value_dim=VALUE_DIM,
    page_size=PAGE_SIZE,
    windows=(0, 9),
    max_rows=SLOTS,
    max_tokens=64,
    max_context=WIDTH * PAGE_SIZE,
    max_pages=SLOTS * WIDTH,
    has_softcap=True,
    has_sinks=True,
)
BACKENDS = {"triton": TritonAttention, "torch": lambda *_: KernelAttention(reference)}


class Model:
    """KV pools of one layer, filled at random, and the page tables of all slots."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        made = torch.Generator().manual_seed(0)
        shape = (SLOTS * WIDTH, KV_HEADS, PAGE_SIZE)
        self.device, self.made, self.dtype = device, made, dtype
        self.keys, self.values = (torch.randn((*shape, size), generator=made).to(device, dtype) for size in (HEAD_DIM, VALUE_DIM))
        self.sinks = torch.randn(HEADS, generator=made).to(device) * 3
        self.table = torch.randperm(SLOTS * WIDTH, generator=made).view(SLOTS, WIDTH).int().to(device)

    def batch(self, slots: list[int], starts: list[int], counts: list[int], num_extend: int, graph: int = 0) -> AttentionBatch:
        column = lambda values: torch.tensor(values, dtype=torch.int32, device=self.device)  # noqa: E731
        offsets = np.cumsum([0, *counts])[:-1].tolist()
        rows = RaggedRows(
            page_table=self.table,
            slots=column(slots),
            starts=column(starts),
            num_tokens=column(counts),
            offsets=column(offsets),
            positions=column([0] * sum(counts)),
            locations=torch.zeros(sum(counts), dtype=torch.int64, device=self.device),
            max_context=max(start + count for start, count in zip(starts, counts, strict=True)),
        )
        return AttentionBatch(np.array(starts, np.int32), np.array(counts, np.int32), num_extend, rows, graph)

    def queries(self, batch: AttentionBatch) -> Tensor:
        tokens = int(batch.num_tokens.sum())
        qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=self.made)
        return qkv.to(self.device, self.dtype)

    def rule(self, window: int) -> ScoreRule:
        """Returns a rule with a cap and sinks, or with neither of them if there is no window."""
        return ScoreRule(HEAD_DIM**-0.5, window, 2.0, self.sinks) if window else ScoreRule(HEAD_DIM**-0.5)

    def attended(self, backend: AttentionBackend, batch: AttentionBatch, qkv: Tensor, window: int) -> Tensor:
        out = torch.full((len(qkv), HEADS * VALUE_DIM), torch.nan, device=self.device, dtype=self.dtype)
        backend.attend(out, qkv, self.keys, self.values, batch.rows, self.rule(window))
        return out

    def expected(self, batch: AttentionBatch, qkv: Tensor, window: int) -> Tensor:
        out = torch.empty(len(qkv), HEADS * VALUE_DIM, device=self.device)
        pools = self.keys.float(), self.values.float()
        reference.paged_attention(out, qkv.float(), *pools, batch.rows, self.rule(window))
        return out


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


STEPS = {
    "extends": ([1, 3, 4], [0, 8, 3], [5, 20, 1], 3),
    "decodes": ([2, 5, 0], [0, 17, 300], [1, 1, 1], 0),
    "mixed": ([6, 1, 3, 2], [4, 0, 12, 270], [7, 3, 1, 1], 2),
    "one-token-extend-beside-decodes": ([7, 1, 3], [40, 12, 2], [1, 1, 1], 1),
}


@pytest.mark.by_day(one_in=2, seed=7)
@pytest.mark.parametrize(
    ("dtype", "steps"),
    [(torch.float32, [*STEPS, "extends"]), (torch.bfloat16, ["mixed"])],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("name", list(BACKENDS))
def test_back_end_equals_the_reference_for_every_kind_of_step(name: str, dtype: torch.dtype, steps: list[str]) -> None:
    """The same back end runs all steps, with and without a window, so that leftover state of an earlier step is found."""
    model, backend = Model(DEVICE, dtype), BACKENDS[name](SHAPE, DEVICE)
    for step in (STEPS[step] for step in steps):
        batch = model.batch(*step)
        qkv = model.queries(batch)
        backend.plan(batch)
        for window in SHAPE.windows:
            assert_close(model.attended(backend, batch, qkv, window), model.expected(batch, qkv, window), dtype)


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("window", SHAPE.windows)
def test_captured_graph_reads_the_lengths_of_rows_from_device_memory(window: int) -> None:
    """Launches that were captured for one step compute later steps with the same addresses. Padding rows have no effect."""
    model, backend = Model(DEVICE), TritonAttention(SHAPE, DEVICE)
    batch = model.batch([0, -1, -1, -1], [0] * 4, [1] * 4, 0, graph=4)
    qkv = model.queries(batch)
    out = torch.full((4, HEADS * VALUE_DIM), torch.nan, device=DEVICE)
    backend.plan(batch)

    def attend() -> None:
        backend.attend(out, qkv, model.keys, model.values, batch.rows, model.rule(window))

    replay = _captured(attend) if DEVICE.type == "cuda" else attend
    for slots, starts in [([2, 5, -1, -1], [3, 600, 0, 0]), ([1, 0, 7, 4], [255, 0, 639, 31]), ([3, -1, -1, -1], [511, 0, 0, 0])]:
        batch.rows.slots.copy_(torch.tensor(slots))
        batch.rows.starts.copy_(torch.tensor(starts))
        qkv.copy_(model.queries(batch))
        replay()
        live = [row for row, slot in enumerate(slots) if slot >= 0]
        assert_close(out[live], model.expected(batch, qkv, window)[live])
        assert not out.isnan().any()
    backend.release_graphs()


def _captured(work):  # type: ignore[no-untyped-def]
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def test_graph_is_planned_for_the_longest_context() -> None:
    model, backend = Model(DEVICE), TritonAttention(SHAPE, DEVICE)
    batch = model.batch([0], [0], [1], 0, graph=1)
    backend.plan(batch)
    model.attended(backend, batch, model.queries(batch), 0)
    model.attended(backend, batch, model.queries(batch), 9)
    ((whole,), (windowed,)) = backend._launches[4, 0], backend._launches[4, 9]
    assert whole.splits == 3, "640 positions must have splits of 256, 256 and 128 positions"
    assert windowed.splits == 1


def test_only_the_triton_back_end_can_be_captured_in_a_graph() -> None:
    assert TritonAttention.captures and not KernelAttention.captures
    batch = Model(DEVICE).batch([0], [0], [1], 0, graph=1)
    with pytest.raises(ValueError, match="captured"):
        KernelAttention(reference).plan(batch)


@pytest.mark.by_day(one_in=5, seed=35)
@each_pair(shape=[(8, 4, 128), (8, 2, 128), (1, 71, 64), (1, 128, 576), (40, 1, 256)], itemsize=[2, 4], multiprocessors=[16, 132])
def test_bounds_of_the_scratch_memory_are_large_enough_for_every_plan(
    shape: tuple[int, int, int], itemsize: int, multiprocessors: int
) -> None:
    """`shape` is (KV heads, query heads per KV head, head size)."""
    kv_heads, group, head_dim = shape
    heads = HeadShape(kv_heads, group, head_dim, head_dim, itemsize)
    lanes, counters = scratch_bounds(heads, multiprocessors)
    plans = [plan_decode(heads, 0, rows, 1 << 17, multiprocessors) for rows in range(1, 400)]
    plans += [plan_extend(heads, 1 + tokens // 50, tokens, 1 << 17, multiprocessors) for tokens in range(1, 4000, 7)]
    assert max(plan.splits for plan in plans) > 1 and max(plan.extra for plan in plans) > 1
    for plan in plans:
        assert plan.scratch_lanes <= lanes and plan.counters <= counters


def test_every_tile_fits_into_shared_memory() -> None:
    """The keys and values of all pipeline stages must fit into the 227 KiB of a Hopper multiprocessor."""
    for (size, itemsize), blocks in DECODE_BLOCKS.items():
        assert blocks.num_stages * blocks.n * size * 2 * itemsize <= 227 * 1024


@pytest.mark.parametrize("group", [1, 4, 16, 40, 71])
def test_tiles_of_256_columns_fit_into_99_kib_when_a_program_has_no_more_shared_memory(group: int) -> None:
    """The queries, the stages of keys and values in flight, and the weights must fit. sm_86 and sm_89 have 99 KiB (L4, L40S)."""
    columns, itemsize = 256, 2
    heads = HeadShape(4, group, columns, columns, itemsize, shared_memory=99 * 1024)
    plans = [plan_decode(heads, 0, rows, 16384, 58) for rows in (1, 8)]
    for tokens in (64, 8192):
        plans += [plan_extend(heads, 1, tokens, 16384, 58), plan_fixed(heads, 1, tokens, 16384, 512, 58)]
    for blocks in {plan.blocks for plan in plans}:
        elements = blocks.m * columns + (blocks.num_stages - 1) * 2 * blocks.n * columns + blocks.m * blocks.n
        assert elements * itemsize <= 99 * 1024


def test_triton_back_end_plans_for_the_shared_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(triton_backend, "shared_memory_of", lambda _: 99 * 1024)
    monkeypatch.setattr(triton_backend, "run_attention", lambda call, shape, launch, scratch: launched.append(launch.blocks))
    backend, model = TritonAttention(replace(SHAPE, head_dim=256, value_dim=256), DEVICE), Model(DEVICE, torch.bfloat16)
    for step in STEPS.values():
        batch = model.batch(*step)
        backend.plan(batch)
        pool = torch.empty(1, KV_HEADS, PAGE_SIZE, 256, dtype=torch.bfloat16, device=DEVICE)
        q, out = torch.empty(2, int(batch.num_tokens.sum()), HEADS * 256, dtype=torch.bfloat16, device=DEVICE)
        backend.attend(out, q, pool, pool, batch.rows, ScoreRule(1.0))
    assert launched and {blocks.num_stages for blocks in launched} == {2}
