"""Compares attention in Triton with rootstock_llm.kernels.reference.layers. Memory that no token attends to holds NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows, ScoreRule
from rootstock_llm.kernels.reference import layers
from rootstock_llm.kernels.triton.attention.attention import (
    AttentionCall,
    AttentionScratch,
    allocate_scratch,
    head_shape,
    paged_attention,
    plan_call,
    run_attention,
)
from rootstock_llm.kernels.triton.attention.attention_plan import (
    Blocks,
    HeadShape,
    Launch,
    choose_splits,
    plan_decode,
    plan_extend,
    retiled,
)
from rootstock_llm.kernels.triton.attention.attention_tiles import deal_splits
from tests.all_pairs import each_pair, each_value
from tests.night import NIGHTLY

Shapes = list[tuple[int, int]]  # (start, tokens) of each row

MIXED: Shapes = [(0, 3), (64, 17), (5, 1)]
DECODES: Shapes = [(0, 1), (5, 1), (64, 1)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ragged(shapes: Shapes, page_size: int) -> tuple[RaggedRows, int]:
    """Returns rows on shuffled pages and scattered slots, on the CPU, and the number of pages. No row has page 0."""
    width = max(-(-(start + count) // page_size) for start, count in shapes) + 1
    num_pages = width * len(shapes) + 1
    order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(1)) + 1
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


def filled_pool(rows: RaggedRows, shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int, unseen: int = 0) -> Tensor:
    """Returns a pool with random numbers in the rows' contexts and NaN elsewhere.

    The first `unseen` positions of each row are also NaN.
    """
    pool = torch.full(shape, torch.nan, dtype=dtype)
    for row in range(len(rows.slots)):
        positions = torch.arange(unseen, int(rows.starts[row] + rows.num_tokens[row]))
        pages = rows.page_table[int(rows.slots[row]), positions // shape[2]].long()
        pool[pages, :, positions % shape[2]] = random(len(positions), shape[1], shape[3], dtype=dtype, seed=seed + row)
    return pool


def on(device: torch.device, rows: RaggedRows) -> RaggedRows:
    columns = ("page_table", "slots", "starts", "num_tokens", "offsets", "positions", "locations")
    return replace(rows, **{name: getattr(rows, name).to(device) for name in columns})


def case(
    shapes: Shapes,
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
) -> AttentionCall:
    rows, num_pages = ragged(shapes, page_size)
    keys = filled_pool(rows, (num_pages, heads[1], page_size, dims[0]), dtype, 10)
    values = filled_pool(rows, (num_pages, heads[1], page_size, dims[1]), dtype, 50)
    for row, start in enumerate(rows.starts.tolist() if window else ()):  # pages before the window, which another request may use
        left = rows.page_table[int(rows.slots[row]), : max(start - window + 1, 0) // page_size].long()
        keys[left], values[left] = torch.nan, torch.nan
    tokens = int(rows.num_tokens.sum())
    return AttentionCall(
        out=torch.full((tokens, heads[0], dims[1]), torch.nan, dtype=dtype, device=device),
        q=(random(tokens, heads[0], dims[0], dtype=dtype) * 2).to(device),
        k_pool=keys.to(device),
        v_pool=values.to(device),
        rows=on(device, rows),
        rule=ScoreRule(dims[0] ** -0.5, window, softcap, random(heads[0], seed=7).to(device) * 3 if sinks else None),
    )


def expected(call: AttentionCall) -> Tensor:
    """Returns the reference's result on the CPU in float32."""
    out = torch.empty(call.out.shape)
    q, keys, values = (tensor.float().cpu() for tensor in (call.q, call.k_pool, call.v_pool))
    rule = replace(call.rule, sinks=None if call.rule.sinks is None else call.rule.sinks.cpu())
    layers.paged_attention(out.flatten(1), q.flatten(1), keys, values, on(torch.device("cpu"), call.rows), rule)
    return out


def assert_right(call: AttentionCall) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[call.out.dtype]
    torch.testing.assert_close(call.out.float().cpu(), expected(call), atol=tolerance, rtol=tolerance)


def attend(call: AttentionCall) -> None:
    paged_attention(call.out.flatten(1), call.q.flatten(1), call.k_pool, call.v_pool, call.rows, call.rule)


