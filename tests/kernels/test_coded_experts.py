"""Experts with weights of 8 and 4 bits equal the elements that the codes stand for. A row's bits depend only on that row.

The kernels read only the codes of chosen experts.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, Scheme
from rootstock_llm.kernels.contracts.ops import SWIGLU, Activation, Kernels, PackedExperts
from rootstock_llm.kernels.cpu import library
from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.kernels.cpu.library import CpuKernels
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.reference.coded import with_8_bits
from rootstock_llm.kernels.triton.layers.layers import TritonLayers
from tests.all_pairs import each_pair
from tests.kernels.coded_weights import SCHEMES, coded
from tests.kernels.test_experts import CLAMPED, Case, assert_close, case_of, unused_memory

DTYPES = [torch.float32, torch.bfloat16]
DETERMINISTIC_SCHEMES = [Scheme(8), Scheme(4, 32, zero_points=True)]


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels(built_library(), 2, deterministic=True)


@dataclass(frozen=True)
class CodedCase:
    """The inputs of one call, and the codes of its weights. The weights in `case` are the elements that the codes stand for."""

    case: Case
    gate_up: list[CodedWeight]
    down: list[CodedWeight]

    def packed(self, kernels: Kernels) -> PackedExperts:
        case = self.case
        return kernels.pack_experts(self.gate_up, case.gate_up_bias, self.down, case.down_bias, case.activation)

    def computed(self, kernels: CpuKernels, rows: slice = slice(None), packed: PackedExperts | None = None) -> Tensor:
        return self.case.computed(kernels, rows, packed or self.packed(kernels))

    def with_8_bits(self) -> Tensor:
        """Returns the output if the inputs of both products are rounded to 8 bits."""
        case, out = self.case, torch.zeros_like(self.case.x, dtype=torch.float32)
        x, activation = with_8_bits(case.x, self.gate_up[0].scheme.group), case.activation
        for choice in range(case.ids.shape[1]):
            for row, expert in enumerate(case.ids[:, choice].tolist()):
                both = self.gate_up[expert].dequantized() @ x[row]
                gate, up = (both if case.gate_up_bias is None else both + case.gate_up_bias[expert].float()).chunk(2)
                gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
                hidden = ((up + activation.shift) * gate * (activation.alpha * gate).sigmoid()).to(case.x.dtype)
                down = self.down[expert].dequantized() @ with_8_bits(hidden[None], self.down[0].scheme.group)[0]
                result = down if case.down_bias is None else down + case.down_bias[expert].float()
                out[row] += case.weights[row, choice] * result
        return out.to(case.x.dtype)


def coded_case(
    schemes: tuple[Scheme, Scheme],
    dtype: torch.dtype,
    experts: int = 5,
    inner: int = 128,
    width: int = 256,
    rows: int = 20,
    choices: int = 2,
    biases: bool = True,
    activation: Activation = CLAMPED,
) -> CodedCase:
    """Returns a case with schemes of gate and up, and of down."""
    case = case_of(random.Random(rows), dtype, experts, inner, width, rows, choices, biases, activation)
    gate_up = [coded(2 * inner, width, schemes[0], seed=expert) for expert in range(experts)]
    down = [coded(width, inner, schemes[1], seed=expert + 100) for expert in range(experts)]
    elements = (torch.stack([each.dequantized() for each in part]) for part in (gate_up, down))
    return CodedCase(replace(case, gate_up=next(elements), down=next(elements)), gate_up, down)


def assert_equals_elements(found: Tensor, case: CodedCase, rounds: bool) -> None:
    """Checks an output against the twin's, or, if `rounds`, against products whose inputs are rounded to 8 bits."""
    assert_close(found, case.with_8_bits() if rounds else case.computed(reference))  # type: ignore[arg-type]


