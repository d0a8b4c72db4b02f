"""One layer of a dense decoder over a ragged batch, and the buffers that a pass's layers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.contracts.ops import Kernels, RaggedRows
from services.worker.exec.weights.families import DecoderConfig
from services.worker.exec.weights.weights import LayerWeights


class Workspace:
    """Activation buffers, kept from step to step: fresh ones cost page faults. Grows to the largest batch seen, until it is
    fixed: captured graphs read and write where its buffers lie."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._buffers: dict[str, Tensor] = {}
        self._fixed = False

    def fix(self) -> None:
        self._fixed = True

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """[rows, columns], contents undefined, valid until the same name is taken again. Raises ValueError for more than there
        is once the space is fixed."""
        assert rows >= 0 and columns > 0, "a buffer of no columns"
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * columns:
            if self._fixed:
                raise ValueError(f"{rows} rows of {name} are more than was reserved")
            buffer = self._buffers[name] = torch.empty(rows * columns, dtype=dtype or self._dtype, device=self._device)
        assert buffer.dtype == (dtype or self._dtype), "one name is taken with two dtypes"
        assert buffer.numel() >= rows * columns, "a buffer holds what is taken of it"
        return buffer[: rows * columns].view(rows, columns)


@dataclass(frozen=True, slots=True)
class Activations:
    """What the layers of one pass share, [T, columns] each. After a layer its output is the sum of residual and update."""

    residual: Tensor
    hidden: Tensor
    update: Tensor
    qkv: Tensor
    mixed: Tensor
    activated: Tensor

    @classmethod
    def taken(cls, space: Workspace, config: DecoderConfig, num_tokens: int) -> Activations:
        widths = {
            "residual": config.hidden_size,
            "hidden": config.hidden_size,
            "update": config.hidden_size,
            "qkv": config.q_size + 2 * config.kv_size,
            "mixed": config.q_size,
            "activated": config.intermediate_size,
        }
        return cls(**{name: space.take(name, num_tokens, width) for name, width in widths.items()})


class Attend(Protocol):
    """Kernels.paged_attention, or what stands in its place."""

    def __call__(
        self, out: Tensor, qkv: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, scale: float, window: int
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The arithmetic that layers of one config share. cos_sin: float32[positions, head_dim]."""

    config: DecoderConfig
    cos_sin: Tensor
    kernels: Kernels
    attend: Attend

    def __post_init__(self) -> None:
        assert self.cos_sin.shape[1] == self.config.head_dim, "cosines and sines of half a head's dimensions each"

    def run(
        self,
        layer: LayerWeights,
        window: int,
        x: Tensor,
        held: Activations,
        rows: RaggedRows,
        pools: tuple[Tensor, Tensor],
    ) -> None:
        """x: [T, K], what attention is of, normed; may be held.hidden. Adds to held.residual, and leaves held.update. pools: of
        the layer's keys and values."""
        config, kernels = self.config, self.kernels
        eps, (keys, values) = config.rms_norm_eps, pools
        kernels.linear(held.qkv, x, layer.qkv)
        kernels.rope_write_kv(held.qkv, layer.qk_norms, eps, self.cos_sin, rows, keys, values)
        self.attend(held.mixed, held.qkv, keys, values, rows, config.head_dim**-0.5, window)
        kernels.linear(held.update, held.mixed, layer.o)
        kernels.fused_add_rms_norm(held.hidden, held.update, held.residual, layer.post_norm, eps)
        kernels.gated_linear(held.activated, held.hidden, layer.gate_up)
        kernels.linear(held.update, held.activated, layer.down)
