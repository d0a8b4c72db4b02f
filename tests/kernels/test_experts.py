"""Kernels of experts and of routers equal their twins and transformers' modules. A row's bits depend only on that row.

The kernels read only the weights of chosen experts.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

from rootstock_llm.kernels.contracts.ops import SWIGLU, Activation, PackedExperts, Routing
from rootstock_llm.kernels.cpu import library
from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.kernels.cpu.library import CpuKernels
from rootstock_llm.kernels.reference import layers as reference
from tests.night import NIGHTLY

BATCHES = 1000 if NIGHTLY else 40
DTYPES = [torch.float32, torch.bfloat16]
CLAMPED = Activation(1.702, 0.9, 1.0)  # a small limit, so that many values are clamped


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels(built_library(), 2, deterministic=True)


@dataclass(frozen=True)
class Case:
    """The weights of experts, and the inputs of one call."""

    gate_up: Tensor  # [E, 2 I, N]
    gate_up_bias: Tensor | None
    down: Tensor  # [E, N, I]
    down_bias: Tensor | None
    activation: Activation
    x: Tensor  # [T, N]
    ids: Tensor  # int32[T, k]
    weights: Tensor  # float32[T, k]

    def packed(self, kernels: CpuKernels) -> PackedExperts:
        return kernels.pack_experts(self.gate_up, self.gate_up_bias, self.down, self.down_bias, self.activation)

    def computed(self, kernels: CpuKernels, rows: slice = slice(None), packed: PackedExperts | None = None) -> Tensor:
        x = self.x[rows].contiguous()
        out = torch.empty_like(x)
        packed = packed or self.packed(kernels)
        kernels.experts(out, x, self.ids[rows].contiguous(), self.weights[rows].contiguous(), packed)
        return out

    def expected(self) -> Tensor:
        out = torch.empty_like(self.x)
        packed = reference.pack_experts(self.gate_up, self.gate_up_bias, self.down, self.down_bias, self.activation)
        reference.experts(out, self.x, self.ids, self.weights, packed)
        return out


def case_of(
    rng: random.Random,
    dtype: torch.dtype,
    experts: int,
    inner: int,
    width: int,
    rows: int,
    choices: int,
    biases: bool = False,
    activation: Activation = SWIGLU,
) -> Case:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def drawn(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    chosen = [rng.sample(range(experts), choices) for _ in range(rows)]
    return Case(
        gate_up=drawn(experts, 2 * inner, width, std=width**-0.5),
        gate_up_bias=drawn(experts, 2 * inner) if biases else None,
        down=drawn(experts, width, inner, std=inner**-0.5),
        down_bias=drawn(experts, width) if biases else None,
        activation=activation,
        x=drawn(rows, width),
        ids=torch.tensor(chosen, dtype=torch.int32).view(rows, choices),
        weights=torch.rand((rows, choices), generator=generator),
    )


def random_case(seed: int) -> Case:
    """Returns a case with few or many experts, rows and choices, and with sizes that do not fill blocks of columns."""
    rng = random.Random(seed)
    experts = rng.choice((1, 2, 5, 16, 40))
    return case_of(
        rng,
        rng.choice(DTYPES),
        experts,
        inner=rng.choice((1, 8, 31, 32, 48, 100)),
        width=rng.choice((2, 33, 64, 130, 300)),  # depths of one and of two segments
        rows=rng.choice((1, 1, 2, 7, 30, 100)),
        choices=rng.randint(1, min(experts, 6)),
        biases=rng.random() < 0.5,
        activation=rng.choice((SWIGLU, CLAMPED)),
    )


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Checks the results to the rounding of the dtype, in relation to the largest value."""
    tolerance = (2e-5 if found.dtype == torch.float32 else 1.6e-2) * float(expected.abs().max().clamp(min=0.1))
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("first", range(8))
def test_experts_of_random_batches_equal_the_twin(kernels: CpuKernels, first: int) -> None:
    for seed in range(first, BATCHES, 8):
        case = random_case(seed)
        assert_close(case.computed(kernels), case.expected())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_are_equal_in_all_parts_of_many_rows(
    kernels: CpuKernels, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(random.Random(3), dtype, experts=5, inner=33, width=70, rows=90, choices=3, biases=True)
    whole = case.computed(kernels)
    monkeypatch.setattr(library, "MOST_ROWS", 50)
    monkeypatch.setattr(library, "LEAST_ROWS", 8)
    assert torch.equal(case.computed(kernels), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_give_the_same_bits_for_any_number_of_rows(kernels: CpuKernels, dtype: torch.dtype) -> None:
    case = case_of(random.Random(4), dtype, experts=4, inner=40, width=66, rows=40, choices=2, biases=True)
    packed = case.packed(kernels)
    whole = case.computed(kernels, packed=packed)
    parts = [slice(row, row + 1) for row in range(40)] + [
        slice(first, first + size) for size in (2, 7, 19) for first in (0, 5, 20)
    ]
    for part in parts:
        assert torch.equal(case.computed(kernels, part, packed), whole[part]), part


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_order_of_experts_changes_no_bit(kernels: CpuKernels, dtype: torch.dtype) -> None:
    case = case_of(random.Random(5), dtype, experts=12, inner=40, width=66, rows=25, choices=4, biases=True)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))  # new expert i is the old expert order[i]
    assert case.gate_up_bias is not None and case.down_bias is not None
    renamed = replace(
        case,
        gate_up=case.gate_up[order],
        gate_up_bias=case.gate_up_bias[order],
        down=case.down[order],
        down_bias=case.down_bias[order],
        ids=order.argsort()[case.ids.long()].int(),
    )
    assert torch.equal(renamed.computed(kernels), case.computed(kernels))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_in_the_weights_of_an_unused_expert_changes_nothing(kernels: CpuKernels, dtype: torch.dtype) -> None:
    case = case_of(random.Random(6), dtype, experts=6, inner=40, width=66, rows=20, choices=2, biases=True)
    used = replace(case, ids=torch.where(case.ids == 3, 5, case.ids))
    expected = used.computed(kernels)
    for tensor in (case.gate_up, case.gate_up_bias, case.down, case.down_bias):
        assert tensor is not None
        tensor[3] = torch.nan
    assert expected.isfinite().all() and torch.equal(used.computed(kernels), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_of_a_row_passes_the_limits_of_the_activation(kernels: CpuKernels, dtype: torch.dtype) -> None:
    case = case_of(random.Random(7), dtype, experts=3, inner=40, width=66, rows=4, choices=2, activation=CLAMPED)
    case.x[1, 5] = torch.nan
    assert (
        case.computed(kernels).isnan().all(1).tolist() == case.expected().isnan().all(1).tolist() == [False, True, False, False]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_equal_the_twin_when_all_rows_use_one_expert(kernels: CpuKernels, dtype: torch.dtype) -> None:
    case = case_of(random.Random(8), dtype, experts=9, inner=48, width=64, rows=50, choices=1)
    case.ids.fill_(7)
    assert_close(case.computed(kernels), case.expected())


def test_experts_can_write_their_output_over_their_input(kernels: CpuKernels) -> None:
    case = case_of(random.Random(9), torch.bfloat16, experts=4, inner=48, width=130, rows=20, choices=2)
    packed, expected = case.packed(kernels), case.computed(kernels)
    kernels.experts(case.x, case.x, case.ids, case.weights, packed)
    assert torch.equal(case.x, expected)


def unused_memory(packed: PackedExperts, used: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields address and size of all whole pages of memory that have only weights of unused experts."""
    for linear in (packed.gate_up, packed.down):
        size, first = linear.data[0].nbytes, linear.data.data_ptr()
        begin = 0
        for expert in (*sorted(used), packed.num_experts):
            low = -(-(first + begin * size) // mmap.PAGESIZE) * mmap.PAGESIZE
            high = (first + expert * size) // mmap.PAGESIZE * mmap.PAGESIZE
            if high > low:
                yield low, high - low
            begin = expert + 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step_of_one_row_reads_no_weights_of_other_experts(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Denies the process all access to the other experts' memory. A read of it would end the process."""
    case = case_of(random.Random(10), dtype, experts=32, inner=64, width=256, rows=1, choices=4)
    packed, expected = case.packed(kernels), case.computed(kernels)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    unused = list(unused_memory(packed, case.ids[0].tolist()))
    assert sum(size for _, size in unused) > 0.8 * (packed.gate_up.data.nbytes + packed.down.data.nbytes)
    try:
        assert not any(protect(address, size, 0) for address, size in unused)
        found = case.computed(kernels, packed=packed)
    finally:
        assert not any(protect(address, size, mmap.PROT_READ | mmap.PROT_WRITE) for address, size in unused)
    assert torch.equal(found, expected)


class OneByOne:
    """Matrices that are created when they are indexed, as those of a file."""

    def __init__(self, matrices: Tensor) -> None:
        self._matrices = matrices
        self._made: list[weakref.ref[Tensor]] = []
        self.most = 0  # largest number of matrices in memory at a time

    @property
    def reads(self) -> int:
        return len(self._made)

    def __len__(self) -> int:
        return len(self._matrices)

    def __getitem__(self, expert: int, /) -> Tensor:
        made = self._matrices[expert].clone()
        self._made.append(weakref.ref(made))
        self.most = max(self.most, sum(each() is not None for each in self._made))
        return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_has_at_most_two_unpacked_experts_in_memory(kernels: CpuKernels, dtype: torch.dtype) -> None:
    case = case_of(random.Random(11), dtype, experts=10, inner=40, width=66, rows=9, choices=2)
    gate_up, down = OneByOne(case.gate_up), OneByOne(case.down)
    packed = kernels.pack_experts(gate_up, None, down, None, SWIGLU)
    assert torch.equal(case.computed(kernels, packed=packed), case.computed(kernels))
    assert gate_up.most <= 2 and down.most <= 2 and gate_up.reads == down.reads == 10


def test_experts_equal_transformers_modules(kernels: CpuKernels) -> None:
    sizes = {"hidden_size": 64, "num_local_experts": 6, "num_experts_per_tok": 2}
    rng, ids = torch.Generator().manual_seed(2), torch.tensor([[5, 1], [0, 3], [1, 2]], dtype=torch.int32)
    x, weights = torch.randn((3, 64), generator=rng), torch.rand((3, 2), generator=rng)
    qwen = modeling_qwen3_moe.Qwen3MoeExperts(transformers.Qwen3MoeConfig(**sizes, num_experts=6, moe_intermediate_size=48))
    gpt = modeling_gpt_oss.GptOssExperts(transformers.GptOssConfig(**sizes, intermediate_size=48, swiglu_limit=0.5))
    for module in (qwen, gpt):
        module.config._experts_implementation = "eager"
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=rng)
    even = gpt.gate_up_proj.transpose(1, 2)  # rows of gate and up alternate
    packed = [
        kernels.pack_experts(qwen.gate_up_proj, None, qwen.down_proj, None, SWIGLU),
        kernels.pack_experts(
            torch.cat((even[:, ::2], even[:, 1::2]), 1),
            torch.cat((gpt.gate_up_proj_bias[:, ::2], gpt.gate_up_proj_bias[:, 1::2]), 1),
            gpt.down_proj.transpose(1, 2),
            gpt.down_proj_bias,
            Activation(gpt.alpha, gpt.limit, 1.0),
        ),
    ]
    for module, ours in zip((qwen, gpt), packed, strict=True):
        found = torch.empty_like(x)
        kernels.experts(found, x, ids, weights, ours)
        torch.testing.assert_close(found, module(x, ids.long(), weights).detach(), atol=2e-5, rtol=2e-5)


def routed(kernels: CpuKernels, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    weights, ids = torch.empty(len(logits), routing.top_k), torch.empty(len(logits), routing.top_k, dtype=torch.int32)
    kernels.route(weights, ids, logits, bias, routing)
    return weights, ids


def random_routing(rng: random.Random) -> tuple[int, Routing]:
    """Returns a number of experts, and rules that fit it."""
    groups, size = rng.choice(((1, 1), (1, 7), (1, 128), (4, 4), (8, 32), (5, 1), (3, 2)))
    top_groups = rng.randint(1, groups)
    routing = Routing(
        top_k=rng.randint(1, min(top_groups * size, 8)),
        scoring=rng.choice(("softmax", "sigmoid")),
        renormalize=rng.random() < 0.5,
        scale=rng.choice((1.0, 2.5)),
        num_groups=groups,
        top_groups=top_groups,
        group_score=rng.choice(("maximum", "two_best")),
    )
    return groups * size, routing


def test_routes_of_random_batches_equal_the_twin(kernels: CpuKernels) -> None:
    """Logits are multiples of 1/4, so that many scores are equal, and no two scores differ only by rounding."""
    for seed in range(BATCHES):
        rng = random.Random(seed)
        experts, routing = random_routing(rng)
        generator = torch.Generator().manual_seed(seed)
        logits = (torch.randn((rng.choice((1, 3, 90)), experts), generator=generator) * 6).round() / 4
        bias = (torch.randn(experts, generator=generator) * 2).round() / 2 if rng.random() < 0.3 else None
        if rng.random() < 0.2:
            logits[rng.randrange(len(logits)), rng.randrange(experts)] = rng.choice((torch.nan, torch.inf, -torch.inf))
        (weights, ids), (expected, expected_ids) = (routed(each, logits, bias, routing) for each in (kernels, reference))
        assert torch.equal(ids, expected_ids), (seed, routing)
        torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5, equal_nan=True)


def test_route_prefers_the_lower_id_of_equal_scores(kernels: CpuKernels) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 2.0], [0.0] * 6, [torch.nan, 3.0, torch.nan, 5.0, 3.0, 5.0]])
    chosen = [[1, 2, 4, 5], [0, 1, 2, 3]]
    assert routed(kernels, logits[:2], None, Routing(4))[1].tolist() == chosen
    assert routed(kernels, logits[2:], None, Routing(4, "sigmoid"))[1].tolist() == [[3, 5, 1, 4]], "a NaN comes last"
    grouped = Routing(2, "sigmoid", num_groups=3, top_groups=1, group_score="two_best")
    assert routed(kernels, logits, None, grouped)[1].tolist() == [[4, 5], [0, 1], [5, 4]]


