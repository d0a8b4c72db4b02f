"""Tests of Gated DeltaNet: the C++ kernels and their twin in torch against transformers' code, and the bits of a cut sequence."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNormGated,
    Qwen3_5TextConfig,
)

from rootstock_llm.kernels.contracts.ops import DeltaGates, Kernels, RaggedRows, StateRows
from rootstock_llm.kernels.cpu import load_kernels
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.triton.layers.layers import TritonLayers

SIZES = [(2, 4, 16, 24), (1, 1, 8, 40), (4, 4, 32, 32), (2, 6, 128, 128)]  # key heads, value heads, key size, value size
UNITS = 8
# Tokens of a sequence. transformers computes chunks of 64 tokens, so a longer sequence has a second chunk. Triton's interpreter
# takes most of the time of this file.
TOKENS = {"torch": 75, "C++": 75, "Triton": 10}


@dataclass(frozen=True)
class Layer:
    """A layer of transformers with random weights, and its inputs of one sequence."""

    net: Qwen3_5GatedDeltaNet
    hidden: Tensor  # float32[tokens, hidden size]

    @property
    def decay(self) -> DeltaGates:
        return DeltaGates(self.net.A_log.detach().float().exp(), self.net.dt_bias.detach().float())

    @property
    def weight(self) -> Tensor:
        return self.net.conv1d.weight.detach().squeeze(1).contiguous()

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns qkv [tokens, C] and gates [tokens, 2 J]."""
        qkv = self.net.in_proj_qkv(self.hidden)
        gates = torch.cat((self.net.in_proj_b(self.hidden), self.net.in_proj_a(self.hidden)), dim=1)
        return qkv.detach().to(dtype), gates.detach().to(dtype)

    def pools(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns pools filled with NaN, so that a read of an unwritten unit changes the result."""
        net = self.net
        conv = torch.full((UNITS, net.conv_kernel_size - 1, net.conv_dim), float("nan"), dtype=dtype)
        return conv, torch.full((UNITS, net.num_v_heads, net.head_k_dim, net.head_v_dim), float("nan"))


def layer(sizes: tuple[int, int, int, int], tokens: int) -> Layer:
    torch.manual_seed(7)
    key_heads, value_heads, key_dim, value_dim = sizes
    config = Qwen3_5TextConfig(
        hidden_size=48,
        num_hidden_layers=4,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
    )
    net = Qwen3_5GatedDeltaNet(config, 0).eval()
    with torch.no_grad():
        net.A_log.uniform_(-3, 1)
        net.dt_bias.normal_()
    return Layer(net, torch.randn(tokens, 48))


def rows_of(counts: list[int]) -> RaggedRows:
    """Returns rows with these numbers of tokens. Gated DeltaNet reads only the columns `offsets` and `num_tokens`."""
    sizes = torch.tensor(counts, dtype=torch.int32)
    zeros = torch.zeros_like(sizes)
    offsets = (sizes.cumsum(0) - sizes).to(torch.int32)
    return RaggedRows(zeros[:, None], zeros, zeros, sizes, offsets, zeros, zeros.long(), max(counts))


def states_of(*units: tuple[int, int, int, int]) -> StateRows:
    return StateRows(*(torch.tensor(column, dtype=torch.int32) for column in zip(*units, strict=True)))


def kernels_of(name: str) -> Kernels:
    if name == "Triton":
        return TritonLayers(torch.device("cpu"))
    return reference if name == "torch" else load_kernels(2, torch.float32)


def computed(kernels: Kernels, one: Layer, cuts: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the sequence with one call per part between the cuts. Returns the outputs, and each pool's last written unit."""
    qkv, gates = one.inputs(dtype)
    conv, state = one.pools(dtype)
    net, outs, unit = one.net, [], -1
    for first, end in zip([0, *cuts], [*cuts, len(qkv)], strict=True):
        after = (unit + 1) % UNITS
        out = torch.empty(end - first, net.value_dim, dtype=dtype)
        states = states_of((unit, after, 0, -1))
        part = qkv[first:end].clone()
        weight = one.weight.to(dtype)
        kernels.gated_delta_rule(
            out, part, gates[first:end].clone(), weight, one.decay, rows_of([end - first]), states, conv, state
        )
        outs.append(out)
        unit = after
    return torch.cat(outs), conv[unit], state[unit]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("name", ["torch", "C++", "Triton"])
def test_gated_delta_layer_equals_transformers(name: str, sizes: tuple[int, int, int, int]) -> None:
    one = layer(sizes, TOKENS[name])
    net = one.net
    expected = net(one.hidden[None])[0]
    out, _, _ = computed(kernels_of(name), one, [])
    normed = torch.empty(len(out) * net.num_v_heads, net.head_v_dim)
    gate = net.in_proj_z(one.hidden).detach().reshape(normed.shape)
    kernels_of(name).gated_rms_norm(normed, out.view(normed.shape), gate, net.norm.weight.detach(), net.layer_norm_epsilon)
    torch.testing.assert_close(net.out_proj(normed.view(len(out), -1)), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("name", ["C++", "Triton"])
def test_kernel_equals_the_torch_kernel(name: str, sizes: tuple[int, int, int, int]) -> None:
    one = layer(sizes, TOKENS[name] // 2)
    for ours, twins in zip(computed(kernels_of(name), one, [2]), computed(kernels_of("torch"), one, [2]), strict=True):
        torch.testing.assert_close(ours, twins, atol=1e-5, rtol=1e-4)


def test_kernel_is_close_to_the_torch_kernel_in_bfloat16() -> None:
    one = layer((2, 4, 16, 24), 40)
    ours, twins = (computed(kernels_of(name), one, [], torch.bfloat16) for name in ("C++", "torch"))
    torch.testing.assert_close(ours[0], twins[0], atol=2e-2, rtol=2e-2)
    assert torch.equal(ours[1], twins[1]), "the inputs of the convolution are not rounded"


@pytest.mark.by_day(one_in=2, name="Triton")
@pytest.mark.parametrize("cuts", [[1], [-1], [3, 4, 5], [4, 8], []], ids=["first", "last", "three", "fours", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["C++", "Triton"])
def test_bits_do_not_depend_on_the_cuts_of_a_sequence(name: str, cuts: list[int], dtype: torch.dtype) -> None:
    """A cut at -1 is before the last token. Without cuts, each token is alone."""
    tokens = TOKENS[name]
    one = layer((2, 4, 32, 48), tokens)
    cuts = [cut % tokens for cut in cuts] or list(range(1, tokens))
    whole, cut = computed(kernels_of(name), one, [], dtype), computed(kernels_of(name), one, cuts, dtype)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


@pytest.mark.parametrize("name", ["torch", "C++", "Triton"])
def test_row_stores_the_state_at_the_cut_and_does_not_change_the_state_that_the_row_reads(name: str) -> None:
    one = layer((2, 4, 16, 24), 30)
    kernels, net = kernels_of(name), one.net
    qkv, gates = one.inputs(torch.float32)
    _, conv_at, state_at = computed(kernels, layer_of_first(one, 16), [])
    expected, conv_end, state_end = computed(kernels, one, [])
    conv, state = one.pools(torch.float32)
    conv[0], state[0] = conv_at, state_at
    before = conv.clone(), state.clone()
    out = torch.empty(30 + 14, net.value_dim)
    # The first row has the whole sequence and stores the state after 16 tokens. The second row begins with a stored state and has
    # the tokens after these 16.
    both, both_gates = torch.cat((qkv, qkv[16:])), torch.cat((gates, gates[16:]))
    states = states_of((-1, 2, 16, 1), (0, 3, 0, -1))
    kernels.gated_delta_rule(out, both, both_gates, one.weight, one.decay, rows_of([30, 14]), states, conv, state)
    assert torch.equal(out[:30], expected) and torch.equal(out[30:], expected[16:])
    for unit, (conv_expected, state_expected) in enumerate(
        [(conv_at, state_at), (conv_at, state_at), (conv_end, state_end), (conv_end, state_end)]
    ):
        assert torch.equal(conv[unit], conv_expected) and torch.equal(state[unit], state_expected)
    assert all(torch.equal(pool[4:].isnan(), kept[4:].isnan()) for pool, kept in zip((conv, state), before, strict=True))


def layer_of_first(one: Layer, count: int) -> Layer:
    return Layer(one.net, one.hidden[:count])


@pytest.mark.parametrize("name", ["torch", "C++", "Triton"])
def test_row_without_tokens_copies_its_state(name: str) -> None:
    """The row between two other rows has no token. Alone in a launch, it copies its state as well."""
    one = layer((2, 4, 16, 24), 6)
    kernels, net = kernels_of(name), one.net
    _, conv_at, state_at = computed(kernels, one, [])
    for counts in ([3, 0, 3], [0]):
        qkv, gates = one.inputs(torch.float32)
        conv, state = one.pools(torch.float32)
        conv[0], state[0] = conv_at, state_at
        units = [(-1, 2, 0, -1), (0, 1, 0, -1), (-1, 3, 0, -1)] if len(counts) > 1 else [(0, 1, 0, -1)]
        out, total = torch.empty(sum(counts), net.value_dim), sum(counts)
        kernels.gated_delta_rule(
            out, qkv[:total], gates[:total], one.weight, one.decay, rows_of(counts), states_of(*units), conv, state
        )
        assert torch.equal(conv[1], conv_at) and torch.equal(state[1], state_at)
        assert out.isfinite().all() and state[4:].isnan().all()


@pytest.mark.parametrize("name", ["torch", "C++", "Triton"])
def test_row_without_unit_for_its_end_stores_no_state(name: str) -> None:
    one = layer((2, 4, 16, 24), 6)
    qkv, gates = one.inputs(torch.float32)
    conv, state = one.pools(torch.float32)
    conv[0], state[0] = computed(kernels_of(name), one, [])[1:]
    out, before = torch.empty(6, one.net.value_dim), (conv.clone(), state.clone())
    states = states_of((0, -1, 0, -1))
    kernels_of(name).gated_delta_rule(out, qkv, gates, one.weight, one.decay, rows_of([6]), states, conv, state)
    assert out.isfinite().all() and torch.equal(conv[0], before[0][0]) and torch.equal(state[0], before[1][0])
    assert conv[1:].isnan().all() and state[1:].isnan().all()


def test_row_without_cache_units_writes_no_state() -> None:
    one = layer((2, 4, 16, 24), 5)
    qkv, gates = one.inputs(torch.float32)
    conv, state = one.pools(torch.float32)
    out = torch.empty(5, one.net.value_dim)
    states = states_of((-1, -1, 0, -1))
    kernels_of("C++").gated_delta_rule(out, qkv, gates, one.weight, one.decay, rows_of([5]), states, conv, state)
    assert conv.isnan().all() and state.isnan().all() and out.isfinite().all()


def test_kernel_refuses_tensors_that_do_not_fit() -> None:
    one = layer((2, 4, 16, 24), 5)
    qkv, gates = one.inputs(torch.float32)
    conv, state = one.pools(torch.float32)
    out = torch.empty(5, one.net.value_dim)
    states = states_of((-1, 0, 0, -1))
    for wrong in (gates[:, 1:].contiguous(), gates[1:]):
        with pytest.raises(ValueError, match="shapes or dtypes do not fit"):
            kernels_of("C++").gated_delta_rule(out, qkv, wrong, one.weight, one.decay, rows_of([5]), states, conv, state)
    with pytest.raises(ValueError, match="shapes or dtypes do not fit"):
        kernels_of("C++").gated_delta_rule(out, qkv, gates, one.weight, one.decay, rows_of([5]), states, conv, state.double())


def test_gated_norm_equals_transformers() -> None:
    norm = Qwen3_5RMSNormGated(24)
    norm.weight.data.normal_()
    x, gate, out = torch.randn(9, 24), torch.randn(9, 24), torch.empty(9, 24)
    kernels_of("C++").gated_rms_norm(out, x, gate, norm.weight.detach(), 1e-6)
    torch.testing.assert_close(out, norm(x, gate).detach(), atol=1e-5, rtol=1e-5)