def launch_of(call: AttentionCall, one_token: bool, blocks: Blocks, splits: int) -> tuple[HeadShape, Launch]:
    """Returns a launch with these sizes, independent of the device. A split has at least one block."""
    shape = head_shape(call.q, call.k_pool, call.v_pool)
    rows = len(call.rows.slots)
    heads = min(shape.group, blocks.m)
    tiles = rows if one_token else call.q.shape[0] // (blocks.m // heads) + rows
    programs = tiles * shape.num_kv_heads * -(-shape.group // heads)
    return shape, Launch(0, rows, one_token, blocks, heads, tiles, programs, splits, 1)


def run(call: AttentionCall, one_token: bool, blocks: Blocks, splits: int, merge_apart: bool = False) -> AttentionScratch:
    shape, launch = launch_of(call, one_token, blocks, splits)
    scratch = allocate_scratch(launch.scratch_lanes, launch.counters, shape.value_dim, call.out.device)
    scratch.partials.fill_(torch.nan)
    scratch.levels.fill_(torch.nan)
    run_attention(call, shape, launch, scratch, merge_apart)
    assert int(scratch.arrivals.abs().sum()) == 0, "the counters are 0 after a launch"
    return scratch


@pytest.mark.by_day(one_in=4, seed=1)
@pytest.mark.parametrize(
    ("heads", "dims", "page_size"),
    [
        ((4, 2), (24, 24), 4),
        ((7, 1), (64, 64), 16),
        ((4, 2), (24, 16), 1),
        ((6, 3), (16, 40), 4),
        ((2, 1), (128, 128), 4),
    ],
)
@pytest.mark.parametrize("shapes", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_paged_attention_matches_the_reference(
    shapes: Shapes, heads: tuple[int, int], dims: tuple[int, int], page_size: int, device: torch.device
) -> None:
    call = case(shapes, heads, dims, page_size, device)
    attend(call)
    assert_right(call)


@pytest.mark.by_day(one_in=4, seed=5)
@each_pair(dtype=[torch.float16, torch.bfloat16], shapes={"mixed": MIXED, "decodes": DECODES}, head_dim=[24, 128])
def test_paged_attention_matches_the_reference_in_half_precision(
    shapes: Shapes, dtype: torch.dtype, head_dim: int, device: torch.device
) -> None:
    call = case(shapes, (4, 2), (head_dim, head_dim), 16, device, dtype=dtype, sinks=True)
    attend(call)
    assert_right(call)


KINDS = {
    "window-1": {"window": 1},
    "window-6": {"window": 6},
    "window-70": {"window": 70},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 20, "softcap": 2.0, "sinks": True},
}


@pytest.mark.by_day(one_in=2, seed=74)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("window-6", "sinks")])
@pytest.mark.parametrize("shapes", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_paged_attention_matches_the_reference_with_window_softcap_and_sinks(
    shapes: Shapes, kind: str, device: torch.device
) -> None:
    call = case(shapes, (4, 2), (16, 16), 4, device, **KINDS[kind])  # type: ignore[arg-type]
    attend(call)
    assert_right(call)


@pytest.mark.by_day(one_in=2, seed=58)
@pytest.mark.parametrize(
    ("kind", "splits", "merge_apart"),
    [("sinks", 1, False), ("all", 2, False), ("all", 5, True), ("window-6", 5, False)],
)
@pytest.mark.parametrize(("shapes", "one_token"), [(MIXED, False), (DECODES, True)], ids=["mixed", "decodes"])
def test_attention_matches_the_reference_when_keys_are_split(
    shapes: Shapes, one_token: bool, splits: int, kind: str, merge_apart: bool, device: torch.device
) -> None:
    call = case(shapes, (6, 2), (16, 24), 4, device, **KINDS[kind])  # type: ignore[arg-type]
    run(call, one_token, Blocks(16, 16, 4, 2), splits, merge_apart)
    assert_right(call)


def test_attention_uses_fewer_splits_when_the_context_is_short(device: torch.device) -> None:
    """A row has at most 5 splits, each of one or more blocks of 16 positions. So 33 positions need 3 splits.

    5 positions need one block, whose result is stored directly.
    """
    call = case([(32, 1), (4, 1)], (1, 1), (16, 16), 4, device)
    scratch = run(call, True, Blocks(16, 16, 4, 1), 5)
    written = ~scratch.levels.view(2, 5, 16)[:, :, 0].isnan()
    assert written.tolist() == [[True] * 3 + [False] * 2, [False] * 5]
    assert_right(call)


LONG, SHORT = 5000, 40
UNEVEN: Shapes = [(SHORT + row % 7, 1) for row in range(20)] + [(LONG - 1, 1)] + [(row % 3, 1) for row in range(20)]


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_decode_plan_splits_a_long_row_among_short_rows(kind: str, device: torch.device) -> None:
    """When a captured step is planned, only its number of rows is known. The short rows are not split."""
    call = case(UNEVEN, (4, 1), (16, 16), 4, device, **KINDS.get(kind, {}))  # type: ignore[arg-type]
    call.rows.slots[3], call.rows.slots[30] = -1, -1  # padding
    shape = head_shape(call.q, call.k_pool, call.v_pool)
    launch = plan_decode(shape, 0, len(UNEVEN), 1 << 15, 4)
    scratch = allocate_scratch(launch.scratch_lanes, launch.counters, 16, device)
    scratch.levels.fill_(torch.nan)
    for _ in range(1 + (kind == "plain")):  # the second launch uses the counters of the first
        run_attention(call, shape, launch, scratch)
        assert int(scratch.arrivals.abs().sum()) == 0
    live = [row for row in range(len(UNEVEN)) if row not in (3, 30)]
    torch.testing.assert_close(call.out[live].float().cpu(), expected(call)[live], atol=2e-5, rtol=2e-5)
    assert not call.out.isnan().any()
    splits = int((~scratch.levels.view(-1, launch.blocks.m)[:, 0].isnan()).sum())
    assert splits == (0 if call.rule.window else -(-LONG // 256)), "each split but the last has 256 positions"


@triton.jit
def _dealt_kernel(found, extra, num_rows, slots, starts, window, HAS_WINDOW: tl.constexpr):
    item = tl.program_id(0)
    row, dealt, split, share = deal_splits(item, extra, 1, num_rows, slots, starts, window, 16, 2, 8, HAS_WINDOW)
    target = found + item * 4
    tl.store(target, row)
    tl.store(target + 1, dealt)
    tl.store(target + 2, split)
    tl.store(target + 3, share)


MANY_ROWS = pytest.param(
    270,
    33,
    0,
    marks=pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1"),
)


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize(("rows", "extra", "window"), [(1, 1, 0), (5, 3, 0), (5, 40, 0), MANY_ROWS, (9, 30, 100)])
def test_each_split_is_assigned_to_one_program(rows: int, extra: int, window: int, device: torch.device) -> None:
    """The first row is row 1. A block has 16 positions. A row has at most 8 splits, each but the last with 2 or more blocks."""
    rng = torch.Generator().manual_seed(rows + extra)
    starts = (torch.rand(rows + 1, generator=rng) ** 6 * 3000).int()
    slots = torch.where(torch.rand(rows + 1, generator=rng) < 0.2, -1, 0).int()
    found = torch.empty(rows + extra, 4, dtype=torch.int32, device=device)
    _dealt_kernel[rows + extra,](found, extra, rows, slots.to(device), starts.to(device), window, window > 0)
    spans = [
        min(int(start) + 1, window or 1 << 30) if slot >= 0 else 0 for slot, start in zip(slots[1:], starts[1:], strict=True)
    ]
    blocks = [-(-span // 16) for span in spans]
    share = max(-(-sum(blocks) // extra), 2)
    expected, dealt = [], 0
    for row, count in enumerate(blocks):
        each = max(-(-count // min(max(-(-count // share), 1), 8)), 1)
        used = max(-(-count // each), 1)
        expected += [[row, dealt, split, share] for split in range(used)]
        dealt += used - 1
    assert dealt <= extra
    assert found[: len(expected)].tolist() == expected
    assert set(found[len(expected) :, 0].tolist()) <= {rows}, "the remaining programs have no row"


@pytest.mark.by_day(one_in=2)
@each_value(lanes=[16, 32, 128], splits=[0, 3])
def test_attention_matches_the_reference_for_any_row_length(lanes: int, splits: int, device: torch.device) -> None:
    """A row has more or fewer tokens than a tile, or none. With 3 heads, a tile of 16, 32 or 128 lanes has 5, 10 or 42 tokens."""
    call = case([(0, 11), (3, 0), (40, 43), (2, 1), (9, 0), (17, 10)], (3, 1), (16, 16), 4, device, window=30)
    run(call, False, Blocks(lanes, 16, 4, 1), splits)
    assert_right(call)


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("shapes", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_retiled_plan_matches_the_reference(shapes: Shapes, device: torch.device) -> None:
    call = case(shapes, (4, 2), (16, 16), 4, device)
    shape, tokens = head_shape(call.q, call.k_pool, call.v_pool), len(call.q)
    plan = plan_call(shape, call.rows, tokens, 0, device)
    blocks = Blocks(plan.blocks.m, 32, 4, 1)
    launch = replace(retiled(shape, plan, blocks, 3 if plan.splits else 0, tokens), min_blocks=1)
    run_attention(call, shape, launch, allocate_scratch(launch.scratch_lanes, launch.counters, 16, device))
    assert_right(call)


@pytest.mark.by_day(one_in=4, seed=1)
@pytest.mark.parametrize("group", [16, 36])
@pytest.mark.parametrize(("shapes", "one_token"), [([(0, 2), (40, 1)], False), (DECODES, True)], ids=["mixed", "decodes"])
def test_attention_matches_the_reference_when_heads_exceed_lanes(
    shapes: Shapes, one_token: bool, group: int, device: torch.device
) -> None:
    call = case(shapes, (group, 1), (16, 16), 4, device, sinks=True)
    run(call, one_token, Blocks(16, 32, 4, 1), 2)
    assert_right(call)


def test_paged_attention_matches_the_reference_for_more_than_256_rows(device: torch.device) -> None:
    """The batch has more rows than `find_tile` searches at a time."""
    shapes = [(row % 3 + 1, 3 if row in (0, 255, 256, 258) else 0) for row in range(259)]
    call = case(shapes, (2, 1), (16, 16), 4, device)
    run(call, False, Blocks(16, 16, 4, 1), 0)
    assert_right(call)


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("shapes", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_paged_attention_ignores_pages_before_the_window(shapes: Shapes, device: torch.device) -> None:
    """The table entries of these pages are below 0. For such an entry, the kernel would read page 0, which has NaN."""
    call = case(shapes, (4, 2), (16, 16), 4, device, window=6)
    right = expected(call)
    for row, (start, _) in enumerate(shapes):
        call.rows.page_table[int(call.rows.slots[row]), : max(start + 1 - 6, 0) // 4] = -1
    attend(call)
    torch.testing.assert_close(call.out.cpu(), right, atol=2e-5, rtol=2e-5)


def test_paged_attention_reads_page_0_for_entries_below_0(device: torch.device) -> None:
    call = case([(9, 3), (12, 1)], (4, 2), (16, 16), 4, device)
    for pool in (call.k_pool, call.v_pool):
        pool[0] = random(*pool.shape[1:], seed=3).to(device)
    call.rows.page_table[int(call.rows.slots[0]), 1] = -1
    attend(call)
    assert_right(call)


@pytest.mark.parametrize("one_token", [True, False], ids=["decode", "extend"])
def test_attention_ignores_padding_rows(one_token: bool, device: torch.device) -> None:
    """The slot of a padding row is below 0. The results of the other rows do not change."""
    call = case([(30, 1), (0, 1), (7, 1), (0, 1)], (4, 2), (16, 16), 4, device)
    right = expected(call)
    call.rows.slots[1::2] = -1
    call.rows.page_table[-1] = 1 << 30
    run(call, one_token, Blocks(16, 16, 4, 1), 2)
    torch.testing.assert_close(call.out[::2].cpu(), right[::2], atol=2e-5, rtol=2e-5)
    assert not call.out[1::2].isnan().any()


def test_paged_attention_keeps_large_scores_finite(device: torch.device) -> None:
    """Neither large scores nor a larger sink overflow."""
    call = case(MIXED, (2, 1), (16, 16), 4, device)
    call = replace(call, rule=ScoreRule(60.0, sinks=torch.tensor([300.0, -300.0], device=device)))
    attend(call)
    assert_right(call)


@pytest.mark.parametrize("shapes", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_paged_attention_reads_queries_before_keys_and_values(shapes: Shapes, device: torch.device) -> None:
    call = case(shapes, (4, 2), (16, 16), 4, device, window=9)
    tokens = call.q.shape[0]
    qkv = torch.full((tokens, 8 * 16), torch.nan, device=device)
    qkv[:, : 4 * 16] = call.q.view(tokens, -1)
    out = torch.full((tokens, 4 * 16), torch.nan, device=device)
    paged_attention(out, qkv, call.k_pool, call.v_pool, call.rows, call.rule)
    torch.testing.assert_close(out.view(call.out.shape).cpu(), expected(call), atol=2e-5, rtol=2e-5)


def test_attention_reads_strided_queries(device: torch.device) -> None:
    call = case(MIXED, (4, 2), (16, 16), 4, device)
    run(replace(call, q=call.q.transpose(0, 1).contiguous().transpose(0, 1)), False, Blocks(16, 16, 4, 1), 0)
    assert_right(call)


def test_paged_attention_writes_nothing_when_the_batch_is_empty(device: torch.device) -> None:
    call = case([(0, 1)], (4, 2), (16, 16), 4, device)
    nothing = replace(call.rows, slots=call.rows.slots[:0], starts=call.rows.starts[:0], num_tokens=call.rows.num_tokens[:0])
    paged_attention(call.out[:0].flatten(1), call.q[:0].flatten(1), call.k_pool, call.v_pool, nothing, ScoreRule(1.0))
    assert call.out.isnan().all(), "no output was written"


def test_attention_rejects_tensors_that_do_not_fit(device: torch.device) -> None:
    call = case([(0, 2)], (4, 2), (16, 16), 4, device)
    wrong = {
        "heads": replace(call, q=call.q[:, :3], out=call.out[:, :3]),
        "dtype": replace(call, q=call.q.half()),
        "out": replace(call, out=call.out[:, :2]),
        "pools": replace(call, v_pool=call.v_pool[:-1]),
        "sinks": replace(call, rule=ScoreRule(1.0, sinks=torch.zeros(3, device=device))),
        "sinks' dtype": replace(call, rule=ScoreRule(1.0, sinks=torch.zeros(4, device=device, dtype=torch.float16))),
        "strides": replace(call, k_pool=call.k_pool.transpose(1, 2).contiguous().transpose(1, 2)),
    }
    for name, bad in wrong.items():
        with pytest.raises(ValueError):
            run(bad, False, Blocks(16, 16, 4, 1), 0)
            pytest.fail(name)
    shape, launch = launch_of(call, True, Blocks(16, 16, 4, 1), 4)
    with pytest.raises(ValueError, match="scratch"):
        run_attention(call, shape, launch, allocate_scratch(0, 0, shape.value_dim, device))
    with pytest.raises(ValueError, match="merge_apart"):
        run_attention(call, shape, replace(launch, extra=1), None, merge_apart=True)


def test_plans_have_enough_programs_to_fill_the_device() -> None:
    shape = HeadShape(num_kv_heads=8, group=4, head_dim=128, value_dim=128, itemsize=2)
    many = plan_decode(shape, 0, 256, 40960, 132)
    assert (many.splits, many.extra, many.programs) == (1, 132, 388 * 8)  # rows get splits in proportion to their lengths
    assert plan_decode(shape, 0, 2, 40960, 132).extra == 126, "a row has at most 64 splits"
    assert plan_decode(shape, 0, 64, 200, 132).extra == 1, "rows without long contexts are not split"
    assert retiled(shape, many, many.blocks, 2, 256).programs == 256 * 8
    assert plan_decode(shape, 0, 1, 300, 132).splits == 2  # each split but the last has at least 256 positions
    assert plan_decode(shape, 0, 1, 1 << 20, 132).splits == 64
    assert plan_extend(shape, 4, 4 * 2048, 2048, 132).splits == 0
    assert plan_extend(shape, 1, 64, 16384, 132).splits > 1
    assert plan_extend(shape, 64, 64 * 5, 1024, 132).blocks.m == 64  # short rows do not fill wide tiles
    assert choose_splits(1, 1, 1) == 1