@pytest.mark.by_day(one_in=2, seed=3)
@each_pair(
    gate_up=SCHEMES,
    down=SCHEMES,
    dtype=DTYPES,
    rows=[1, 7, 40],
    sizes=[(128, 256), (384, 128), (128, 384)],
    biases=[False, True],
    activation=[SWIGLU, CLAMPED],
)
def test_cpp_experts_equal_the_elements_of_their_codes(
    kernels: CpuKernels,
    gate_up: Scheme,
    down: Scheme,
    dtype: torch.dtype,
    rows: int,
    sizes: tuple[int, int],
    biases: bool,
    activation: Activation,
) -> None:
    case = coded_case((gate_up, down), dtype, 4, *sizes, rows, 3, biases, activation)
    packed = case.packed(kernels)
    assert_equals_elements(case.computed(kernels, packed=packed), case, dtype == torch.bfloat16 and kernels.rounds_activations)
    expected = sum(
        4 * shape * scheme.bits // 8 for shape, scheme in ((2 * sizes[0] * sizes[1], gate_up), (sizes[0] * sizes[1], down))
    )
    assert packed.gate_up.data.nbytes + packed.down.data.nbytes == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("scheme", "inner", "width"), [(Scheme(8), 40, 72), (Scheme(4, 32), 96, 160), (Scheme(4), 8, 200)], ids=str
)
def test_cpp_experts_equal_the_elements_of_codes_that_do_not_fill_blocks(
    kernels: CpuKernels, scheme: Scheme, inner: int, width: int, dtype: torch.dtype
) -> None:
    case = coded_case((scheme, scheme), dtype, inner=inner, width=width)
    assert_equals_elements(case.computed(kernels), case, dtype == torch.bfloat16 and kernels.rounds_activations)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_torch_twin_equals_experts_with_the_elements_of_the_codes(scheme: Scheme, dtype: torch.dtype) -> None:
    case = coded_case((scheme, scheme), dtype, rows=5)
    plain = replace(case.case, gate_up=case.case.gate_up.float(), down=case.case.down.float())
    assert_close(case.computed(reference), plain.expected())  # type: ignore[arg-type]


@pytest.mark.by_day(one_in=7, seed=1)
@each_pair(gate_up=SCHEMES, down=SCHEMES[::3], dtype=DTYPES, biases=[False, True])
def test_triton_experts_equal_the_elements_of_their_codes(
    device: torch.device, gate_up: Scheme, down: Scheme, dtype: torch.dtype, biases: bool
) -> None:
    case = coded_case((gate_up, down), dtype, experts=2, inner=128, width=128, rows=2, biases=biases)
    kernels = TritonLayers(device, deterministic=True)

    def there(weight: CodedWeight) -> CodedWeight:
        zeros = None if weight.zeros is None else weight.zeros.to(device)
        return replace(weight, codes=weight.codes.to(device), scales=weight.scales.to(device), zeros=zeros)

    added = [None if each is None else each.to(device) for each in (case.case.gate_up_bias, case.case.down_bias)]
    matrices = [[there(each) for each in part] for part in (case.gate_up, case.down)]
    packed = kernels.pack_experts(matrices[0], added[0], matrices[1], added[1], case.case.activation)
    x, ids, weights = (each.to(device) for each in (case.case.x, case.case.ids, case.case.weights))
    out = torch.empty_like(x)
    kernels.experts(out, x, ids, weights, packed)
    assert_equals_elements(out.cpu(), case, rounds=False)


