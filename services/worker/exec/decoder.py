"""The forward pass of a dense decoder (Llama, Mistral, Qwen2, Qwen3) over a ragged batch. Holds no request state."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops import Kernels, RaggedRows
from services.worker.exec.families import DecoderConfig
from services.worker.exec.pools import KVPool
from services.worker.exec.weights import DecoderWeights, LayerWeights


class Workspace:
    """Activation buffers, kept from step to step: fresh ones cost page faults. Grows to the largest batch seen."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """[rows, columns], contents undefined, valid until the same name is taken again."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * columns:
            buffer = self._buffers[name] = torch.empty(rows * columns, dtype=dtype or self._dtype)
        return buffer[: rows * columns].view(rows, columns)


class Decoder:
    """Runs layers over buffers of its own. One thread at a time."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, cos_sin: Tensor, kernels: Kernels) -> None:
        self._config = config
        self._weights = weights
        self._cos_sin = cos_sin
        self._kernels = kernels
        self._space = Workspace(weights.embedding.dtype)

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool, wanted: Tensor) -> Tensor:
        """Computes every token's keys and values, and logits, float32[W, vocabulary], of the wanted ones.

        input_ids: int64[T], inside the vocabulary; wanted: int64[W], indices into T. The result is valid until the next call.
        """
        config, kernels, num_tokens = self._config, self._kernels, len(input_ids)
        residual = self._space.take("residual", num_tokens, config.hidden_size)
        hidden = self._space.take("hidden", num_tokens, config.hidden_size)
        update = self._space.take("update", num_tokens, config.hidden_size)
        torch.index_select(self._weights.embedding, 0, input_ids, out=residual)
        for index, layer in enumerate(self._weights.layers):
            if index == 0:
                kernels.rms_norm(hidden, residual, layer.input_norm, config.rms_norm_eps)
            else:
                kernels.fused_add_rms_norm(hidden, update, residual, layer.input_norm, config.rms_norm_eps)
            self._attention(index, layer, hidden, update, rows, pool)
            kernels.fused_add_rms_norm(hidden, update, residual, layer.post_norm, config.rms_norm_eps)
            self._mlp(layer, hidden, update)
        return self._logits(residual, update, wanted)

    def _attention(self, index: int, layer: LayerWeights, hidden: Tensor, update: Tensor, rows: RaggedRows, pool: KVPool) -> None:
        config, kernels = self._config, self._kernels
        qkv = self._space.take("qkv", len(hidden), config.q_size + 2 * config.kv_size)
        mixed = self._space.take("mixed", len(hidden), config.q_size)
        keys, values = pool.keys[index], pool.values[index]
        kernels.linear(qkv, hidden, layer.qkv)
        kernels.rope_write_kv(qkv, layer.qk_norms, config.rms_norm_eps, self._cos_sin, rows, keys, values)
        kernels.paged_attention(mixed, qkv, keys, values, rows, config.head_dim**-0.5, config.windows[index])
        kernels.linear(update, mixed, layer.o)

    def _mlp(self, layer: LayerWeights, hidden: Tensor, update: Tensor) -> None:
        size = self._config.intermediate_size
        activated = self._space.take("activated", len(hidden), size)
        self._kernels.gated_linear(activated, hidden, layer.gate_up)
        self._kernels.linear(update, activated, layer.down)

    def _logits(self, residual: Tensor, update: Tensor, wanted: Tensor) -> Tensor:
        config, count = self._config, len(wanted)
        logits = self._space.take("logits", count, config.vocab_size, torch.float32)
        if count:
            normed = self._space.take("normed", count, config.hidden_size)
            last = residual[wanted]
            self._kernels.fused_add_rms_norm(normed, update[wanted], last, self._weights.norm, config.rms_norm_eps)
            self._kernels.linear(logits, normed, self._weights.lm_head)
        return logits
