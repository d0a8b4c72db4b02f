"""The FlashInfer backend compared with reference attention: with flashinfer_double.py, and on a GPU with FlashInfer itself."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rootstock_llm.kernels.contracts.ops import RaggedRows, ScoreRule
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.core.contracts.pool_sizes import PoolSizes
from rootstock_llm.services.worker.exec.attention import flashinfer_limits as limits
from rootstock_llm.services.worker.exec.attention.backend import AttentionBatch, AttentionShape
from rootstock_llm.services.worker.exec.attention.flashinfer_backend import FlashInferAttention
from rootstock_llm.services.worker.exec.attention.flashinfer_prebuild import missing, needed_modules
from rootstock_llm.services.worker.exec.attention.flashinfer_staging import SLOTS, StagingRing, StagingSlot, fill, make_slot
from rootstock_llm.services.worker.exec.loading import load_model
from rootstock_llm.services.worker.exec.models.decoder import Decoder
from rootstock_llm.services.worker.exec.pools.kv_pool import LayerKV, allocate
from tests.all_pairs import each_value
from tests.exec.flashinfer_double import HostWaits, Library
from tests.exec.flashinfer_schedules import decode_bytes, fa2_bytes, fa3_bytes
from tests.exec.host_executors import load_request
from tests.exec.tiny_models import MODELS

REAL = torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is not None
# Machines of GPU checks have compiled modules for these values. Tests with other values need a library that may compile.
HEAD_DIM, DTYPE = (128, torch.bfloat16) if REAL else (64, torch.float16)
SHAPE = AttentionShape(8, 2, HEAD_DIM, HEAD_DIM, 16, (0,), max_rows=12, max_tokens=96, max_context=200, max_pages=400)
PAIRED = replace(SHAPE, num_heads=4)  # two query heads per key/value head, so decode kernels do not use tensor cores
Lengths = list[tuple[int, int]]  # per row: (number of earlier tokens, number of computed tokens)
MIXED: Lengths = [(0, 7), (33, 17), (16, 16), (5, 1), (79, 1), (15, 1)]
DECODE: Lengths = [(0, 1), (15, 1), (16, 1), (97, 1), (150, 1)]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """A GPU if the real library is tested, the CPU for the double."""
    is_real = hasattr(request.node, "callspec") and request.node.callspec.params.get("module") == "flashinfer"
    return torch.device("cuda", 0) if is_real else torch.device("cpu")


@pytest.fixture
def double(device: torch.device) -> Iterator[Library]:
    library = Library(device)
    with library.ledger:
        yield library


@pytest.fixture(params=["double", "flashinfer"] if REAL else ["double"])
def module(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("double") if request.param == "double" else importlib.import_module("flashinfer")


@dataclass
class Bench:
    """Random KV pools, and a page table with random, distinct pages in all rows."""

    shape: AttentionShape
    device: torch.device
    dtype: torch.dtype = DTYPE

    def __post_init__(self) -> None:
        shape, generator = self.shape, torch.Generator().manual_seed(3)
        per_row = -(-shape.max_context // shape.page_size)
        slots = shape.max_rows + 2
        pages = torch.randperm(slots * per_row, generator=generator).to(torch.int32) + 1
        self.table = pages.view(slots, per_row).to(self.device)
        self.window_table = self.table.flip(0, 1) if shape.separate_windows else None
        pool = (slots * per_row + 1, shape.num_kv_heads, shape.page_size, shape.head_dim)
        self.k, self.v = (torch.randn(pool, generator=generator).to(self.device, self.dtype) for _ in range(2))
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.all_qkv = torch.randn((shape.max_tokens, width), generator=generator).to(self.device, self.dtype)

    def rows(self, lengths: Lengths, padding: int = 0) -> RaggedRows:
        starts = [start for start, _ in lengths] + [0] * padding
        counts = [count for _, count in lengths] + [1] * padding
        slots = [1 + index for index in range(len(lengths))] + [-1] * padding
        offsets = np.cumsum([0, *counts[:-1]])
        columns = (
            torch.tensor(np.asarray(column), dtype=torch.int32, device=self.device) for column in (slots, starts, counts, offsets)
        )
        positions = [start + step for start, count in lengths for step in range(count)] + [0] * padding
        unused = torch.tensor(positions, dtype=torch.int32, device=self.device)
        longest = max(s + c for s, c in zip(starts, counts, strict=True))
        rows = RaggedRows(self.table, *columns, unused, unused.long(), longest)
        return replace(rows, window_table=self.window_table, window_locations=unused.long())

    def batch(self, lengths: Lengths, num_extend: int, graph: int = 0) -> AttentionBatch:
        rows = self.rows(lengths, graph - len(lengths) if graph else 0)
        return AttentionBatch(rows.starts.cpu().numpy(), rows.num_tokens.cpu().numpy(), num_extend, rows, graph)

    def expected(self, lengths: Lengths, scale: float, window: int) -> torch.Tensor:
        tokens = sum(count for _, count in lengths)
        out, rows = self.empty(tokens), self.rows(lengths)
        rows = rows.in_windows() if window else rows
        reference.paged_attention(out, self.all_qkv[:tokens], self.k, self.v, rows, ScoreRule(scale, window))
        return out

    def actual(self, backend: FlashInferAttention, batch: AttentionBatch, scale: float, window: int) -> torch.Tensor:
        tokens = int(batch.num_tokens.sum())
        out = self.empty(tokens)
        rows = batch.rows.in_windows() if window else batch.rows
        backend.attend(out, self.all_qkv[:tokens], self.k, self.v, rows, ScoreRule(scale, window))
        return out

    def empty(self, tokens: int) -> torch.Tensor:
        return self.all_qkv.new_full((tokens, self.shape.num_heads * self.shape.head_dim), torch.nan)


def backend_of(bench: Bench, module: Any, **options: Any) -> FlashInferAttention:
    if not isinstance(module, Library) and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(bench.device)
        if uncompiled(module, bench.shape.head_dim, bench.dtype, f"{major}.{minor}", bench.shape.windows):
            pytest.skip("flashinfer's modules are not compiled, and must not be (FLASHINFER_DISABLE_JIT)")
    return FlashInferAttention(bench.shape, bench.device, bench.dtype, reference, module, **options)


def uncompiled(library: Any, head_dim: int, dtype: torch.dtype, arch: str, windows: Sequence[int] = (0, 1)) -> int:
    """Returns how many of the compiled modules that these sizes need are missing; 0 if the library may compile them itself."""
    if os.environ.get("FLASHINFER_DISABLE_JIT") != "1":
        return 0
    kinds = {window > 0 for window in windows}
    return len(missing(library, [each for each in needed_modules([head_dim], [dtype], [arch]) if each.windowed in kinds]))


def assert_near(given: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = 2e-2 if given.dtype == torch.bfloat16 else 1e-2 if given.is_cuda else 2e-3
    torch.testing.assert_close(given.float(), wanted.float(), atol=tolerance, rtol=max(tolerance, 1e-2))


CASES = {
    "groups of four": SHAPE,
    "groups of two": PAIRED,
    "groups of three": replace(SHAPE, num_heads=3, num_kv_heads=1),
    "groups of one": replace(SHAPE, num_heads=2),
    "groups of seven": replace(SHAPE, num_heads=7, num_kv_heads=1),
    "pages of one": replace(SHAPE, page_size=1, max_pages=1200),
    "pages of one, groups of two": replace(PAIRED, page_size=1, max_pages=1200),
    "pages of five": replace(SHAPE, page_size=5, max_pages=1200),
    "another head size": replace(SHAPE, head_dim=192 - HEAD_DIM, value_dim=192 - HEAD_DIM),
    "two windows": replace(SHAPE, windows=(0, 24)),
    "two windows, groups of two": replace(PAIRED, windows=(0, 24)),
    "a window of one": replace(SHAPE, windows=(1,)),
    "two windows, a window table": replace(SHAPE, windows=(0, 24), separate_windows=True),
    "only windows, a window table": replace(PAIRED, windows=(24, 7), separate_windows=True),
}


@pytest.mark.by_day(one_in=2, seed=26)
@each_value(shape=CASES, split_mixed={"one plan": False, "two plans": True})
def test_steps_equal_the_reference(shape: AttentionShape, split_mixed: bool, device: torch.device, module: Any) -> None:
    bench = Bench(shape, device)
    backend = backend_of(bench, module, split_mixed=split_mixed)
    for lengths, num_extend in (
        (MIXED, 3),
        (MIXED[:3], 3),
        (DECODE, 0),
        (DECODE[1:3], 0),
        (MIXED, 4),
        ([(0, 1)], 1),
        ([(199, 1)], 0),
    ):
        batch = bench.batch(lengths, num_extend)
        backend.plan(batch)
        for window, scale in zip((*shape.windows, *shape.windows), (0.125, 0.125, 0.7, 0.7), strict=False):
            assert_near(bench.actual(backend, batch, scale, window), bench.expected(lengths, scale, window))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_steps_equal_the_reference_in_float16_and_bfloat16(dtype: torch.dtype, device: torch.device, module: Any) -> None:
    bench = Bench(SHAPE, device, dtype)
    backend = backend_of(bench, module)
    batch = bench.batch(MIXED, 3)
    backend.plan(batch)
    torch.testing.assert_close(bench.actual(backend, batch, 0.2, 0), bench.expected(MIXED, 0.2, 0), atol=2e-2, rtol=2e-2)


@pytest.mark.by_day(one_in=2, seed=6)
@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        PAIRED,
        replace(PAIRED, windows=(0, 24)),
        replace(SHAPE, windows=(0, 24), page_size=1, max_pages=1200),
        replace(SHAPE, windows=(0, 24), separate_windows=True),
        replace(PAIRED, windows=(0, 24), separate_windows=True),
    ],
)
def test_graphs_with_fixed_buffers_compute_the_current_plan(shape: AttentionShape, device: torch.device, module: Any) -> None:
    """A captured graph repeats run() on the same addresses. With the double, each replay is another call of run()."""
    bench = Bench(shape, device)
    backend = backend_of(bench, module)
    for lengths in (DECODE[:3], DECODE[1:], DECODE[3:], [(199, 1)] * 4, [(0, 1)]):
        for size in (4, 8):
            if len(lengths) <= size:
                batch = bench.batch(lengths, 0, graph=size)
                backend.plan(batch)
                for window in shape.windows:
                    given = bench.actual(backend, batch, 0.125, window)
                    assert_near(given[: len(lengths)], bench.expected(lengths, 0.125, window))
        mixed = bench.batch(MIXED, 3)  # a step without a graph between the replays, which uses the same buffers
        backend.plan(mixed)
        assert_near(bench.actual(backend, mixed, 0.125, 0), bench.expected(MIXED, 0.125, 0))


@pytest.mark.parametrize("shape", [SHAPE, PAIRED], ids=["tensor cores", "CUDA cores"])
def test_graph_uses_the_same_buffer_addresses_for_every_plan(
    shape: AttentionShape, device: torch.device, double: Library
) -> None:
    bench = Bench(shape, device)
    backend = backend_of(bench, double)
    seen = set()
    for lengths in (DECODE[:2], DECODE[1:], [(180, 1)] * 4):
        backend.plan(bench.batch(lengths, 0, graph=4))
        wrapper = backend._graphs[(4, 0)]
        buffers = (wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf)
        scratch = (wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._qo_indptr_buf)
        seen.add(tuple(buffer.data_ptr() for buffer in (*buffers, *scratch)))
        assert wrapper._plan.kv_indptr == wrapper._paged_kv_indptr_buf.tolist()
    assert len(seen) == 1
    assert double.planned == ["plan graph 4", "fast graph 4", "fast graph 4"]


@pytest.mark.skipif(not REAL, reason="no GPU with flashinfer")
@pytest.mark.parametrize("shape", [SHAPE, PAIRED], ids=["tensor cores", "CUDA cores"])
def test_captured_graph_computes_the_current_plan(shape: AttentionShape) -> None:
    bench = Bench(shape, torch.device("cuda", 0))
    backend = backend_of(bench, importlib.import_module("flashinfer"))
    backend.prepare(lambda line: None)
    first = bench.batch([(0, 1)] * 4, 0, graph=4)
    backend.plan(first)
    qkv, out = bench.all_qkv[:4], bench.empty(4)
    backend.attend(out, qkv, bench.k, bench.v, first.rows, ScoreRule(0.125))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.attend(out, qkv, bench.k, bench.v, first.rows, ScoreRule(0.125))
    for lengths in (DECODE[1:], DECODE[:2], [(199, 1)] * 4):
        batch = bench.batch(lengths, 0, graph=4)
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.plan(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        assert_near(out[: len(lengths)], bench.expected(lengths, 0.125, 0))


@pytest.mark.by_day(one_in=3, seed=4)
@pytest.mark.parametrize(
    "shape", [SHAPE, PAIRED, replace(PAIRED, windows=(0, 24))], ids=["tensor cores", "CUDA cores", "windows"]
)
def test_later_steps_copy_nothing_from_pageable_memory(shape: AttentionShape, device: torch.device, double: Library) -> None:
    """In any step, the double raises HostWaits if the host reads device memory."""
    bench = Bench(shape, device)
    backend = backend_of(bench, double, split_mixed=True)
    messages: list[str] = []
    backend.prepare(messages.append)
    assert len(messages) == 6
    double.pageable.clear()
    for lengths, num_extend, graph in (
        (DECODE, 0, 0),
        (MIXED, 3, 0),
        (MIXED[:3], 3, 0),
        (DECODE, 0, 8),
        (DECODE, 0, 8),
        (DECODE[:3], 0, 0),
    ):
        backend.plan(bench.batch(lengths, num_extend, graph))
    assert double.pageable == []


def test_steps_in_flight_use_separate_host_memory(device: torch.device, double: Library) -> None:
    bench = Bench(replace(PAIRED, windows=(0, 24)), device)
    backend = backend_of(bench, double)
    written: list[int] = []
    for lengths, num_extend, graph in ((MIXED, 3, 0), (DECODE, 0, 8), (DECODE, 0, 0), (DECODE, 0, 8)):
        backend.plan(bench.batch(lengths, num_extend, graph))
        for wrapper in backend._parts[0].wrappers.values():
            written.append(wrapper._pin_memory_int_workspace_buffer.data_ptr())
    assert len(set(written)) == 2 * SLOTS


def test_step_uses_the_kernels_that_fit_the_kinds_of_rows(device: torch.device, double: Library) -> None:
    steps = ((MIXED[:3], 3), (MIXED, 3), (DECODE, 0), (DECODE, 0))
    wanted = {
        (8, False): ["prefill fa3 3", "prefill fa2 6", "prefill fa2 5", "prefill fa2 5"],
        (8, True): ["prefill fa3 3", "prefill fa3 3", "prefill fa2 3", "prefill fa2 5", "prefill fa2 5"],
        (4, False): ["prefill fa3 3", "prefill fa2 6", "plan decode 5", "fast decode 5"],
        (4, True): ["prefill fa3 3", "prefill fa3 3", "plan decode 3", "fast decode 5", "fast decode 5"],
    }
    for (heads, split_mixed), kinds in wanted.items():
        bench = Bench(replace(SHAPE, num_heads=heads), device)
        backend = backend_of(bench, double, split_mixed=split_mixed)
        double.planned.clear()
        for lengths, num_extend in steps:
            backend.plan(bench.batch(lengths, num_extend))
        assert double.planned == kinds


def test_attention_requires_a_plan_for_the_same_pass(device: torch.device, double: Library) -> None:
    bench = Bench(SHAPE, device)
    backend = backend_of(bench, double)
    batch = bench.batch(MIXED, 3)
    with pytest.raises(RuntimeError, match="no plan for a pass over 43 tokens"):
        bench.actual(backend, batch, 0.1, 0)
    backend.plan(bench.batch(DECODE, 0))
    with pytest.raises(RuntimeError, match="43 tokens"):
        bench.actual(backend, batch, 0.1, 0)
    backend.plan(batch)
    with pytest.raises(KeyError):
        bench.actual(backend, batch, 0.1, 7)
    backend.release_graphs()
    with pytest.raises(RuntimeError, match="no plan"):
        bench.actual(backend, batch, 0.1, 0)


def test_released_graphs_are_created_again(device: torch.device, double: Library) -> None:
    bench = Bench(PAIRED, device)
    backend = backend_of(bench, double)
    for _ in range(2):
        backend.plan(bench.batch(DECODE[:2], 0, graph=4))
        backend.release_graphs()
    assert double.planned == ["plan graph 4", "plan graph 4"]


def test_fake_flashinfer_library_detects_wrong_calls(device: torch.device, double: Library) -> None:
    """The other tests rely on the double to refuse wrong calls."""
    bench = Bench(SHAPE, device)
    backend = backend_of(bench, double)
    batch = bench.batch(MIXED, 3)
    backend.plan(batch)
    (wrapper,) = backend._parts[0].wrappers.values()
    backend.plan(batch)
    stale = double.BatchPrefillWithPagedKVCacheWrapper(backend._workspace, "HND", backend="fa2")
    columns = fill(make_slot(200, 0, 0, device).columns, batch.starts, batch.num_tokens, 16)
    with pytest.raises(HostWaits):
        backend._planner.prefill(
            stale, replace(columns, kv_indptr=backend._pages.kv_indptr(6)), backend._pages.step(6, 1), 0, True
        )
    pageable = replace(columns, qo_indptr=torch.tensor(columns.qo_indptr.tolist(), dtype=torch.int32))
    backend._planner.prefill(stale, pageable, backend._pages.step(6, columns.num_pages), 0, True)
    assert double.pageable == ["qo_indptr"]
    stale._int_workspace_buffer = wrapper._int_workspace_buffer
    stale._schedule((0, 0))
    with pytest.raises(AssertionError, match="the schedule of the last plan"):
        bench.actual(backend, batch, 0.1, 0)


@dataclass
class Passing:
    passed: bool = False

    def record(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_staging_ring_does_not_reuse_a_slot_in_flight_and_does_not_wait() -> None:
    ring = StagingRing(lambda: StagingSlot(torch.empty(1), (), Passing()))
    for slot in ring._slots:
        slot.copied.passed = True
    taken = []
    for _ in range(SLOTS + 2):
        slot = ring.take()
        slot.copied.record()
        taken.append(id(slot))
    assert len(set(taken)) == SLOTS + 2 == len(ring)
    oldest = next(slot for slot in ring._slots if id(slot) == taken[2])
    oldest.copied.passed = True
    assert ring.take() is oldest


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_columns_of_a_plan_are_computed_from_starts_and_token_counts(page_size: int) -> None:
    starts, counts = np.array([0, 15, 31, 4], np.int32), np.array([1, 1, 3, 1], np.int32)
    columns = fill(torch.empty(40, dtype=torch.int32), starts, counts, page_size)
    lengths = [1, 16, 34, 5]
    pages = [-(-length // page_size) for length in lengths]
    assert columns.kv_indptr.tolist() == [0, *np.cumsum(pages)] and columns.num_pages == sum(pages)
    assert columns.last_page_len.tolist() == [
        length - (count - 1) * page_size for length, count in zip(lengths, pages, strict=True)
    ]
    assert columns.qo_indptr.tolist() == [0, 1, 2, 5, 6] and columns.kv_lens.tolist() == lengths


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        (SHAPE, torch.float32, "bfloat16 and float16, not in float32"),
        (replace(SHAPE, head_dim=96), torch.float16, "not for 96"),
        (replace(SHAPE, num_kv_heads=3), torch.float16, "8 query heads are not a multiple of 3"),
        (replace(SHAPE, page_size=0), torch.float16, "page_size is 0"),
        (replace(SHAPE, max_rows=40000), torch.float16, "not 40000"),
    ],
)
def test_back_end_refuses_unsupported_shapes(
    shape: AttentionShape, dtype: torch.dtype, reason: str, device: torch.device, double: Library
) -> None:
    with pytest.raises(limits.Unsupported, match=reason):
        FlashInferAttention(shape, device, dtype, reference, double)


BIG = replace(SHAPE, num_heads=32, num_kv_heads=8, head_dim=128, value_dim=128, max_rows=512, max_tokens=8192)
LARGE = {
    "8B": BIG,
    "0.6B": replace(BIG, num_heads=16),
    "one key/value head": replace(BIG, num_heads=71, num_kv_heads=1, head_dim=64, value_dim=64),
    "many heads": replace(BIG, num_heads=128, num_kv_heads=128),
    "wide heads": replace(BIG, num_heads=16, num_kv_heads=4, head_dim=256, value_dim=256, page_size=1),
}


@pytest.mark.by_day(one_in=2, seed=45)
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE.keys())
def test_scratch_memory_is_large_enough_for_every_plan(shape: AttentionShape) -> None:
    generator, sizes = np.random.default_rng(5), (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
    used_float = used_int = 0
    for rows in (1, 3, 60, 512):
        for spread in (1, 4, 64, 2000):
            counts = np.minimum(generator.integers(1, spread + 1, rows), shape.max_tokens // rows)
            context = counts + generator.integers(0, generator.choice([1, 300, 30000]), rows)
            kv = [0, *np.cumsum(-(-context // shape.page_size)).tolist()]
            qo, ones = [0, *np.cumsum(counts).tolist()], list(range(rows + 1))
            plans = [
                fa2_bytes(qo, kv, sizes, -1, False, 132),
                fa2_bytes(qo, kv, sizes, 127, False, 132),
                fa3_bytes(qo, sizes, 132),
            ]
            if limits.tensor_cores(shape):
                plans.append(fa2_bytes(ones, kv, sizes, -1, True, 132))
            else:
                plans += [decode_bytes(kv, sizes, graph, 132) for graph in (False, True)]
            used_float = max(used_float, *(floats for floats, _ in plans))
            used_int = max(used_int, *(ints for _, ints in plans))
    assert used_float <= limits.float_bytes(shape, 132, 512) and used_int <= limits.int_bytes(shape, 132)
    if used_float > limits.MIN_FLOAT_BYTES:
        assert used_float > 0.9 * limits.float_bytes(shape, 132, 512), "the bound must exceed the largest plan by at most a tenth"


def test_larger_graph_allocates_more_scratch_memory(device: torch.device, double: Library) -> None:
    shape = replace(BIG, max_rows=300, max_tokens=300, head_dim=256, value_dim=256, max_pages=600)
    backend = FlashInferAttention(shape, device, torch.float16, reference, double)
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    before, held = len(backend._workspace), []
    for size in (2, 300):
        zeros = torch.zeros(size, dtype=torch.int32, device=device)
        rows = RaggedRows(table, zeros - 1, zeros, zeros + 1, zeros, zeros, zeros.long(), 1)
        backend.plan(AttentionBatch(np.zeros(size, np.int32), np.ones(size, np.int32), 0, rows, graph=size))
        held.append(len(backend._graphs[(size, 0)]._float_workspace_buffer))
    assert held[0] == before < held[1] == len(backend._workspace)


@pytest.mark.parametrize("name", ["qwen3", "mistral-window"])
def test_decoder_logits_equal_the_reference_attention(name: str, tmp_path: Path) -> None:
    """Runs a real model for two steps: first with prompts, then with one more token per row and a new prompt."""
    tiny = MODELS[name]
    replace(tiny, options={**tiny.options, "head_dim": 64, "hidden_size": 128}).build(tmp_path, torch.float16)
    request = load_request(tmp_path, "float16", 16, None)
    decoder = load_model(request).model
    assert isinstance(decoder, Decoder)
    config = decoder.model.config
    windows = tuple(sorted(set(config.windows)))
    shape = AttentionShape(config.num_heads, config.num_kv_heads, 64, 64, 16, windows, 4, 96, 64, 40)
    bench, library = Bench(shape, torch.device("cpu"), torch.float16), Library(torch.device("cpu"))
    layers = [LayerKV(config.num_kv_heads, config.head_dim, config.head_dim)] * config.num_layers
    given, wanted = (allocate(layers, PoolSizes(len(bench.k)), 16, torch.float16, reference) for _ in range(2))
    with torch.inference_mode(), library.ledger:
        backend = backend_of(bench, library)
        for lengths, num_extend in (([(0, 40), (0, 3), (0, 17)], 3), ([(40, 5), (3, 1), (17, 1)], 1)):
            batch = bench.batch(lengths, num_extend)
            tokens = int(batch.num_tokens.sum())
            ids = torch.arange(tokens) * 7 % 257
            reference.resolve_tokens(ids.clone(), batch.rows, ids.int(), ids, None, 4, 16, 257, 64)
            last = batch.rows.offsets.long() + batch.rows.num_tokens.long() - 1
            backend.plan(batch)
            ours, own = decoder.attending(backend.attend), decoder.attending(reference.paged_attention)
            ours.forward(ids, batch.rows, given)
            own.forward(ids, batch.rows, wanted)
            torch.testing.assert_close(ours.logits(last), own.logits(last), atol=2e-2, rtol=2e-2)
