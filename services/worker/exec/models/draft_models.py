"""Models that draft: a small decoder beside the target, or a head of one layer that reads the target's own states.

EAGLE-3 (https://arxiv.org/abs/2503.01840) and multi-token prediction (https://arxiv.org/abs/2412.19437, 2.2) differ in how a
token's embedding and a state become one layer's input, and in which state goes on to the next guess.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contracts.ops import Kernels, RaggedRows
from services.worker.exec.contracts.causal_model import CausalModel
from services.worker.exec.models.decoder_layer import Activations, DecoderLayer, Workspace
from services.worker.exec.pools.kv_pool import KVPool, LayerKV
from services.worker.exec.weights.draft_weights import DraftHead


class SmallDecoder:
    """A DraftModel: any causal model of the target's vocabulary. vocab_size: of the target, whose tokens alone are guessed."""

    shift = 0

    def __init__(self, decoder: CausalModel, layers: tuple[LayerKV, ...], max_context: int, vocab_size: int) -> None:
        self._decoder, self.layers, self.max_context, self._vocab_size = decoder, layers, max_context, vocab_size

    def forward(self, ids: Tensor, states: Tensor | None, rows: RaggedRows, pool: KVPool) -> None:
        assert states is None, "it knows no states of the target"
        self._decoder.forward(ids, rows, pool)

    def entry(self, kept: tuple[Tensor, ...]) -> None:
        return None

    def guess(self, wanted: Tensor) -> tuple[Tensor, None]:
        return self._decoder.logits(wanted)[:, : self._vocab_size].argmax(-1), None


class HeadOfTarget:
    """A DraftModel of one layer."""

    shift = 1

    def __init__(self, head: DraftHead, cos_sin: Tensor, kernels: Kernels, max_context: int) -> None:
        config = head.config
        self._config, self._weights, self._kernels, self.max_context = config, head.weights, kernels, max_context
        self.layers: tuple[LayerKV, ...] = (LayerKV(config.num_kv_heads, config.head_dim, config.head_dim),)
        self._layer = DecoderLayer(config, cos_sin, kernels, kernels.paged_attention)
        self._space = Workspace(head.weights.embedding.dtype, head.weights.embedding.device)
        self._held: Activations | None = None

    def entry(self, kept: tuple[Tensor, ...]) -> Tensor:
        weights, count = self._weights, len(kept[0])
        states = torch.empty((count, self._config.hidden_size), dtype=kept[0].dtype, device=kept[0].device)
        if weights.project is not None:
            self._kernels.linear(states, torch.cat(kept, 1), weights.project)
        else:
            assert weights.target_norm is not None and len(kept) == 1, "without a projection it reads the target's last state"
            self._kernels.rms_norm(states, kept[0].contiguous(), weights.target_norm, self._config.rms_norm_eps)
        return states

    def forward(self, ids: Tensor, states: Tensor | None, rows: RaggedRows, pool: KVPool) -> None:
        assert states is not None and len(states) == len(ids), "a state for each token"
        weights, config, kernels, eps = self._weights, self._config, self._kernels, self._config.rms_norm_eps
        held = Activations.taken(self._space, config, len(ids))
        embedded = torch.index_select(weights.embedding, 0, ids)
        kernels.rms_norm(held.hidden, embedded, weights.embedding_norm, eps)
        kernels.rms_norm(held.update, states, weights.state_norm, eps)
        x = torch.cat((held.hidden, held.update), 1)
        if weights.joined is None:
            held.residual.copy_(states)
        else:
            kernels.linear(held.residual, x, weights.joined)
            kernels.rms_norm(held.hidden, held.residual, weights.layer.input_norm, eps)
            x = held.hidden
        self._layer.run(weights.layer, 0, x, held, rows, pool.layer(0))
        self._held = held

    def guess(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        assert self._held is not None, "guesses follow a pass"
        weights, count = self._weights, len(wanted)
        output, update = self._held.residual[wanted], self._held.update[wanted]
        normed = torch.empty_like(output)
        self._kernels.fused_add_rms_norm(normed, update, output, weights.norm, self._config.rms_norm_eps)
        logits = self._space.take("logits", count, weights.lm_head.out_features, torch.float32)
        self._kernels.linear(logits, normed, weights.lm_head)
        tokens = logits.argmax(-1)
        return tokens if weights.ids is None else weights.ids[tokens], output if weights.joined is None else normed
