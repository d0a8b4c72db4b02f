"""Computes the experts of transformers' models with our kernels.

The config of a transformers model names an implementation of experts. The model's modules of experts call the function that is
registered under this name, as with attention. computed() is registered as PACKED_EXPERTS.

A module is packed if our kernels and the module give the same results for random inputs. The module's own weights are then freed.
transformers' code computes all other modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from rootstock_llm.kernels.contracts.ops import SWIGLU, Activation, Kernels, Matrices, PackedExperts
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.exec.models.experts import Deinterleaved

PACKED_EXPERTS = "rootstock_packed"
ATTRIBUTE = "rootstock_experts"  # attribute of a module of experts that has its _ModuleExperts
TOKENS = 12  # tokens of the comparison
TOLERANCE = {torch.float32: 1e-4}  # largest relative error of an output; in half precision HALF_TOLERANCE
HALF_TOLERANCE = 0.03
WEIGHTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")  # names of a module's parameters


@dataclass(frozen=True, slots=True)
class _ModuleExperts:
    """The implementation of one module of experts."""

    packed: PackedExperts | None  # None if transformers' code computes the module
    kernels: Kernels
    other: Callable[..., Tensor]  # transformers' implementation


def computed(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns the weighted sums of the outputs of each token's experts, [T, N].

    Args:
        hidden_states: [T, N].
        top_k_index: int64[T, k].
        top_k_weights: [T, k].
    """
    experts = getattr(module, ATTRIBUTE)
    assert isinstance(experts, _ModuleExperts), "the implementation is set only for models whose modules have the attribute"
    if experts.packed is None:
        return experts.other(module, hidden_states, top_k_index, top_k_weights)
    return _outputs(experts.kernels, experts.packed, hidden_states, top_k_index, top_k_weights)


def _outputs(kernels: Kernels, packed: PackedExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    kernels.experts(out, x.contiguous(), ids.int().contiguous(), weights.float().contiguous(), packed)
    return out


def pack_experts(model: Any, kernels: Kernels) -> int:
    """Packs all modules of experts that our kernels can compute, and frees their own weights.

    Args:
        model: a transformers model on the kernels' device.

    Returns:
        The number of bytes by which the model's weights have become larger.
    """
    modules = [module for module in model.modules() if _has_interface(module)]
    if kernels is reference or not modules:  # the twins are slower than transformers' code
        return 0
    names, more = [module.config._experts_implementation for module in modules], 0
    model.set_experts_implementation(PACKED_EXPERTS)
    for module, name in zip(modules, names, strict=True):
        if module.config._experts_implementation != PACKED_EXPERTS:
            continue
        own = _implementation(module, name)
        packed = next(_packed(module, kernels, own), None)
        setattr(module, ATTRIBUTE, _ModuleExperts(packed, kernels, own))
        if packed is not None:
            more += sum(tensor.nbytes for part in (packed.gate_up, packed.down) for tensor in part.tensors) - _dropped(module)
    return more


def packed_modules(model: Any) -> list[nn.Module]:
    """Returns the modules of experts that our kernels compute."""
    found = [(module, getattr(module, ATTRIBUTE, None)) for module in model.modules()]
    return [module for module, experts in found if isinstance(experts, _ModuleExperts) and experts.packed is not None]


def _has_interface(module: nn.Module) -> bool:
    """Whether the module's class calls the implementation of experts that its config names."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "is_concatenated") and hasattr(module, "config")


def _implementation(module: nn.Module, name: str | None) -> Callable[..., Tensor]:
    """Returns transformers' implementation of this name; for "eager", the code of the module's class."""
    found: Callable[..., Tensor] = ExpertsInterface().get(name, inspect.unwrap(type(module).forward))
    return found


def _packed(module: Any, kernels: Kernels, own: Callable[..., Tensor]) -> Iterator[PackedExperts]:
    """Yields the packed weights of a module with each activation that gives the module's own results."""
    parameters = dict(module.named_parameters())
    is_plain = module.has_gate and not module.has_post_expert_norm and not module._is_expert_parallel
    if not is_plain or not {"gate_up_proj", "down_proj"} <= parameters.keys() <= set(WEIGHTS):
        return
    if any(parameters[name].dim() != 3 for name in ("gate_up_proj", "down_proj")):
        return
    outputs, inputs = (2, 1) if module.is_transposed else (1, 2)
    gate_up, down = parameters["gate_up_proj"].shape, parameters["down_proj"].shape
    if (gate_up[0], gate_up[outputs], gate_up[inputs]) != (down[0], 2 * down[inputs], down[outputs]):
        return
    activations = [SWIGLU]
    if hasattr(module, "alpha") and hasattr(module, "limit"):
        activations.append(Activation(float(module.alpha), float(module.limit), 1.0))
    for activation in activations:
        packed = _packed_with(module, kernels, activation)
        if _agrees(module, kernels, packed, own):
            yield packed


def _packed_with(module: Any, kernels: Kernels, activation: Activation) -> PackedExperts:
    gate_up, bias = module.gate_up_proj.data, getattr(module, "gate_up_proj_bias", None)
    down, down_bias = module.down_proj.data, getattr(module, "down_proj_bias", None)
    bias, down_bias = (None if each is None else each.data for each in (bias, down_bias))
    both: Matrices = gate_up
    if not module.is_concatenated:
        both = Deinterleaved(gate_up.transpose(1, 2) if module.is_transposed else gate_up)
        bias = None if bias is None else torch.cat((bias[:, ::2], bias[:, 1::2]), 1)
    elif module.is_transposed:
        both = gate_up.transpose(1, 2)
    return kernels.pack_experts(both, bias, down.transpose(1, 2) if module.is_transposed else down, down_bias, activation)


def _agrees(module: Any, kernels: Kernels, packed: PackedExperts, own: Callable[..., Tensor]) -> bool:
    """Compares our kernels with the module's own results for random inputs.

    The inputs are small and large, so that limits of an activation have an effect. Rows that overflow are not compared.
    """
    weight = module.down_proj
    count, choices = len(weight), min(len(weight), 3)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((TOKENS, packed.gate_up.in_features), generator=generator)
    x *= 10.0 ** (torch.arange(TOKENS) % 4 - 1)[:, None]
    ids = torch.stack([torch.randperm(count, generator=generator)[:choices] for _ in range(TOKENS)])
    weights = torch.rand((TOKENS, choices), generator=generator)
    given = x.to(weight.device, weight.dtype), ids.to(weight.device), weights.to(weight.device, weight.dtype)
    expected, found = own(module, *given).float(), _outputs(kernels, packed, *given).float()
    rows = expected.isfinite().all(1)
    size = expected[rows].norm(dim=1)
    if 2 * len(size) < TOKENS or not float(size.min()):
        return False
    return bool(((found - expected)[rows].norm(dim=1) / size < TOLERANCE.get(weight.dtype, HALF_TOLERANCE)).all())


def _dropped(module: Any) -> int:
    """Drops the module's own weights, which may share memory with the packed ones. Returns their bytes."""
    parameters = list(module.parameters())
    total: int = sum(parameter.nbytes for parameter in parameters)
    for parameter in parameters:
        parameter.data = parameter.data.new_empty(0)
    return total


ExpertsInterface.register(PACKED_EXPERTS, computed)
