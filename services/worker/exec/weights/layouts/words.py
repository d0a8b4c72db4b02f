"""Unpacks codes from 32-bit words and checks scales and orders, for several layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import Scheme
from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the codes of words int32[..., W] as uint8[..., 32 W / bits], the code in the lowest bits first."""
    in_bytes = words.contiguous().view(torch.uint8)
    return in_bytes if bits == 8 else torch.stack((in_bytes & 15, in_bytes >> 4), dim=-1).flatten(-2)


def finite(name: str, scales: Tensor) -> Tensor:
    """Returns the scales as float32. Raises CheckpointError if one of them is not finite."""
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"{name} has scales that are not finite")
    return scales.float()


def sizes_of(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the number of output channels and the depth. Raises CheckpointError if the tensor has all experts of a layer."""
    if len(shape) != 2:
        raise CheckpointError(f"{name} has the experts of a layer in one tensor, which is not supported for its quantization")
    return shape[0], shape[1]


def scheme_for(name: str, bits: int, group: int, zero_points: bool, shape: tuple[int, ...]) -> Scheme:
    """Returns the scheme of a matrix. Raises CheckpointError if no kernel reads it, or if it does not fit the shape.

    Args:
        group: elements of a group; 0 for a whole channel.
    """
    _, depth = sizes_of(name, shape)
    try:
        scheme = Scheme(bits, group, zero_points)
        scheme.groups_of(depth)
    except ValueError as error:
        raise CheckpointError(f"{name} is not supported: {error}") from error
    return scheme


def sorted_by_group(name: str, groups: Tensor, group: int) -> Tensor | None:
    """Returns the order of a channel's elements in which each group is contiguous, int64[K]; None if they are in this order.

    Args:
        groups: int32[K], the group of each element (act-order: GPTQ, arXiv 2210.17323, quantizes elements of large activations
            first). -1 for all elements: the groups are contiguous.
        group: elements of a group.

    Raises:
        CheckpointError: a group has another number of elements.
    """
    regular = torch.arange(len(groups), device=groups.device) // group
    if torch.equal(groups.long(), regular) or bool((groups == -1).all()):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order].long(), regular):
        raise CheckpointError(f"{name} does not have {group} elements in each group")
    return order