def modules() -> Iterator[tuple[str, Callable[[Tensor], tuple[Tensor, Tensor]], Tensor | None, Routing]]:
    """Yields routers of transformers whose weight is the identity, so that their inputs are the logits of 16 experts."""
    sizes = {"hidden_size": 16, "num_experts_per_tok": 4, "num_attention_heads": 4}
    groups = {**sizes, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_routed_experts": 16}

    def of(module: torch.nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        module.weight.data = torch.eye(16)
        return lambda logits: module(logits)[1:]

    for renormalize in (False, True):
        config = transformers.Qwen3MoeConfig(**sizes, num_experts=16, norm_topk_prob=renormalize)
        yield "qwen3-moe", of(modeling_qwen3_moe.Qwen3MoeTopKRouter(config)), None, Routing(4, renormalize=renormalize)
    gpt = modeling_gpt_oss.GptOssTopKRouter(transformers.GptOssConfig(**sizes, num_local_experts=16))
    yield "gpt-oss", of(gpt), None, Routing(4, renormalize=True)
    greedy = transformers.DeepseekV2Config(**groups, topk_method="group_limited_greedy")
    routing = Routing(4, scale=2.5, num_groups=4, top_groups=2)
    yield "deepseek-v2", of(modeling_deepseek_v2.DeepseekV2TopkRouter(greedy)), None, routing
    v3 = modeling_deepseek_v3.DeepseekV3TopkRouter(transformers.DeepseekV3Config(**groups, norm_topk_prob=True))
    v3.e_score_correction_bias = torch.linspace(-1, 1, 16)
    routing = replace(routing, scoring="sigmoid", renormalize=True, group_score="two_best")
    yield "deepseek-v3", of(v3), v3.e_score_correction_bias, routing


def test_routes_equal_transformers_routers(kernels: CpuKernels) -> None:
    logits = torch.randn((200, 16), generator=torch.Generator().manual_seed(1)) * 2
    for name, router, bias, routing in modules():
        weights, ids = routed(kernels, logits, bias, routing)
        with torch.no_grad():
            expected, expected_ids = router(logits)
        ours, theirs = (torch.zeros(200, 16).scatter(1, i.long(), w) for w, i in ((weights, ids), (expected, expected_ids)))
        assert torch.equal(ids.long().sort(-1).values, expected_ids.sort(-1).values), name
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sigmoid_mul_with_one_gate_per_row_equals_the_twin(kernels: CpuKernels, dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, gate = (torch.randn(rows, size, generator=generator).to(dtype) for size in (70, 1))
    expected = x.clone()
    reference.sigmoid_mul(expected, gate)
    kernels.sigmoid_mul(x, gate)
    assert_close(x, expected)


def test_kernels_of_experts_reject_tensors_that_do_not_fit(kernels: CpuKernels) -> None:
    case = case_of(random.Random(12), torch.float32, experts=4, inner=8, width=16, rows=3, choices=2)
    packed, out = case.packed(kernels), torch.empty_like(case.x)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.experts(out, case.x, case.ids[:2].contiguous(), case.weights, packed)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.experts(out, case.x, case.ids.long(), case.weights, packed)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.experts(out.bfloat16(), case.x.bfloat16(), case.ids, case.weights, packed)
    for rules in (Routing(5), Routing(2, num_groups=3), Routing(3, num_groups=2), Routing(0)):
        with pytest.raises(ValueError, match="do not fit"):
            routed(kernels, torch.zeros(3, 4), None, rules)