def test_triton_layer_equals_the_elements_of_codes_whose_depth_does_not_fill_a_block(device: torch.device) -> None:
    weight, x = coded(70, 72, Scheme(4)), torch.randn(3, 72, generator=torch.Generator().manual_seed(1))
    moved, out = (
        replace(weight, codes=weight.codes.to(device), scales=weight.scales.to(device)),
        torch.empty(3, 70, device=device),
    )
    kernels = TritonLayers(device)
    kernels.linear(out, x.to(device), kernels.pack_linear(moved, None))
    torch.testing.assert_close(out.cpu(), x @ weight.dequantized().t(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", DETERMINISTIC_SCHEMES, ids=str)
def test_coded_experts_give_the_same_bits_for_any_rows_and_expert_ids(
    kernels: CpuKernels, scheme: Scheme, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = coded_case((scheme, scheme), dtype, experts=6, rows=40, choices=3)
    packed = case.packed(kernels)
    whole = case.computed(kernels, packed=packed)
    for part in [slice(row, row + 1) for row in range(40)] + [slice(first, first + 19) for first in (0, 5, 20)]:
        assert torch.equal(case.computed(kernels, part, packed), whole[part]), part
    order = [3, 0, 5, 1, 4, 2]  # new expert i is the old expert order[i]
    inputs = case.case
    assert inputs.gate_up_bias is not None and inputs.down_bias is not None
    ids = torch.tensor(order).argsort()[inputs.ids.long()].int()
    renamed = replace(inputs, gate_up_bias=inputs.gate_up_bias[order], down_bias=inputs.down_bias[order], ids=ids)
    moved = CodedCase(renamed, [case.gate_up[each] for each in order], [case.down[each] for each in order])
    assert torch.equal(moved.computed(kernels), whole)
    monkeypatch.setattr(library, "MOST_ROWS", 25)
    monkeypatch.setattr(library, "LEAST_ROWS", 8)
    assert torch.equal(case.computed(kernels, packed=packed), whole)


def test_row_that_is_not_finite_harms_no_other_row(kernels: CpuKernels) -> None:
    case = coded_case((Scheme(8), Scheme(4, 64)), torch.bfloat16, rows=4)
    expected = case.computed(kernels)
    case.case.x[1, 5], case.case.x[2, 9] = torch.nan, torch.inf
    found = case.computed(kernels)
    assert torch.equal(found[[0, 3]], expected[[0, 3]]) and not found[[1, 2]].isfinite().any()


@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step_of_one_row_reads_no_codes_of_other_experts(kernels: CpuKernels, dtype: torch.dtype, scheme: Scheme) -> None:
    """Denies the process all access to the other experts' codes, and makes their scales NaN."""
    case = coded_case((scheme, scheme), dtype, experts=16, inner=128, width=512, rows=1, choices=3)
    packed, expected = case.packed(kernels), case.computed(kernels)
    chosen = case.case.ids[0].tolist()
    others = [expert for expert in range(16) if expert not in chosen]
    for part in (packed.gate_up, packed.down):
        assert part.scales is not None
        part.scales[others] = torch.nan
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    unused = list(unused_memory(packed, chosen))
    assert sum(size for _, size in unused) > 0.7 * (packed.gate_up.data.nbytes + packed.down.data.nbytes)
    try:
        assert not any(protect(address, size, 0) for address, size in unused)
        found = case.computed(kernels, packed=packed)
    finally:
        assert not any(protect(address, size, mmap.PROT_READ | mmap.PROT_WRITE) for address, size in unused)
    assert torch.equal(found, expected)


class OneByOne:
    """Codes that are created when they are indexed, as those of a file."""

    def __init__(self, matrices: Sequence[CodedWeight]) -> None:
        self._matrices = matrices
        self._made: list[weakref.ref[Tensor]] = []
        self.most = 0  # largest number of matrices in memory at a time

    def __len__(self) -> int:
        return len(self._matrices)

    def __getitem__(self, expert: int, /) -> CodedWeight:
        made = replace(self._matrices[expert], codes=self._matrices[expert].codes.clone())
        self._made.append(weakref.ref(made.codes))
        self.most = max(self.most, sum(each() is not None for each in self._made))
        return made


def test_packing_has_the_codes_of_at_most_two_experts_in_memory(kernels: CpuKernels) -> None:
    case = coded_case((Scheme(4, 64), Scheme(4, 32)), torch.float32)
    gate_up, down = OneByOne(case.gate_up), OneByOne(case.down)
    packed = kernels.pack_experts(gate_up, case.case.gate_up_bias, down, case.case.down_bias, CLAMPED)
    assert torch.equal(case.computed(kernels, packed=packed), case.computed(kernels))
    assert gate_up.most <= 2 and down.most <= 2


@pytest.mark.parametrize("scheme", [Scheme(8), Scheme(4, 64)], ids=str)
def test_experts_with_and_without_zero_points_are_packed_together(kernels: CpuKernels, scheme: Scheme) -> None:
    """A reader omits the zero points of a matrix if all of them equal Scheme.zero."""
    case = coded_case((scheme, replace(scheme, zero_points=True)), torch.float32)
    down = [
        each if number % 2 else each.with_zeros() for number, each in enumerate(coded_case((scheme, scheme), torch.float32).down)
    ]
    for each in (kernels, reference):
        mixed = CodedCase(
            case.case, [each.with_zeros() if number == 3 else each for number, each in enumerate(case.gate_up)], down
        )
        plain = replace(mixed, gate_up=case.gate_up, down=[weight.with_zeros().without_zeros() for weight in down])
        assert_close(mixed.computed(each), plain.computed(each))  # type: ignore[arg-type]


def test_experts_with_different_forms_are_refused(kernels: CpuKernels) -> None:
    case = coded_case((Scheme(4, 64), Scheme(4, 64)), torch.float32)
    elements = case.case.gate_up[0]
    ordered = replace(case.down[1], order=torch.arange(128).flip(0))
    faults: list[tuple[str, list[CodedWeight | Tensor], list[CodedWeight | Tensor]]] = [
        ("either all matrices of experts have codes, or none of them", [*case.gate_up[:4], elements], list(case.down)),
        ("either all matrices of experts have codes, or none of them", [elements, *case.gate_up[1:]], list(case.down)),
        ("either all matrices of experts have codes, or none of them", list(case.gate_up), list(case.case.down)),
        (
            "experts must have one scheme, not int4 by 64 and int8 by channel",
            [*case.gate_up[:4], coded(256, 256, Scheme(8))],
            list(case.down),
        ),
        (
            r"an order of the inputs \(act-order\) is not supported for experts",
            list(case.gate_up),
            [case.down[0], ordered, *case.down[2:]],
        ),
    ]
    for fault, gate_up, down in faults:
        for each in (kernels, reference):
            with pytest.raises(ValueError, match=fault):
                each.pack_experts(gate_up, None, down, None, SWIGLU)
