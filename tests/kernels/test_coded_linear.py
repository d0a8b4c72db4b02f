"""Compares linear layers with weights of 8 and 4 bits with the elements that the codes stand for, in each kind of kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, Scheme, selected_rows, stacked
from rootstock_llm.kernels.contracts.ops import Kernels, PackedLinear
from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.kernels.cpu.library import CpuKernels
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.reference.coded import with_8_bits
from rootstock_llm.kernels.triton.layers.layers import TritonLayers
from tests.all_pairs import each_pair
from tests.kernels.coded_weights import HALVES, SCHEMES, coded
from tests.kernels.test_deterministic_kernels import assert_rows_alone

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(64, 128), (200, 384), (130, 1024), (2, 256)]


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    return CpuKernels(built_library(), 2)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: Tensor, weight: CodedWeight, bias: Tensor | None, gated: bool) -> Tensor:
    """Returns the layer's output in float64."""
    both = torch.nn.functional.linear(x.double(), weight.dequantized().double(), None if bias is None else bias.double())
    if not gated:
        return both
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def computed(kernels: Kernels, packed: PackedLinear, x: Tensor, gated: bool, dtype: torch.dtype) -> Tensor:
    width = packed.out_features // 2 if gated else packed.out_features
    out = torch.full((len(x), width), -77.0, dtype=dtype)
    (kernels.gated_linear if gated else kernels.linear)(out, x, packed)
    return out


def packer(kernels: Kernels, gated: bool) -> Callable[[CodedWeight, Tensor | None], PackedLinear]:
    return kernels.pack_gated if gated else kernels.pack_linear


