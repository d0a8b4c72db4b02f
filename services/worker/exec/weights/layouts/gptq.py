"""Reads weights of GPTQ (arXiv 2210.17323) in the formats "gptq" and "gptq_v2" of AutoGPTQ and GPTQModel.

A module has qweight int32[K bits / 32, N], qzeros int32[K / group, N bits / 32], scales [K / group, N] and g_idx int32[K], the
group of each element of a channel. The format "gptq" stores zero points minus 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, Matrix
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint
from rootstock_llm.services.worker.exec.weights.layouts.words import finite, scheme_for, sizes_of, sorted_by_group, unpacked
from rootstock_llm.services.worker.exec.weights.quantization import StoredTensor


class Gptq:
    """Implements Layout."""

    def __init__(self, quantization: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        """Takes a config without faults, see quantization_config.fault_of()."""
        self._checkpoint = checkpoint
        self._bits, self._group = int(quantization["bits"]), max(int(quantization.get("group_size") or 0), 0)
        self._symmetric = bool(quantization.get("sym", False))
        self._less = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1  # zero point minus the stored number

    @property
    def name(self) -> str:
        return f"gptq {self._bits} bits by {self._group or 'channel'}"

    def tensors(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        module = name.removesuffix(".weight")
        if not self._checkpoint.has(f"{module}.qweight"):
            return ()
        channels, depth = sizes_of(name, shape)
        count = scheme_for(name, self._bits, self._group, True, shape).groups_of(depth)
        found = [
            StoredTensor(f"{module}.qweight", (depth * self._bits // 32, channels), torch.int32),
            StoredTensor(f"{module}.qzeros", (count, channels * self._bits // 32), torch.int32),
            StoredTensor(f"{module}.scales", (count, channels), torch.float32),
        ]
        if self._checkpoint.has(f"{module}.g_idx"):
            found.append(StoredTensor(f"{module}.g_idx", (depth,), torch.int32))
        return tuple(found)

    def matrix(self, name: str, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> Matrix:
        weights, stored_zeros, scales, *rest = tensors
        codes = unpacked(weights.t(), self._bits)
        order = sorted_by_group(name, rest[0], self._group or shape[1]) if rest else None
        if order is not None:
            codes = codes[:, order]
        zeros = (unpacked(stored_zeros, self._bits).t() + self._less) & ((1 << self._bits) - 1)
        scheme = scheme_for(name, self._bits, self._group, True, shape)
        weight = CodedWeight(codes, finite(name, scales.t()), zeros, scheme, order)
        # If the config does not set `sym`, all matrices keep their zero points, so that they have one scheme.
        return weight.without_zeros() if self._symmetric and bool((zeros == scheme.zero).all()) else weight
