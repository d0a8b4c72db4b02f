"""Each C++ kernel does what its twin in kernels.reference.layers does, over odd shapes, in float32 and bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.contracts.ops import Draws, RaggedRows
from kernels.cpu import load_kernels
from kernels.cpu.build import BuildFailed, built_library
from kernels.cpu.library import CpuKernels
from kernels.reference import layers as reference

DTYPES = [torch.float32, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


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


@every_dtype
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("size", [1, 31, 64, 1000, 1024])
def test_rms_norm(kernels: CpuKernels, dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight = random(rows, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    found, expected = torch.empty_like(x), torch.empty_like(x)
    kernels.rms_norm(found, x, weight, 1e-5)
    reference.rms_norm(expected, x, weight, 1e-5)
    assert_same(found, expected, dtype)


@every_dtype
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("size", [33, 1024])
def test_fused_add_rms_norm(kernels: CpuKernels, dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight = random(rows, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    held, held_too = random(rows, size, dtype=dtype, seed=2), random(rows, size, dtype=dtype, seed=2)
    found, expected = torch.empty_like(x), torch.empty_like(x)
    kernels.fused_add_rms_norm(found, x, held, weight, 1e-6)
    reference.fused_add_rms_norm(expected, x, held_too, weight, 1e-6)
    assert torch.equal(held, held_too)
    assert_same(found, expected, dtype)


@every_dtype
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("size", [1, 17, 768])
def test_silu_and_mul(kernels: CpuKernels, dtype: torch.dtype, rows: int, size: int) -> None:
    x = random(rows, 2 * size, dtype=dtype) * 8
    found, expected = torch.empty(rows, size, dtype=dtype), torch.empty(rows, size, dtype=dtype)
    kernels.silu_and_mul(found, x)
    reference.silu_and_mul(expected, x)
    assert_same(found, expected, dtype)


def test_extremes_survive_activation(kernels: CpuKernels) -> None:
    gate = torch.tensor([-torch.inf, -200.0, -90.0, 0.0, 90.0, 200.0, torch.nan])
    found = torch.empty(1, 7)
    kernels.silu_and_mul(found, torch.cat((gate, torch.ones(7)))[None])
    assert found[0, 1:6].tolist() == pytest.approx([0.0, 0.0, 0.0, 90.0, 200.0], abs=1e-30)
    assert torch.isnan(found[0, 6])


@every_dtype
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 13, 32, 70])
@pytest.mark.parametrize(("outs", "ins"), [(64, 32), (65, 64), (16, 2), (200, 66), (192, 1024)])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_linear(kernels: CpuKernels, dtype: torch.dtype, rows: int, outs: int, ins: int, bias: bool) -> None:
    x, weight = random(rows, ins, dtype=dtype), random(outs, ins, dtype=dtype, seed=1) / ins**0.5
    added = random(outs, dtype=dtype, seed=2) if bias else None
    for out_dtype in {dtype, torch.float32}:
        found, expected = torch.empty(rows, outs, dtype=out_dtype), torch.empty(rows, outs, dtype=out_dtype)
        kernels.linear(found, x, kernels.pack_linear(weight, added))
        reference.linear(expected, x, reference.pack_linear(weight, added))
        assert_same(found, expected, dtype)


@every_dtype
@pytest.mark.parametrize("rows", [1, 6, 9, 32])
@pytest.mark.parametrize(("size", "ins"), [(32, 64), (33, 64), (96, 66), (100, 1024)])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_gated_linear(kernels: CpuKernels, dtype: torch.dtype, rows: int, size: int, ins: int, bias: bool) -> None:
    x, weight = random(rows, ins, dtype=dtype), random(2 * size, ins, dtype=dtype, seed=1) / ins**0.5
    added = random(2 * size, dtype=dtype, seed=2) if bias else None
    found, expected = torch.empty(rows, size, dtype=dtype), torch.empty(rows, size, dtype=dtype)
    kernels.gated_linear(found, x, kernels.pack_gated(weight, added))
    reference.gated_linear(expected, x, reference.pack_gated(weight, added))
    assert_same(found, expected, dtype, scale=2.0)


def ragged(shapes: list[tuple[int, int]], page_size: int, seed: int = 0) -> tuple[RaggedRows, int]:
    """Rows of (start, tokens) on shuffled pages and scattered slots; and how many pages there are."""
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


@every_dtype
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (2, 2, 6), (6, 1, 128)])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rope_write_kv(
    kernels: CpuKernels, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, normed: bool, page_size: int
) -> None:
    rows, num_pages = ragged([(0, 5), (17, 1), (3, 30)], page_size)
    rows.locations[2] = -1
    qkv = random(36, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    norms = (random(head_dim, dtype=dtype, seed=1), random(head_dim, dtype=dtype, seed=2)) if normed else None
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
    "chunk-behind-a-prefix": [(37, 50)],
    "mixed": [(0, 3), (64, 64), (5, 70), (33, 1), (128, 1)],
}


@every_dtype
@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 128), (4, 4, 96), (2, 1, 256), (16, 1, 64), (4, 2, 20)]
)
@pytest.mark.parametrize(("page_size", "window"), [(1, 0), (4, 0), (16, 0), (16, 24), (4, 1), (16, 70)])
def test_paged_attention(
    kernels: CpuKernels, dtype: torch.dtype, batch: str, heads: int, kv_heads: int, head_dim: int, page_size: int, window: int
) -> None:
    rows, num_pages = ragged(BATCHES[batch], page_size)
    num_tokens = int(rows.num_tokens.sum())
    qkv = random(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    keys = torch.full((num_pages, kv_heads, page_size, head_dim), torch.nan, dtype=dtype)  # unwritten memory may hold anything
    values = keys.clone()
    for row, (start, count) in enumerate(BATCHES[batch]):
        places = torch.arange(start + count)
        pages = rows.page_table[int(rows.slots[row]), places // page_size].long()
        keys[pages, :, places % page_size] = random(start + count, kv_heads, head_dim, dtype=dtype, seed=row + 1)
        values[pages, :, places % page_size] = random(start + count, kv_heads, head_dim, dtype=dtype, seed=row + 50)
    found, expected = (torch.empty(num_tokens, heads * head_dim, dtype=dtype) for _ in range(2))
    kernels.paged_attention(found, qkv, keys, values, rows, head_dim**-0.5, window)
    reference.paged_attention(expected, qkv, keys, values, rows, head_dim**-0.5, window)
    assert_same(found, expected, dtype)


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ([0.0, 3.0, 3.0, 1.0], 1),
        ([-torch.inf] * 4, 0),
        ([1.0, torch.nan, 9.0, torch.nan], 1),
        ([torch.inf, torch.nan], 1),
        ([-5.0], 0),
    ],
    ids=["lowest-of-equals", "all-minus-infinity", "nan-wins", "nan-before-infinity", "one"],
)
def test_argmax_cases(kernels: CpuKernels, row: list[float], place: int) -> None:
    assert kernels.argmax(torch.tensor([row])).tolist() == [place]


@pytest.mark.parametrize("size", [1, 100, 4096, 4097, 20001])
def test_argmax(kernels: CpuKernels, size: int) -> None:
    logits = random(5, size)
    assert torch.equal(kernels.argmax(logits), logits.argmax(-1))


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 5001])
@pytest.mark.parametrize("temperature", [1e-6, 0.5, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(-1, 1.0, 0.0), (5, 1.0, 0.0), (200, 1.0, 0.0), (-1, 0.9, 0.0), (-1, 0.0, 0.0), (-1, 1.0, 0.05), (40, 0.8, 0.01)],
)
def test_draw(kernels: CpuKernels, size: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits, count = (random(4, size) * 3).round(decimals=1), 50  # rounded: ties at every cut
    logits[2, 1:] = -torch.inf
    draws = Draws(
        rows=torch.arange(count) % 4,
        temperatures=torch.full((count,), temperature),
        top_ks=torch.full((count,), top_k),
        top_ps=torch.full((count,), top_p),
        min_ps=torch.full((count,), min_p),
        uniforms=torch.linspace(0.001, 0.9999, count, dtype=torch.float64),
    )
    found, expected = kernels.draw(logits, draws), reference.draw(logits, draws)
    assert int((found != expected).sum()) <= 1, "only rounding at a boundary between two tokens may differ"


def test_without_a_compiler_the_reference_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_library() -> None:
        raise BuildFailed("no C++ compiler found")

    monkeypatch.setattr("kernels.cpu.built_library", no_library)
    assert load_kernels(1, torch.bfloat16) is reference
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_wrong_shapes_are_refused(kernels: CpuKernels) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        kernels.silu_and_mul(torch.empty(2, 3), torch.empty(2, 5))
    with pytest.raises(ValueError, match="not contiguous"):
        kernels.rms_norm(torch.empty(4, 2), torch.empty(2, 4).t(), torch.empty(2), 1e-6)
    with pytest.raises(TypeError, match="float32 and bfloat16"):
        kernels.silu_and_mul(torch.empty(1, 1, dtype=torch.float16), torch.empty(1, 2, dtype=torch.float16))