@pytest.mark.by_day(one_in=3, seed=5)
@each_pair(
    scheme=SCHEMES,
    dtype=DTYPES,
    rows=[1, 2, 5, 6, 7, 33],
    shape=SHAPES,
    bias=[False, True],
    gated=[False, True],
    wide=[False, True],
)
def test_cpp_layer_matches_the_elements_of_its_codes(
    cpu: CpuKernels,
    scheme: Scheme,
    dtype: torch.dtype,
    rows: int,
    shape: tuple[int, int],
    bias: bool,
    gated: bool,
    wide: bool,
) -> None:
    weight, x = coded(*shape, scheme, seed=rows), random(rows, shape[1], dtype=dtype)
    added = random(shape[0], dtype=dtype, seed=2) if bias else None
    packed = packer(cpu, gated)(weight, added)
    found = computed(cpu, packed, x, gated, torch.float32 if wide else dtype)
    rounded = with_8_bits(x, scheme.group) if dtype == torch.bfloat16 and cpu.rounds_activations else x
    tolerance = 1.6e-2 if found.dtype == torch.bfloat16 else 3e-5
    torch.testing.assert_close(found.double(), exact(rounded, weight, added, gated), atol=tolerance, rtol=tolerance)
    assert packed.data.numel() == -(-shape[0] // 64) * 64 * shape[1] * scheme.bits // 8


@pytest.mark.by_day(one_in=4, seed=6)
@each_pair(scheme=SCHEMES, dtype=DTYPES, rows=[1, 7, 40], shape=SHAPES, bias=[False, True], gated=[False, True])
def test_triton_layer_matches_the_elements_of_its_codes(
    device: torch.device, scheme: Scheme, dtype: torch.dtype, rows: int, shape: tuple[int, int], bias: bool, gated: bool
) -> None:
    kernels = TritonLayers(device, deterministic=bool(rows % 2))
    weight, x = coded(*shape, scheme, seed=rows), random(rows, shape[1], dtype=dtype)
    added = random(shape[0], dtype=dtype, seed=2) if bias else None
    there = CodedWeight(
        weight.codes.to(device), weight.scales.to(device), None if weight.zeros is None else weight.zeros.to(device), scheme
    )
    packed = packer(kernels, gated)(there, None if added is None else added.to(device))
    out = torch.empty(rows, shape[0] // 2 if gated else shape[0], dtype=dtype, device=device)
    (kernels.gated_linear if gated else kernels.linear)(out, x.to(device), packed)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 3e-5
    torch.testing.assert_close(out.double().cpu(), exact(x, weight, added, gated), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("bits", [4, 8])
def test_layer_with_one_scale_per_channel_reads_a_depth_that_no_block_divides(
    cpu: CpuKernels, device: torch.device, bits: int, zero_points: bool
) -> None:
    weight, x = coded(70, 40, Scheme(bits, zero_points=zero_points), seed=1), random(3, 40)
    expected, out = exact(x, weight, None, False), torch.empty(3, 70, device=device)
    kernels, zeros = TritonLayers(device), None if weight.zeros is None else weight.zeros.to(device)
    there = CodedWeight(weight.codes.to(device), weight.scales.to(device), zeros, weight.scheme)
    kernels.linear(out, x.to(device), kernels.pack_linear(there, None))
    for found in (out.cpu(), *(computed(each, each.pack_linear(weight, None), x, False, x.dtype) for each in (cpu, reference))):
        torch.testing.assert_close(found.double(), expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize("form", ["codes", "bfloat16", "float32"])
def test_cpp_layer_of_no_rows_does_nothing(cpu: CpuKernels, form: str, gated: bool) -> None:
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    packed = packer(cpu, gated)(coded(64, 128, Scheme(8)) if form == "codes" else random(64, 128, dtype=dtype), None)
    assert computed(cpu, packed, random(0, 128, dtype=dtype), gated, dtype).shape == (0, 32 if gated else 64)


@each_pair(scheme=SCHEMES, dtype=DTYPES, shape=SHAPES[:2], gated=[False, True])
def test_torch_twin_matches_the_elements_of_its_codes(
    scheme: Scheme, dtype: torch.dtype, shape: tuple[int, int], gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootstock_llm.kernels.reference.coded.MOST_ELEMENTS", 70 * shape[1])  # the channels need several pieces
    weight, x, added = coded(*shape, scheme, seed=3), random(5, shape[1], dtype=dtype), random(shape[0], dtype=dtype, seed=2)
    packed = packer(reference, gated)(weight, added)
    found = computed(reference, packed, x, gated, dtype)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 3e-5
    torch.testing.assert_close(found.double(), exact(x, weight, added, gated), atol=tolerance, rtol=tolerance)
    assert packed.data.numel() == shape[0] * shape[1] * scheme.bits // 8


@pytest.mark.by_day(one_in=4, seed=7)
@each_pair(scheme=SCHEMES, dtype=DTYPES, gated=[False, True])
def test_row_has_the_same_bits_in_any_batch(cpu: CpuKernels, scheme: Scheme, dtype: torch.dtype, gated: bool) -> None:
    packed = packer(cpu, gated)(coded(96, 256, scheme, seed=1), None)
    assert_rows_alone(lambda x: computed(cpu, packed, x, gated, dtype), random(40, 256, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_with_nan_or_infinity_harms_no_other_row(cpu: CpuKernels, dtype: torch.dtype) -> None:
    packed = cpu.pack_linear(coded(64, 256, Scheme(4, 128)), None)
    x = random(5, 256, dtype=dtype)
    clean = computed(cpu, packed, x, False, dtype)
    x[1, 7], x[3, 200] = torch.nan, torch.inf
    found = computed(cpu, packed, x, False, dtype)
    assert torch.equal(found[[0, 2, 4]], clean[[0, 2, 4]])
    assert bool(torch.isnan(found[1]).all()) and not bool(torch.isfinite(found[3]).any())


def test_row_of_zeros_gives_the_bias(cpu: CpuKernels) -> None:
    added = random(64, dtype=torch.bfloat16)
    packed = cpu.pack_linear(coded(64, 256, Scheme(4, 128, zero_points=True)), added)
    found = computed(cpu, packed, torch.zeros(2, 256, dtype=torch.bfloat16), False, torch.bfloat16)
    assert torch.equal(found, added.expand(2, 64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_reads_rows_of_codes(cpu: CpuKernels, dtype: torch.dtype, device: torch.device) -> None:
    weight, ids = coded(130, 64, Scheme(8), seed=4), torch.tensor([0, 129, 63, 64, 127])
    for kernels, there in ((cpu, torch.device("cpu")), (reference, torch.device("cpu")), (TritonLayers(device), device)):
        moved = CodedWeight(weight.codes.to(there), weight.scales.to(there), None, weight.scheme)
        found = torch.empty(len(ids), 64, dtype=dtype, device=there)
        kernels.embedding(found, ids.to(there), kernels.pack_linear(moved, None))
        assert torch.equal(found.cpu(), weight.dequantized()[ids].to(dtype))


def test_group_scales_need_two_bytes_when_bfloat16_represents_them(cpu: CpuKernels) -> None:
    narrow, wide = (cpu.pack_linear(coded(64, 256, Scheme(4, 128), seed), None) for seed in (1, 2))
    assert narrow.scales is not None and wide.scales is not None
    assert (narrow.scales.dtype, wide.scales.dtype) == (torch.bfloat16, torch.float32)


def test_rows_of_codes_are_selected_and_stacked() -> None:
    one, two = (coded(6, 64, Scheme(4, 32, zero_points=True), seed) for seed in (1, 2))
    both, order = stacked([one, two]), torch.tensor([7, 0, 11])
    assert torch.equal(both.dequantized(), torch.cat((one.dequantized(), two.dequantized())))
    chosen = selected_rows(both, order)
    assert isinstance(chosen, CodedWeight) and torch.equal(chosen.dequantized(), both.dequantized()[order])
    with pytest.raises(ValueError, match="the schemes differ: int4 by 32 with zero points, int8 by channel"):
        stacked([one, coded(6, 64, Scheme(8))])


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"bits": 3}, "weights of 3 bits are not supported"),
        ({"bits": 4, "group": 48}, "groups of 48 elements are not supported"),
        ({"bits": 8, "table": HALVES}, "a table has 16 numbers"),
        ({"bits": 4, "table": (200, *HALVES[1:])}, "a table has 16 numbers"),
    ],
    ids=["bits", "group", "table of 8 bits", "table entry"],
)
def test_scheme_that_no_kernel_reads_is_refused(arguments: dict[str, int | tuple[int, ...]], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Scheme(**arguments)  # type: ignore[arg-type]


def test_weight_whose_depth_does_not_fit_the_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="a depth of 96 is not a multiple of 64, as int4 by 64 requires"):
        coded(4, 96, Scheme(4, 64))
    with pytest.raises(ValueError, match="do not fit codes 4 x 64"):
        CodedWeight(torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 2), None, Scheme(8))
