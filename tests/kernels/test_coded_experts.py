"""Experts with weights of 8 and 4 bits equal the elements that the codes stand for. A row's bits depend only on that row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, Scheme
from rootstock_llm.kernels.contracts.ops import SWIGLU, Activation, Kernels, PackedExperts
from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.kernels.cpu.library import CpuKernels
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.reference.coded import with_8_bits
from tests.all_pairs import each_pair
from tests.kernels.coded_weights import SCHEMES, coded

EXPERTS, CHOICES, WIDTH, INNER = 6, 2, 128, 96
CLAMPED = Activation(1.702, 0.9, 1.0)
DTYPES = [torch.float32, torch.bfloat16]
INNER_OF = {0: 96, 32: 96, 64: 192, 128: 128}  # inner sizes that the groups divide


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    return CpuKernels(built_library(), 2)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Layer:
    """Experts of one scheme, and the inputs of a call."""

    def __init__(self, scheme: Scheme, dtype: torch.dtype, rows: int, biases: bool, activation: Activation = SWIGLU) -> None:
        self.inner = INNER_OF[scheme.group]
        self.gate_up = [coded(2 * self.inner, WIDTH, scheme, 2 * seed) for seed in range(EXPERTS)]
        self.down = [coded(WIDTH, self.inner, scheme, 2 * seed + 1) for seed in range(EXPERTS)]
        self.biases = (
            (random(EXPERTS, 2 * self.inner, dtype=dtype, seed=8), random(EXPERTS, WIDTH, dtype=dtype, seed=9))
            if biases
            else (None, None)
        )
        self.activation, self.scheme = activation, scheme
        self.x = random(rows, WIDTH, dtype=dtype, seed=3)
        generator = torch.Generator().manual_seed(rows)
        self.ids = torch.rand(rows, EXPERTS, generator=generator).argsort(-1)[:, :CHOICES].int().contiguous()
        self.weights = torch.rand(rows, CHOICES, generator=generator)

    def packed(self, kernels: Kernels) -> PackedExperts:
        return kernels.pack_experts(self.gate_up, self.biases[0], self.down, self.biases[1], self.activation)

    def computed(self, kernels: Kernels, packed: PackedExperts, rows: slice = slice(None)) -> Tensor:
        x = self.x[rows].contiguous()
        out = torch.empty_like(x)
        kernels.experts(out, x, self.ids[rows].contiguous(), self.weights[rows].contiguous(), packed)
        return out

    def expected(self, rounds: bool) -> Tensor:
        """Returns the output in float64. With `rounds`, the inputs of both projections are rounded to 8 bits."""
        given = with_8_bits(self.x, self.scheme.group) if rounds else self.x
        out = torch.zeros(len(self.x), WIDTH, dtype=torch.float64)
        for expert in range(EXPERTS):
            both = self._projected(given, self.gate_up[expert], self.biases[0], expert)
            gate, up = both.chunk(2, -1)
            a = self.activation
            gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
            hidden = ((up + a.shift) * gate * (a.alpha * gate).sigmoid()).to(self.x.dtype)
            result = self._projected(
                with_8_bits(hidden, self.scheme.group) if rounds else hidden, self.down[expert], self.biases[1], expert
            )
            out += result * ((self.ids == expert) * self.weights).sum(-1, keepdim=True)
        return out

    def _projected(self, x: Tensor, weight: CodedWeight, bias: Tensor | None, expert: int) -> Tensor:
        added = None if bias is None else bias[expert].double()
        return torch.nn.functional.linear(x.double(), weight.unfolded().double(), added)


@pytest.mark.by_day(one_in=2, seed=8)
@each_pair(scheme=SCHEMES, dtype=DTYPES, rows=[1, 3, 8, 40], biases=[False, True], activation=[SWIGLU, CLAMPED])
def test_experts_with_codes_match_their_elements(
    cpu: CpuKernels, scheme: Scheme, dtype: torch.dtype, rows: int, biases: bool, activation: Activation
) -> None:
    layer = Layer(scheme, dtype, rows, biases, activation)
    exact, close = layer.expected(rounds=False), 4e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(
        layer.computed(reference, layer.packed(reference)).double(),
        exact,
        atol=close,
        rtol=close,  # type: ignore[arg-type]
    )
    rounds = dtype == torch.bfloat16 and cpu.rounds_activations
    found = layer.computed(cpu, layer.packed(cpu))
    torch.testing.assert_close(found.double(), layer.expected(rounds), atol=close, rtol=close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_of_experts_with_codes_has_the_same_bits_in_any_batch(cpu: CpuKernels, dtype: torch.dtype) -> None:
    layer = Layer(Scheme(4, 32), dtype, 40, biases=True)
    packed = layer.packed(cpu)
    whole = layer.computed(cpu, packed)
    for first, end in ((0, 1), (3, 9), (7, 20), (39, 40)):
        assert torch.equal(layer.computed(cpu, packed, slice(first, end)), whole[first:end])


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
def test_experts_with_different_schemes_are_refused(cpu: CpuKernels, kernels: str) -> None:
    layer = Layer(Scheme(4, 32), torch.float32, 1, biases=False)
    layer.down[2] = coded(WIDTH, layer.inner, Scheme(8))
    with pytest.raises(ValueError, match="experts must have one scheme"):
        layer.packed(cpu if kernels == "cpp" else reference)  # type: ignore[arg-type]
