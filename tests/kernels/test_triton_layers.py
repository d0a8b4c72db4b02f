"""Compares the Triton kernels of a layer with rootstock_llm.kernels.reference.layers, over odd shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.triton.launch import MAX_BLOCK
from rootstock_llm.kernels.triton.layers import linear
from rootstock_llm.kernels.triton.layers.kv_writes import FEW_TOKENS
from rootstock_llm.kernels.triton.layers.layers import TritonLayers
from tests.all_pairs import each_pair, each_value

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
POISON = -77.0

# Only loads and stores of a kernel depend on the dtype, so the cases do not combine all shapes with all dtypes.


@pytest.fixture(scope="module")
def kernels(device: torch.device) -> TritonLayers:
    return TritonLayers(device)


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def guarded(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns a poisoned tensor [rows, columns], and the larger tensor that also has a poisoned row before and after it."""
    whole = torch.full((rows + 2, columns), POISON, dtype=dtype, device=device)
    return whole[1:-1], whole


def assert_unharmed(whole: Tensor) -> None:
    assert bool((whole[0] == POISON).all()) and bool((whole[-1] == POISON).all())


def assert_same(found: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    tolerance = TOLERANCES[dtype] * scale
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.by_day(one_in=3, seed=2)
@each_value(dtype=DTYPES, shape=[(1, 1), (3, 7), (5, 64), (2, 1000), (1, 16384)])
def test_rms_norm_matches_the_reference(
    kernels: TritonLayers, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    rows, size = shape
    x, weight = random(rows, size, dtype=dtype, device=device), random(size, dtype=torch.float32, device=device, seed=1)
    (found, whole), expected = guarded(rows, size, dtype, device), torch.empty_like(x)
    kernels.rms_norm(found, x, weight, 1e-5)
    reference.rms_norm(expected, x, weight, 1e-5)
    assert_same(found, expected, dtype)
    assert_unharmed(whole)


@pytest.mark.by_day(one_in=2, seed=2)
@each_value(dtype=DTYPES, shape=[(1, 1000), (4, 33), (2, 64)])
def test_fused_add_rms_norm_matches_the_reference(
    kernels: TritonLayers, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    rows, size = shape
    x, weight = random(rows, size, dtype=dtype, device=device), random(size, dtype=torch.float32, device=device, seed=1)
    residual, whole = guarded(rows, size, dtype, device)
    residual.copy_(random(rows, size, dtype=dtype, device=device, seed=2))
    expected_residual, found, expected = residual.clone(), torch.full_like(x, POISON), torch.empty_like(x)
    kernels.fused_add_rms_norm(found, x, residual, weight, 1e-6)
    reference.fused_add_rms_norm(expected, x, expected_residual, weight, 1e-6)
    if dtype == torch.bfloat16 and not x.is_cuda:  # Triton's interpreter truncates instead of rounding
        assert_same(residual, expected_residual, dtype)
    else:
        assert torch.equal(residual, expected_residual)
    assert_same(found, expected, dtype)
    assert_unharmed(whole)


def test_fused_add_rms_norm_reads_the_rounded_residual(kernels: TritonLayers, device: torch.device) -> None:
    """In the first column, 1 + 2^-11 rounds to 1 in float16, so neither the residual nor the norm contains the addend."""
    x = torch.full((1, 2), 2.0**-11, dtype=torch.float16, device=device)
    residual = torch.tensor([[1.0, 0.0]], dtype=torch.float16, device=device)
    weight, found = torch.full((2,), 1.0, device=device), torch.empty_like(x)
    kernels.fused_add_rms_norm(found, x, residual, weight, 0.0)
    assert residual.tolist() == [[1.0, 2.0**-11]]
    assert found.tolist() == torch.tensor([[2.0**0.5, 2.0**-10.5]], dtype=torch.float16).tolist()


@pytest.mark.by_day(one_in=3, seed=1)
@each_pair(dtype=DTYPES, shape=[(1, 1), (3, 17), (2, 1030)], name=["silu_and_mul", "gelu_and_mul"])
def test_activation_matches_the_reference(
    kernels: TritonLayers, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], name: str
) -> None:
    rows, size = shape
    x = random(rows, 2 * size, dtype=dtype, device=device) * 8
    (found, whole), expected = guarded(rows, size, dtype, device), torch.empty(rows, size, dtype=dtype, device=device)
    getattr(kernels, name)(found, x)
    getattr(reference, name)(expected, x)
    assert_same(found, expected, dtype)
    assert_unharmed(whole)


@pytest.mark.by_day(one_in=2, seed=1)
@each_value(dtype=DTYPES, shape=[(1, 1), (3, 1030)])
def test_sigmoid_mul_matches_the_reference(
    kernels: TritonLayers, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    gate, (found, whole) = random(*shape, dtype=dtype, device=device) * 8, guarded(*shape, dtype, device)
    found.copy_(random(*shape, dtype=dtype, device=device, seed=1))
    expected = found.clone()
    kernels.sigmoid_mul(found, gate)
    reference.sigmoid_mul(expected, gate)
    assert_same(found, expected, dtype)
    assert_unharmed(whole)


def test_silu_and_mul_keeps_extreme_values(kernels: TritonLayers, device: torch.device) -> None:
    gate = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0, torch.nan])
    found = torch.empty(1, 6, device=device)
    kernels.silu_and_mul(found, torch.cat((gate, torch.ones(6)))[None].to(device))
    assert found[0, :5].tolist() == pytest.approx([0.0, 0.0, 0.0, 90.0, 200.0], abs=1e-30)
    assert torch.isnan(found[0, 5])


@pytest.mark.by_day(one_in=2, seed=3)
@each_value(dtype=DTYPES, rows=[0, 1, 7, 7], weights=[(65, 64), (10, 3)], bias=[False, False, True, True])
def test_linear_layer_matches_float64(
    kernels: TritonLayers, device: torch.device, dtype: torch.dtype, rows: int, weights: tuple[int, int], bias: bool
) -> None:
    outs, ins = weights
    x = random(rows, ins, dtype=dtype, device=device)
    weight = random(outs, ins, dtype=dtype, device=device, seed=1) / ins**0.5
    added = random(outs, dtype=dtype, device=device, seed=2) if bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
    packed = kernels.pack_linear(weight, added)
    for out_dtype in {dtype, torch.float32}:
        found = torch.full((rows, outs), POISON, dtype=out_dtype, device=device)
        kernels.linear(found, x, packed)
        assert_same(found, exact, out_dtype)
    if outs % 2 == 0:
        gated = torch.full((rows, outs // 2), POISON, dtype=dtype, device=device)
        kernels.gated_linear(gated, x, kernels.pack_gated(weight, added))
        gate, up = exact.chunk(2, dim=-1)
        assert_same(gated, torch.nn.functional.silu(gate) * up, dtype, scale=2.0)


@pytest.mark.by_day(one_in=2, seed=5)
@each_value(dtype=DTYPES, weights=[(9, 130), (5, 64), (70, 33)], bias=[False, True])
def test_linear_layer_with_one_row_matches_float64_when_the_depth_needs_several_blocks(
    kernels: TritonLayers,
    device: torch.device,
    dtype: torch.dtype,
    weights: tuple[int, int],
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outs, ins = weights
    monkeypatch.setattr(linear, "MAX_DEPTH", 64)  # the depth needs several blocks
    x = random(1, ins, dtype=dtype, device=device)
    weight = random(outs, ins, dtype=dtype, device=device, seed=1) / ins**0.5
    added = random(outs, dtype=dtype, device=device, seed=2) if bias else None
    found, whole = guarded(1, outs, dtype, device)
    linear.one_row_linear(found, x, kernels.pack_linear(weight, added))
    assert_same(found, torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double()), dtype)
    assert_unharmed(whole)
    with pytest.raises(ValueError, match="do not fit"):
        linear.one_row_linear(
            torch.empty(2, outs, dtype=dtype, device=device), x.expand(2, ins), kernels.pack_linear(weight, added)
        )


def placed(locations: list[int], positions: list[int], device: torch.device) -> RaggedRows:
    """Returns rows with positions and locations only."""
    empty = torch.empty(0, dtype=torch.int32, device=device)
    return RaggedRows(
        page_table=empty.view(0, 1),
        slots=empty,
        starts=empty,
        num_tokens=empty,
        offsets=empty,
        positions=torch.tensor(positions, dtype=torch.int32, device=device),
        locations=torch.tensor(locations, dtype=torch.int64, device=device),
        max_context=0,
    )


def scattered(tokens: int, cells: int, device: torch.device) -> RaggedRows:
    """Returns tokens at random locations. Every third token has no location."""
    order = torch.randperm(cells, generator=torch.Generator().manual_seed(5)).tolist()
    locations = [-1 if token % 3 == 2 else order[token] for token in range(tokens)]
    return placed(locations, [(7 * token) % 20 for token in range(tokens)], device)


@each_value(
    dtype=DTYPES,
    shape=[
        (1, 3, 1, 16, 1, True),
        (5, 3, 3, 32, 4, False),
        (4, 14, 2, 80, 16, True),
        (2, 8, 2, 128, 4, True),
        (3, 5, 5, 6, 3, True),
        (FEW_TOKENS + 1, 5, 5, 4, 16, True),
    ],
)
def test_rope_write_kv_kernel_matches_the_reference(
    kernels: TritonLayers, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int, int, bool]
) -> None:
    """`shape` is (tokens, heads, KV heads, head size, tokens per page, whether there are norms)."""
    tokens, heads, kv_heads, dim, page_size, normed = shape
    pages = -(-2 * tokens // page_size) + 1
    rows = scattered(tokens, pages * page_size, device)
    width = (heads + 2 * kv_heads) * dim
    cos_sin = random(20, dim, dtype=torch.float32, device=device, seed=3)
    norms = tuple(random(dim, dtype=torch.float32, device=device, seed=seed) for seed in (1, 2)) if normed else None
    given, results = random(tokens, width, dtype=dtype, device=device), []
    for which in (kernels, reference):
        mine, whole = guarded(tokens, width, dtype, device)
        mine.copy_(given)
        pools = [torch.full((pages, kv_heads, page_size, dim), POISON, dtype=dtype, device=device) for _ in range(2)]
        which.rope_write_kv(mine, norms, 1e-6, cos_sin, rows, *pools)
        assert_unharmed(whole)
        results.append((mine[:, : heads * dim], *pools))
        assert torch.equal(mine[:, heads * dim :], given[:, heads * dim :])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found == POISON, expected == POISON)
        assert_same(found, expected, dtype, scale=4.0)
    assert torch.equal(results[0][2], results[1][2])  # values are copied, so they are equal


def test_rope_write_kv_kernel_accepts_padding_tokens_beyond_the_rotation_table(
    kernels: TritonLayers, device: torch.device
) -> None:
    rows, rotations = placed([-1, 0], [3, 1], device), torch.full((4, 4), torch.nan, device=device)
    rotations[:2] = 1.0
    qkv, pool = torch.ones(2, 12, device=device), torch.full((1, 1, 1, 4), POISON, device=device)
    kernels.rope_write_kv(qkv, None, 1e-6, rotations[:2], rows, pool, pool.clone())
    assert pool.flatten().tolist() == [0.0, 0.0, 2.0, 2.0]
    assert qkv[:, :4].tolist() == [[0.0, 0.0, 2.0, 2.0]] * 2


@pytest.mark.by_day(one_in=2, seed=2)
@each_value(dtype=DTYPES, shape=[(1, 1, 3, 16, 1), (7, 3, 24, 10, 4), (4, 6, 576, 512, 2)])
def test_write_kv_kernel_reads_strided_inputs(
    kernels: TritonLayers, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int, int]
) -> None:
    """`shape` is (tokens, KV heads, key size, value size, tokens per page)."""
    tokens, kv_heads, key_dim, value_dim, page_size = shape
    pages = -(-2 * tokens // page_size) + 1
    rows = scattered(tokens, pages * page_size, device)
    keys = random(kv_heads, tokens, key_dim, dtype=dtype, device=device).transpose(0, 1)
    values = random(tokens, value_dim, kv_heads, dtype=dtype, device=device, seed=1).transpose(1, 2)
    results = []
    for which in (kernels, reference):
        pools = [
            torch.full((pages, kv_heads, page_size, dim), POISON, dtype=dtype, device=device) for dim in (key_dim, value_dim)
        ]
        which.write_kv(keys, values, rows, *pools)
        results.append(pools)
    assert all(torch.equal(found, expected) for found, expected in zip(*results, strict=True))


def test_layer_kernels_write_nothing_when_the_batch_is_empty(kernels: TritonLayers, device: torch.device) -> None:
    x, weight, rows = torch.empty(0, 8, device=device), torch.ones(8, device=device), placed([], [], device)
    pool = torch.full((1, 1, 1, 2), POISON, device=device)
    kernels.rms_norm(torch.empty_like(x), x, weight, 1e-6)
    kernels.fused_add_rms_norm(torch.empty_like(x), x, torch.empty_like(x), weight, 1e-6)
    kernels.silu_and_mul(torch.empty(0, 4, device=device), x)
    kernels.rope_write_kv(x, None, 1e-6, torch.ones(1, 2, device=device), rows, pool, pool.clone())
    kernels.write_kv(torch.empty(0, 1, 2, device=device), torch.empty(0, 1, 2, device=device), rows, pool, pool.clone())
    assert bool((pool == POISON).all())


def test_layer_kernels_reject_shapes_that_do_not_fit(kernels: TritonLayers, device: torch.device) -> None:
    def blank(*shape: int) -> Tensor:
        return torch.empty(shape, device=device)

    rows, pool = placed([0], [0], device), blank(1, 1, 1, 4)
    packed = kernels.pack_linear(blank(3, 4), None)
    wrong = [
        lambda: kernels.rms_norm(blank(2, 4), blank(2, 4), blank(3), 1e-6),
        lambda: kernels.rms_norm(blank(2, 4), blank(4, 2).t(), blank(4), 1e-6),
        lambda: kernels.rms_norm(blank(1, MAX_BLOCK + 1), blank(1, MAX_BLOCK + 1), blank(MAX_BLOCK + 1), 1e-6),
        lambda: kernels.fused_add_rms_norm(blank(2, 4), blank(2, 4), blank(1, 4), blank(4), 1e-6),
        lambda: kernels.silu_and_mul(blank(2, 4), blank(2, 4)),
        lambda: kernels.linear(blank(2, 3), blank(2, 5), packed),
        lambda: kernels.linear(blank(2, 3).half(), blank(2, 4), packed),
        lambda: kernels.rope_write_kv(blank(1, 14), None, 1e-6, blank(1, 4), rows, pool, pool),
        lambda: kernels.rope_write_kv(blank(2, 12), None, 1e-6, blank(1, 4), rows, pool, pool),
        lambda: kernels.rope_write_kv(blank(1, 12), None, 1e-6, blank(1, 6), rows, pool, pool),
        lambda: kernels.write_kv(blank(1, 2, 4), blank(1, 1, 4), rows, pool, pool),
        lambda: kernels.write_kv(blank(1, 1, 4), blank(1, 1, 3), rows, pool, pool),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match=r"do not fit|not contiguous|more than"):
            call()
