"""Compares each C++ kernel with its torch reference, over odd shapes, in float32 and bfloat16."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows, ScoreRule
from rootstock_llm.kernels.contracts.row_fault import RowFault
from rootstock_llm.kernels.contracts.sample_ops import Measured, SampleKernels
from rootstock_llm.kernels.cpu import load_kernels, load_sampling
from rootstock_llm.kernels.cpu.build import BuildFailed, built_library
from rootstock_llm.kernels.cpu.library import CpuKernels
from rootstock_llm.kernels.cpu.sampling import CpuSampling
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.reference import sampling as sampling_reference
from tests.all_pairs import each_pair, each_value
from tests.kernels.sampling_case import Row, SlotCase, Written, rows_of, sampled, table_of
from tests.night import NIGHTLY

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    built_library()
    loaded = load_kernels(2, torch.bfloat16)
    assert isinstance(loaded, CpuKernels)
    return loaded


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(found: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    tolerance = (2e-5 if dtype == torch.float32 else 1.6e-2) * scale
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.by_day(one_in=5, seed=1)
@each_value(dtype=DTYPES, rows=[1, 40, 40], size=[1, 31, 64, 1000, 1024])
def test_rms_norm_matches_the_reference(kernels: CpuKernels, dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight = random(rows, size, dtype=dtype), random(size, seed=1)
    found, expected = torch.empty_like(x), torch.empty_like(x)
    kernels.rms_norm(found, x, weight, 1e-5)
    reference.rms_norm(expected, x, weight, 1e-5)
    assert_same(found, expected, dtype)


@pytest.mark.by_day(one_in=2, seed=6)
@each_pair(dtype=DTYPES, rows=[1, 40], size=[33, 1024])
def test_fused_add_rms_norm_matches_the_reference(kernels: CpuKernels, dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight = random(rows, size, dtype=dtype), random(size, seed=1)
    residual, expected_residual = random(rows, size, dtype=dtype, seed=2), random(rows, size, dtype=dtype, seed=2)
    found, expected = torch.empty_like(x), torch.empty_like(x)
    kernels.fused_add_rms_norm(found, x, residual, weight, 1e-6)
    reference.fused_add_rms_norm(expected, x, expected_residual, weight, 1e-6)
    assert torch.equal(residual, expected_residual)
    assert_same(found, expected, dtype)


@pytest.mark.by_day(one_in=2, seed=5)
@each_pair(dtype=DTYPES, rows=[1, 40, 40], size=[1, 17, 768], name=["silu_and_mul", "gelu_and_mul"])
def test_activation_matches_the_reference(kernels: CpuKernels, dtype: torch.dtype, rows: int, size: int, name: str) -> None:
    x = random(rows, 2 * size, dtype=dtype) * 8
    found, expected = torch.empty(rows, size, dtype=dtype), torch.empty(rows, size, dtype=dtype)
    getattr(kernels, name)(found, x)
    getattr(reference, name)(expected, x)
    assert_same(found, expected, dtype)


@pytest.mark.by_day(one_in=2, seed=5)
@each_value(dtype=DTYPES, rows=[1, 40], size=[17, 768])
def test_sigmoid_mul_matches_the_reference(kernels: CpuKernels, dtype: torch.dtype, rows: int, size: int) -> None:
    gate, found = random(rows, size, dtype=dtype) * 8, random(rows, size, dtype=dtype, seed=1)
    expected = found.clone()
    kernels.sigmoid_mul(found, gate)
    reference.sigmoid_mul(expected, gate)
    assert_same(found, expected, dtype)


def test_silu_and_mul_keeps_extreme_values(kernels: CpuKernels) -> None:
    gate = torch.tensor([-torch.inf, -200.0, -90.0, 0.0, 90.0, 200.0, torch.nan])
    found = torch.empty(1, 7)
    kernels.silu_and_mul(found, torch.cat((gate, torch.ones(7)))[None])
    assert found[0, 1:6].tolist() == pytest.approx([0.0, 0.0, 0.0, 90.0, 200.0], abs=1e-30)
    assert torch.isnan(found[0, 6])


# For each dtype, the cases have: tiles of 1 to 6 rows, blocks with and without a tail, with and without a bias, rows in one part
# and in several, more parts than rows, and depths of one and of several segments. An odd depth cannot be computed in pairs.
LINEAR = [
    (torch.float32, 1, (65, 64), False),
    (torch.float32, 2, (64, 635), True),
    (torch.float32, 3, (1, 200), True),
    (torch.float32, 4, (130, 1), False),
    (torch.float32, 5, (16, 64), True),
    (torch.float32, 13, (65, 64), True),
    (torch.float32, 70, (16, 2), False),
    (torch.bfloat16, 3, (65, 33), True),
    (torch.bfloat16, 1, (65, 64), True),
    (torch.bfloat16, 2, (200, 66), False),
    (torch.bfloat16, 5, (16, 2), True),
    (torch.bfloat16, 6, (192, 1024), False),
    (torch.bfloat16, 7, (65, 64), False),
    (torch.bfloat16, 13, (192, 1024), True),
    (torch.bfloat16, 32, (200, 66), True),
    (torch.bfloat16, 70, (16, 2), False),
]
GATED = [
    (torch.float32, 9, (33, 64), True),
    (torch.bfloat16, 1, (32, 64), False),
    (torch.bfloat16, 6, (33, 64), True),
    (torch.bfloat16, 9, (96, 66), False),
    (torch.bfloat16, 9, (100, 1024), True),
]


@pytest.mark.by_day(one_in=2, seed=25)
@pytest.mark.parametrize(("dtype", "rows", "weights", "bias"), LINEAR, ids=str)
def test_linear_layer_matches_the_reference(
    kernels: CpuKernels, dtype: torch.dtype, rows: int, weights: tuple[int, int], bias: bool
) -> None:
    outs, ins = weights
    x, weight = random(rows, ins, dtype=dtype), random(outs, ins, dtype=dtype, seed=1) / ins**0.5
    added = random(outs, dtype=dtype, seed=2) if bias else None
    for out_dtype in {dtype, torch.float32}:
        found, expected = torch.empty(rows, outs, dtype=out_dtype), torch.empty(rows, outs, dtype=out_dtype)
        kernels.linear(found, x, kernels.pack_linear(weight, added))
        reference.linear(expected, x, reference.pack_linear(weight, added))
        assert_same(found, expected, dtype)


@pytest.mark.parametrize("weights", [(65, 33), (65, 64), (128, 6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embedding_copies_rows_of_a_packed_weight(kernels: CpuKernels, dtype: torch.dtype, weights: tuple[int, int]) -> None:
    outs, ins = weights
    weight = random(outs, ins, dtype=dtype, seed=3)
    ids = torch.tensor([0, outs - 1, 63, 64, 1, 64])
    for packed in (kernels.pack_linear(weight, None), reference.pack_linear(weight, None)):
        found = torch.empty(len(ids), ins, dtype=dtype)
        kernels.embedding(found, ids, packed)
        assert torch.equal(found, weight[ids])


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.parametrize(("dtype", "rows", "weights", "bias"), GATED, ids=str)
def test_gated_linear_layer_matches_the_reference(
    kernels: CpuKernels, dtype: torch.dtype, rows: int, weights: tuple[int, int], bias: bool
) -> None:
    size, ins = weights
    x, weight = random(rows, ins, dtype=dtype), random(2 * size, ins, dtype=dtype, seed=1) / ins**0.5
    added = random(2 * size, dtype=dtype, seed=2) if bias else None
    found, expected = torch.empty(rows, size, dtype=dtype), torch.empty(rows, size, dtype=dtype)
    kernels.gated_linear(found, x, kernels.pack_gated(weight, added))
    reference.gated_linear(expected, x, reference.pack_gated(weight, added))
    assert_same(found, expected, dtype, scale=2.0)


def ragged(shapes: list[tuple[int, int]], page_size: int, seed: int = 0) -> tuple[RaggedRows, int]:
    """Returns a batch with these (start, tokens) of the rows, on shuffled pages and scattered slots, and the number of pages."""
    width = max(-(-(start + count) // page_size) for start, count in shapes) + 1
    num_pages = width * len(shapes)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    table = torch.full((2 * len(shapes), width), -1, dtype=torch.int32)
    slots = torch.arange(len(shapes), dtype=torch.int32) * 2 + 1
    table[slots.long()] = order.view(len(shapes), width).int()
    counts = torch.tensor([count for _, count in shapes], dtype=torch.int32)
    positions = torch.cat([torch.arange(start, start + count) for start, count in shapes])
    pages = table[torch.repeat_interleave(slots, counts).long(), positions // page_size]
    return RaggedRows(
        page_table=table,
        slots=slots,
        starts=torch.tensor([start for start, _ in shapes], dtype=torch.int32),
        num_tokens=counts,
        offsets=(counts.cumsum(0) - counts).int(),
        positions=positions.int(),
        locations=pages.long() * page_size + positions % page_size,
        max_context=max(start + count for start, count in shapes),
    ), num_pages


@pytest.mark.parametrize(
    ("dtype", "shape", "normed", "page_size"),
    [
        (torch.float32, (4, 2, 16), False, 4),
        (torch.float32, (2, 2, 6), True, 16),
        (torch.bfloat16, (6, 1, 128), False, 16),
        (torch.bfloat16, (4, 2, 16), True, 1),
    ],
    ids=str,
)
def test_rope_write_kv_kernel_matches_the_reference(
    kernels: CpuKernels, dtype: torch.dtype, shape: tuple[int, int, int], normed: bool, page_size: int
) -> None:
    heads, kv_heads, head_dim = shape
    rows, num_pages = ragged([(0, 5), (17, 1), (3, 30)], page_size)
    rows.locations[2] = -1
    qkv = random(36, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    norms = (random(head_dim, seed=1), random(head_dim, seed=2)) if normed else None
    angles = random(64, head_dim // 2, seed=3)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    results = []
    for which in (kernels, reference):
        mine, keys = qkv.clone(), torch.zeros(num_pages, kv_heads, page_size, head_dim, dtype=dtype)
        values = torch.zeros_like(keys)
        which.rope_write_kv(mine, norms, 1e-6, cos_sin, rows, keys, values)
        results.append((mine[:, : heads * head_dim], keys, values))
    for found, expected in zip(*results, strict=True):
        assert_same(found, expected, dtype, scale=3.0)
    assert torch.equal(results[0][2], results[1][2])


BATCHES = {
    "one-decode": [(70, 1)],
    "first-token": [(0, 1)],
    "decodes": [(0, 1), (15, 1), (16, 1), (17, 1), (64, 1), (200, 1)],
    "one-extend": [(0, 100)],
    "chunk-after-a-prefix": [(37, 50)],
    "mixed": [(0, 3), (64, 64), (5, 70), (33, 1), (128, 1), (9, 4)],
}


# Every CPU uses the general tiles for float32, and for bfloat16 with sizes that are no multiples of 32, such as 20 and 80. The
# kernels with bf16 dot products do not support these sizes. The cases of these tiles have each batch, page size and window. Some
# have more queries than a tile and more values than a block.
# On a CPU with bf16 dot products, other bfloat16 cases use the kernels with dot products. A tile with at most 8 queries
# (tokens times heads of a group) reads keys unpacked; other tiles pack keys. Each head size has cases of both kinds.
ATTENTION = [
    (torch.float32, "one-decode", (4, 2, 64), (1, 0)),
    (torch.float32, "first-token", (7, 1, 128), (16, 24)),
    (torch.float32, "decodes", (4, 4, 96), (4, 0)),
    (torch.float32, "one-extend", (2, 1, 256), (16, 70)),
    (torch.float32, "chunk-after-a-prefix", (16, 1, 64), (16, 0)),
    (torch.float32, "mixed", (4, 2, 20), (4, 1)),
    (torch.bfloat16, "mixed", (4, 2, 20), (16, 24)),
    (torch.bfloat16, "decodes", (4, 2, 80), (4, 24)),
    (torch.bfloat16, "first-token", (4, 2, 64), (16, 0)),
    (torch.bfloat16, "decodes", (4, 2, 64), (4, 0)),
    (torch.bfloat16, "mixed", (4, 2, 64), (16, 24)),
    (torch.bfloat16, "one-decode", (7, 1, 128), (1, 0)),
    (torch.bfloat16, "mixed", (7, 1, 128), (16, 70)),
    (torch.bfloat16, "chunk-after-a-prefix", (7, 1, 128), (4, 0)),
    (torch.bfloat16, "decodes", (4, 4, 96), (16, 70)),
    (torch.bfloat16, "one-extend", (4, 4, 96), (4, 1)),
    (torch.bfloat16, "decodes", (2, 1, 256), (16, 24)),
    (torch.bfloat16, "chunk-after-a-prefix", (2, 1, 256), (16, 0)),
    (torch.bfloat16, "decodes", (16, 1, 64), (4, 1)),
    (torch.bfloat16, "one-extend", (16, 1, 64), (1, 0)),
]


def assert_attends_as_reference(
    kernels: CpuKernels,
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    dims: tuple[int, ...],
    page_size: int,
    rule: ScoreRule,
) -> None:
    """Compares with the reference. `dims` is (heads, KV heads, size of a key, size of a value).

    The tolerance grows with the scale of the rule, because rounding of a large score changes its weight by more than rounding of
    a small score.
    """
    heads, kv_heads, head_dim, value_dim = dims
    rows, num_pages = ragged(lengths, page_size)
    num_tokens = int(rows.num_tokens.sum())
    qkv = random(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    shape = (num_pages, kv_heads, page_size)
    keys, values = (torch.full((*shape, size), torch.nan, dtype=dtype) for size in (head_dim, value_dim))  # unwritten memory
    for row, (start, count) in enumerate(lengths):
        positions = torch.arange(start + count)
        pages = rows.page_table[int(rows.slots[row]), positions // page_size].long()
        keys[pages, :, positions % page_size] = random(start + count, kv_heads, head_dim, dtype=dtype, seed=row + 1)
        values[pages, :, positions % page_size] = random(start + count, kv_heads, value_dim, dtype=dtype, seed=row + 50)
        if rule.window:  # pages before the window may already belong to another request
            left = pages[: max(start - rule.window + 1, 0) // page_size * page_size]
            keys[left], values[left] = torch.nan, torch.nan
    found, expected = (torch.empty(num_tokens, heads * value_dim, dtype=dtype) for _ in range(2))
    kernels.paged_attention(found, qkv, keys, values, rows, rule)
    reference.paged_attention(expected, qkv, keys, values, rows, rule)
    assert bool(expected.isfinite().all())
    assert_same(found, expected, dtype, scale=max(1.0, rule.scale))


@pytest.mark.parametrize(("dtype", "batch", "shape", "layout"), ATTENTION, ids=str)
def test_paged_attention_matches_the_reference(
    kernels: CpuKernels, dtype: torch.dtype, batch: str, shape: tuple[int, int, int], layout: tuple[int, int]
) -> None:
    """`shape` is (heads, KV heads, head size), and `layout` is (tokens per page, window)."""
    (page_size, window), head_dim = layout, shape[2]
    rule = ScoreRule(head_dim**-0.5, window)
    assert_attends_as_reference(kernels, dtype, BATCHES[batch], (*shape, head_dim), page_size, rule)


@pytest.mark.parametrize("seed", range(200 if NIGHTLY else 24))
def test_paged_attention_matches_the_reference_for_random_sizes_windows_caps_and_sinks(kernels: CpuKernels, seed: int) -> None:
    made = Random(seed)
    dtype, group, kv_heads = made.choice(DTYPES), made.choice([1, 2, 3, 8, 16]), made.choice([1, 2])
    # Both sizes are multiples of 32 in half of the cases, for the kernels with bf16 dot products.
    sizes = [32, 64, 96, 128, 192] if seed % 2 else [1, 20, 33, 80, 128]
    head_dim, value_dim = made.choice(sizes), made.choice(sizes)
    lengths = [(made.choice([0, made.randrange(300)]), made.choice([1, 1, made.randrange(1, 90)])) for _ in range(4)]
    rule = ScoreRule(
        scale=made.choice([1.0, 3.0]) * head_dim**-0.5,
        window=made.choice([0, 1, made.randrange(2, 140)]),
        softcap=made.choice([0.0, 1.5, 30.0]),
        sinks=made.choice([None, random(kv_heads * group, seed=seed) * 3]),
    )
    page_size = made.choice([1, 4, 16])
    assert_attends_as_reference(kernels, dtype, lengths, (kv_heads * group, kv_heads, head_dim, value_dim), page_size, rule)


@pytest.mark.parametrize("head_dim", [20, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_keeps_large_scores_and_sinks_finite(kernels: CpuKernels, dtype: torch.dtype, head_dim: int) -> None:
    """A sink of minus infinity has no weight, and a large sink has nearly all of it."""
    sinks = torch.tensor([-torch.inf, 300.0, -300.0, 0.0])
    for softcap in (0.0, 50.0):
        rule = ScoreRule(20.0, 40, softcap, sinks)
        assert_attends_as_reference(kernels, dtype, BATCHES["mixed"], (4, 2, head_dim, head_dim), 16, rule)


def test_paged_attention_rejects_tensors_that_do_not_fit(kernels: CpuKernels) -> None:
    rows, num_pages = ragged([(0, 2)], 4)
    keys, values = torch.zeros(num_pages, 2, 4, 16), torch.zeros(num_pages, 2, 4, 8)
    q, out, rule = torch.zeros(2, 64), torch.zeros(2, 32), ScoreRule(1.0)
    kernels.paged_attention(out, q, keys, values, rows, rule)
    for wrong in (
        (out[:, :24].contiguous(), q, keys, values, rows, rule),  # 3 query heads for 2 key/value heads
        (out, q[:, :63], keys, values, rows, rule),
        (out, q[:1], keys, values, rows, rule),
        (out, torch.zeros(64, 2).t(), keys, values, rows, rule),
        (out, q, keys, values[:-1], rows, rule),
        (out, q, keys, values.bfloat16(), rows, rule),
        (out, q, keys, values, rows, ScoreRule(1.0, sinks=torch.zeros(3))),
        (out, q, keys, values, rows, ScoreRule(1.0, sinks=torch.zeros(4, dtype=torch.bfloat16))),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            kernels.paged_attention(*wrong)


def chosen(logits: Tensor, case: SlotCase, positions: list[int]) -> Written:
    """Returns the results of select_tokens for `logits`. Each row has one of `positions` and its own slot."""
    vocab_size, rows = logits.shape[1], [Row(slot, position) for slot, position in enumerate(positions)]
    table = table_of([case] * len(rows), vocab_size)
    return sampled(CpuSampling(built_library(), 2), logits, rows_of(rows, vocab_size), table, torch.device("cpu"))


@pytest.mark.parametrize(
    ("row", "token"),
    [([0.0, 3.0, 3.0, 1.0], 1), ([-5.0], 0), ([-torch.inf, -1e30, -1e30], 1)],
    ids=["lowest-of-equals", "one", "after-minus-infinity"],
)
def test_greedy_selection_takes_the_lowest_id_of_the_maximum(row: list[float], token: int) -> None:
    written = chosen(torch.tensor([row]), SlotCase(), [4])
    assert written.tokens.tolist() == written.relay.tolist() == [token] and written.faults.tolist() == [0]


@each_value(
    row={
        "all-minus-infinity": [-torch.inf] * 4,
        "nan": [1.0, torch.nan, 9.0, torch.nan],
        "nan-after-infinity": [torch.inf, torch.nan],
        "infinity": [1.0, torch.inf],
    },
    case={"draw": SlotCase(1.0), "top-p": SlotCase(1.0, top_p=0.5), "greedy": SlotCase()},
)
def test_token_selection_reports_nan_logits_when_the_maximum_is_not_finite(row: list[float], case: SlotCase) -> None:
    written = chosen(torch.tensor([row]), case, [4])
    assert (written.tokens.tolist(), written.faults.tolist(), written.relay.tolist()) == ([0], [RowFault.NAN_LOGITS], [-1])


@pytest.mark.by_day(one_in=2, seed=12)
@pytest.mark.parametrize("size", [1, 4096, 4097, 20001])
def test_greedy_selection_matches_argmax(size: int) -> None:
    logits = random(5, size)
    assert chosen(logits, SlotCase(), [1] * 5).tokens.tolist() == logits.argmax(-1).tolist()


CUTS = [(-1, 1.0, 0.0), (5, 1.0, 0.0), (200, 1.0, 0.0), (-1, 0.9, 0.0), (-1, 0.0, 0.0), (-1, 1.0, 0.05), (40, 0.8, 0.01)]


def assert_draws_as_reference(size: int, temperature: float, cut: tuple[int, float, float]) -> None:
    logits, count = (random(4, size) * 3).round(decimals=1), 50  # rounded logits have ties at every cut
    logits[2, 1:] = -torch.inf
    each, case = logits[torch.arange(count) % 4], SlotCase(temperature, *cut, seed=9)
    found, rows = chosen(each, case, list(range(count))), [Row(slot, slot) for slot in range(count)]
    expected = sampled(sampling_reference, each, rows_of(rows, size), table_of([case] * count, size), torch.device("cpu"))
    assert found.faults.tolist() == expected.faults.tolist() == [0] * count
    assert int((found.tokens != expected.tokens).sum()) <= 1, (
        "at most one row may differ, by rounding at a boundary between two tokens"
    )
    assert found.relay.tolist() == found.tokens.tolist()


def measured(kernels: SampleKernels, logits: Tensor, tokens: Tensor, rows: Tensor, num_top: int) -> Measured:
    count = len(rows)
    out = Measured(
        torch.zeros(count), torch.zeros((count, num_top), dtype=torch.int32), torch.zeros(count, num_top), torch.zeros(count)
    )
    kernels.measure_logprobs(out, logits, tokens, rows)
    return out


@pytest.mark.by_day(one_in=2, seed=8)
@pytest.mark.parametrize(
    ("vocab_size", "num_top", "tied"),
    [
        *((1, 32, False), (33, 0, False), (33, 5, True), (2048, 32, True), (2048, 1, False)),
        *((8193, 1, True), (8193, 5, False), (8193, 32, True)),
    ],
    ids=str,
)
def test_measured_logprobs_match_the_reference(vocab_size: int, num_top: int, tied: bool) -> None:
    logits = random(3, vocab_size, seed=vocab_size) * 4
    logits = logits.round() if tied else logits
    logits[1, vocab_size // 3 :] = -torch.inf if vocab_size > 3 else 0.0
    tokens = torch.tensor([0, vocab_size - 1, vocab_size, -1], dtype=torch.int32)
    rows = torch.tensor([2, 0, 1, 1], dtype=torch.int32)
    found, expected = (
        measured(kernels, logits, tokens, rows, num_top) for kernels in (CpuSampling(built_library(), 2), sampling_reference)
    )
    assert found.top_ids.equal(expected.top_ids)
    for name in ("own", "top", "mass"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_measured_probability_mass_is_not_finite_when_logits_are_not_finite(poison: float) -> None:
    logits = torch.zeros((2, 3000))
    logits[0, 2500] = poison
    tokens, rows = torch.zeros(2, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    assert measured(CpuSampling(built_library(), 2), logits, tokens, rows, 2).mass.isfinite().tolist() == [False, True]


def test_cpu_sampling_rejects_shapes_that_do_not_fit() -> None:
    kernels, table, rows = CpuSampling(built_library(), 1), table_of([SlotCase()], 40), rows_of([Row(0)], 40)
    logits, ints, relay = torch.zeros(1, 40), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.edit_logits(torch.zeros(1, 41), logits, rows, table)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.edit_logits(torch.zeros(2, 40), torch.zeros(2, 40), rows, table)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.select_tokens(torch.zeros(2, dtype=torch.int32), ints, logits, logits, rows, table, relay)
    with pytest.raises(ValueError, match="do not fit"):
        measured(kernels, logits, ints, ints, 33)


@pytest.mark.by_day(one_in=2, seed=6)
@pytest.mark.parametrize(
    ("size", "cut", "temperature"),
    [
        *((5001, cut, 3.0) for cut in CUTS),
        *((1000, cut, 0.5) for cut in CUTS),
        *((1, CUTS[1], 0.5), (64, CUTS[3], 1e-6), (64, CUTS[6], 1e-6)),
    ],
    ids=str,
)
def test_token_selection_draws_the_same_tokens_as_the_reference(
    size: int, cut: tuple[int, float, float], temperature: float
) -> None:
    """Tests flat distributions, in which every cut removes tokens with some probability, and sharp ones."""
    assert_draws_as_reference(size, temperature, cut)


def test_token_selection_draws_no_forbidden_token_when_a_block_sum_is_rounded_up() -> None:
    """Draws next to the end of the first block of 64 tokens. The third block has forbidden tokens before its allowed one."""
    kernels, vocab_size, seed = CpuSampling(built_library(), 1), 192, 1
    positions = torch.arange(1 << 22, dtype=torch.int32)
    drawn, order = kernels.uniforms(torch.full((len(positions),), seed), positions).sort()
    for number in range(40):
        logits = torch.full((1, vocab_size), -torch.inf)
        logits[0, :64] = -random(64, seed=number).abs()
        logits[0, -1] = -3.0
        masses = logits[0].exp().double()
        end = float(masses[:64].sum() / masses.sum())
        first, last = torch.searchsorted(drawn, torch.tensor([end - 1e-6, end + 1e-6], dtype=torch.float64)).tolist()
        near = positions[order[first:last]].tolist()
        table = table_of([SlotCase(temperature=1.0, seed=seed)] * len(near), vocab_size)
        rows = rows_of([Row(slot, position) for slot, position in enumerate(near)], vocab_size)
        found = sampled(kernels, logits.expand(len(near), -1).contiguous(), rows, table, torch.device("cpu"))
        assert bool(logits[0, found.tokens.long()].isfinite().all()), number


def test_reference_kernels_are_used_when_the_build_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_library() -> None:
        raise BuildFailed("no C++ compiler found")

    monkeypatch.setattr("rootstock_llm.kernels.cpu.built_library", no_library)
    assert load_kernels(1, torch.bfloat16) is reference and load_sampling(1) is reference
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_cpu_kernels_reject_tensors_that_do_not_fit(kernels: CpuKernels) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        kernels.silu_and_mul(torch.empty(2, 3), torch.empty(2, 5))
    with pytest.raises(ValueError, match="not contiguous"):
        kernels.rms_norm(torch.empty(4, 2), torch.empty(2, 4).t(), torch.empty(2), 1e-6)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.rms_norm(torch.empty(2, 4), torch.empty(2, 4), torch.empty(4, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(TypeError, match="float32 and bfloat16"):
        kernels.silu_and_mul(torch.empty(1, 1, dtype=torch.float16), torch.empty(1, 2, dtype=torch.float16))
