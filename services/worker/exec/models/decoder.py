"""The forward pass of a dense decoder (Llama, Mistral, Qwen2, Qwen3) over a ragged batch. Holds no request state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.contracts.ops import Kernels, RaggedRows
from services.worker.exec.contracts.causal_model import NoVocabulary
from services.worker.exec.pools.kv_pool import KVPool
from services.worker.exec.weights.families import DecoderConfig
from services.worker.exec.weights.weights import DecoderWeights, LayerWeights


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
class _Activations:
    """What the layers of one pass share, [T, columns] each."""

    residual: Tensor
    hidden: Tensor
    update: Tensor
    qkv: Tensor
    mixed: Tensor
    activated: Tensor


class Attend(Protocol):
    """Kernels.paged_attention, or what stands in its place."""

    def __call__(
        self, out: Tensor, qkv: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, scale: float, window: int
    ) -> None: ...


class Decoder:
    """Runs layers over buffers of its own. One thread at a time. attend: None for the kernels' own attention."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, cos_sin: Tensor, kernels: Kernels, attend: Attend | None = None
    ) -> None:
        assert len(weights.layers) == len(config.windows) == config.num_layers, "weights and a window for each layer"
        assert cos_sin.shape[1] == config.head_dim, "cosines and sines of half a head's dimensions each"
        self._config = config
        self._weights = weights
        self._cos_sin = cos_sin
        self._kernels = kernels
        self._attend = attend or kernels.paged_attention
        self._space = Workspace(weights.embedding.dtype, weights.embedding.device)
        self._held: _Activations | None = None

    @property
    def config(self) -> DecoderConfig:
        return self._config

    def attending(self, attend: Attend) -> Decoder:
        """The same weights with another attention, and buffers of its own."""
        return Decoder(self._config, self._weights, self._cos_sin, self._kernels, attend)

    def reserve(self, num_tokens: int, num_wanted: int) -> None:
        """Takes the buffers of the largest step that there will be, where they then stay."""
        self._activations(num_tokens)
        self._space.take("normed", num_wanted, self._config.hidden_size)
        if self._weights.lm_head is not None:
            self._space.take("logits", num_wanted, self._config.vocab_size, torch.float32)
        self._space.fix()

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> None:
        """See CausalModel."""
        assert len(input_ids) == len(rows.positions) == len(rows.locations), "a position and a place in the pool for each token"
        assert len(pool.keys) == self._config.num_layers, "a pool for each layer"
        eps, kernels = self._config.rms_norm_eps, self._kernels
        held = self._activations(len(input_ids))
        torch.index_select(self._weights.embedding, 0, input_ids, out=held.residual)
        for index, layer in enumerate(self._weights.layers):
            if index == 0:
                kernels.rms_norm(held.hidden, held.residual, layer.input_norm, eps)
            else:
                kernels.fused_add_rms_norm(held.hidden, held.update, held.residual, layer.input_norm, eps)
            self._attention(index, layer, held, rows, pool)
            kernels.fused_add_rms_norm(held.hidden, held.update, held.residual, layer.post_norm, eps)
            kernels.gated_linear(held.activated, held.hidden, layer.gate_up)
            kernels.linear(held.update, held.activated, layer.down)
        self._held = held

    def states(self, wanted: Tensor) -> Tensor:
        """See CausalModel. Normed for the wanted rows alone: the others' are seldom asked for."""
        held, count = self._computed(), len(wanted)
        assert wanted.dim() == 1, "indices into the step's tokens"
        assert held.residual.shape == held.update.shape, "both sums are of the same tokens"
        normed = self._space.take("normed", count, self._config.hidden_size)
        if count:
            last, update = held.residual[wanted], held.update[wanted]
            self._kernels.fused_add_rms_norm(normed, update, last, self._weights.norm, self._config.rms_norm_eps)
        return normed

    def logits(self, wanted: Tensor) -> Tensor:
        """See CausalModel. Raises NoVocabulary."""
        if self._weights.lm_head is None:
            raise NoVocabulary("this model gives vectors and no tokens")
        logits = self._space.take("logits", len(wanted), self._config.vocab_size, torch.float32)
        if len(wanted):
            self._kernels.linear(logits, self.states(wanted), self._weights.lm_head)
        return logits

    def _computed(self) -> _Activations:
        if self._held is None:
            raise RuntimeError("no step has been computed")
        return self._held

    def _activations(self, num_tokens: int) -> _Activations:
        config = self._config
        widths = {
            "residual": config.hidden_size,
            "hidden": config.hidden_size,
            "update": config.hidden_size,
            "qkv": config.q_size + 2 * config.kv_size,
            "mixed": config.q_size,
            "activated": config.intermediate_size,
        }
        return _Activations(**{name: self._space.take(name, num_tokens, width) for name, width in widths.items()})

    def _attention(self, index: int, layer: LayerWeights, held: _Activations, rows: RaggedRows, pool: KVPool) -> None:
        config, kernels = self._config, self._kernels
        keys, values = pool.keys[index], pool.values[index]
        kernels.linear(held.qkv, held.hidden, layer.qkv)
        kernels.rope_write_kv(held.qkv, layer.qk_norms, config.rms_norm_eps, self._cos_sin, rows, keys, values)
        self._attend(held.mixed, held.qkv, keys, values, rows, config.head_dim**-0.5, config.windows[index])
        kernels.linear(held.update, held.mixed, layer.o)
