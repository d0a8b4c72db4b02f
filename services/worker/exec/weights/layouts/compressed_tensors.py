"""Reads weights of compressed-tensors, the library of llm-compressor (https://github.com/vllm-project/compressed-tensors).

| format | tensors of a module | elements or codes |
|---|---|---|
| pack-quantized | weight_packed int32[N, K bits / 32], weight_scale [N, C], and the tensors below | codes |
| int-quantized | weight int8[N, K], weight_scale [N, 1] or [1] | codes |
| float-quantized | weight float8[N, K], weight_scale [N, 1], [1] or [N / 128, K / 128] | elements |

A packed weight may have weight_zero_point int32[N bits / 32, C] and weight_g_idx int32[K], the group of each element.
Letters: N output channels, K elements per channel, C groups per channel. Packed codes have an offset of 2^(bits - 1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, Matrix
from rootstock_llm.services.shared.quantization_config import FLOAT, INTEGER, PACKED, groups_of
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint, CheckpointError
from rootstock_llm.services.worker.exec.weights.layouts.float8 import scaled, stored_scales
from rootstock_llm.services.worker.exec.weights.layouts.words import finite, scheme_for, sizes_of, sorted_by_group, unpacked
from rootstock_llm.services.worker.exec.weights.quantization import StoredTensor


@dataclass(frozen=True, slots=True)
class _Group:
    """A config group: modules with one scheme."""

    kind: str  # PACKED, INTEGER or FLOAT
    targets: tuple[str, ...]  # module names, "re:" with a regular expression of module names, or class names
    bits: int
    group: int  # elements of a group; 0: a whole output channel
    symmetric: bool  # whether there are no zero points


class CompressedTensors:
    """Implements Layout."""

    def __init__(self, quantization: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        """Takes a config without faults, see quantization_config.fault_of()."""
        self._checkpoint = checkpoint
        self._groups = [_group(kind, content) for kind, content in groups_of(quantization)]
        names = {target for group in self._groups for target in group.targets if target.isidentifier()}
        self._classes = {name for name in names if not checkpoint.has_module(name)}  # the others are modules, such as lm_head

    @property
    def name(self) -> str:
        return ", ".join(f"compressed-tensors {each.kind} {each.bits} bits" for each in self._groups)

    def _group_of(self, module: str) -> _Group:
        """Returns the config group of a module: that of the most specific target. Raises CheckpointError if no target fits.

        A target with the module's name is more specific than a regular expression, and this is more specific than a class. Of
        two equally specific targets, the first one in alphabetical order counts, as in match_targets() of compressed-tensors.
        """
        ranked = [
            (rank, target, group)
            for group in self._groups
            for target in group.targets
            if (rank := self._rank(module, target)) is not None
        ]
        if not ranked:
            raise CheckpointError(f"{module} has scales, but no config group of compressed-tensors names it")
        return min(ranked, key=lambda each: each[:2])[2]

    def _rank(self, module: str, target: str) -> int | None:
        """Returns a number that is smaller for a more specific target, or None if the target does not fit the module."""
        if target == module:
            return 0
        if target.startswith("re:"):
            return 1 if re.match(target[3:], module) else None
        if target not in self._classes:
            return None
        return 2 if target == ("Embedding" if module.endswith("embed_tokens") else "Linear") else 3

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        module = name.removesuffix(".weight")
        scale = f"{module}.weight_scale"
        if not self._checkpoint.has(scale):
            return ()
        group = self._group_of(module)
        if group.kind == FLOAT:
            return StoredTensor(name, shape, torch.float8_e4m3fn), stored_scales(scale, shape, self._checkpoint.shape(scale))
        if group.kind == INTEGER:
            scheme_for(name, 8, 0, False, shape)
            scales = stored_scales(scale, shape, self._checkpoint.shape(scale), blocks=False)
            return StoredTensor(name, shape, torch.int8), scales
        channels, depth = sizes_of(name, shape)
        count = scheme_for(name, group.bits, group.group, not group.symmetric, shape).groups_of(depth)
        found = [StoredTensor(f"{module}.weight_packed", (channels, -(-depth * group.bits // 32)), torch.int32)]
        found.append(StoredTensor(scale, (channels, count), torch.float32))
        if not group.symmetric:
            found.append(StoredTensor(f"{module}.weight_zero_point", (-(-channels * group.bits // 32), count), torch.int32))
        if self._checkpoint.has(f"{module}.weight_g_idx"):
            found.append(StoredTensor(f"{module}.weight_g_idx", (depth,), torch.int32))
        return tuple(found)

    def matrix(self, name: str, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> Matrix:
        group = self._group_of(name.removesuffix(".weight"))
        if group.kind == FLOAT:
            return scaled(name, *tensors)
        channels, depth = shape
        if group.kind == INTEGER:
            codes, scales = tensors
            of_channels = finite(name, scales).view(-1, 1).expand(channels, 1)
            return CodedWeight(codes.view(torch.uint8) ^ 128, of_channels, None, scheme_for(name, 8, 0, False, shape))
        scheme = scheme_for(name, group.bits, group.group, not group.symmetric, shape)
        rest = list(tensors[2:])
        zeros = None if group.symmetric else unpacked(rest.pop(0).t(), group.bits)[:, :channels].t()
        order = sorted_by_group(name, rest.pop(0), group.group or depth) if rest else None
        codes = unpacked(tensors[0], group.bits)[:, :depth]
        if order is not None:
            codes = codes[:, order]
        return CodedWeight(codes, finite(name, tensors[1]), zeros, scheme, order)


def _group(kind: str, content: Mapping[str, Any]) -> _Group:
    weights = content["weights"]
    size = int(weights.get("group_size") or 0) if kind == PACKED and weights.get("strategy") == "group" else 0
    targets = tuple(map(str, content.get("targets") or ()))
    return _Group(kind, targets, int(weights["num_bits"]), max(size, 0), bool(weights.get("symmetric", True)))
