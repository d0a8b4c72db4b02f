"""The forward pass of a dense decoder (Llama, Mistral, Qwen2, Qwen3) over a ragged batch. Holds no request state."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contracts.ops import Kernels, RaggedRows
from services.worker.exec.contracts.causal_model import NoVocabulary
from services.worker.exec.models.decoder_layer import Activations, Attend, DecoderLayer, Workspace
from services.worker.exec.pools.kv_pool import KVPool
from services.worker.exec.weights.families import DecoderConfig
from services.worker.exec.weights.weights import DecoderWeights


class Decoder:
    """Runs layers over buffers of its own. One thread at a time. attend: None for the kernels' own attention. kept: layers whose
    input is kept for who drafts, rising; the number of layers stands for the last one's output."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        cos_sin: Tensor,
        kernels: Kernels,
        attend: Attend | None = None,
        kept: tuple[int, ...] = (),
    ) -> None:
        assert len(weights.layers) == len(config.windows) == config.num_layers, "weights and a window for each layer"
        assert all(0 <= layer <= config.num_layers for layer in kept), "what is kept is some layer's input, or the last's output"
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._layer = DecoderLayer(config, cos_sin, kernels, attend or kernels.paged_attention)
        self._space = Workspace(weights.embedding.dtype, weights.embedding.device)
        self._held: Activations | None = None
        self._kept = {layer: place for place, layer in enumerate(kept)}

    @property
    def config(self) -> DecoderConfig:
        return self._config

    @property
    def weights(self) -> DecoderWeights:
        return self._weights

    def attending(self, attend: Attend, kept: tuple[int, ...] = ()) -> Decoder:
        """The same weights with another attention, and buffers of its own."""
        return Decoder(self._config, self._weights, self._layer.cos_sin, self._kernels, attend, kept)

    def reserve(self, num_tokens: int, num_wanted: int) -> None:
        """Takes the buffers of the largest step that there will be, where they then stay."""
        Activations.taken(self._space, self._config, num_tokens)
        self._keeping(num_tokens)
        self._space.take("normed", num_wanted, self._config.hidden_size)
        if self._weights.lm_head is not None:
            self._space.take("logits", num_wanted, self._config.vocab_size, torch.float32)
        self._space.fix()

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> None:
        """See CausalModel."""
        assert len(input_ids) == len(rows.positions) == len(rows.locations), "a position and a place in the pool for each token"
        assert len(pool.keys) == self._config.num_layers, "a pool for each layer"
        config, kernels = self._config, self._kernels
        held = Activations.taken(self._space, config, len(input_ids))
        keeping = self._keeping(len(input_ids))
        torch.index_select(self._weights.embedding, 0, input_ids, out=held.residual)
        for index, layer in enumerate(self._weights.layers):
            if index == 0:
                kernels.rms_norm(held.hidden, held.residual, layer.input_norm, config.rms_norm_eps)
            else:
                kernels.fused_add_rms_norm(held.hidden, held.update, held.residual, layer.input_norm, config.rms_norm_eps)
            if index in self._kept:
                keeping[self._kept[index]].copy_(held.residual)
            pools = pool.layer(index)
            self._layer.run(layer, config.windows[index], held.hidden, held, rows, pools)
        if config.num_layers in self._kept:
            torch.add(held.residual, held.update, out=keeping[self._kept[config.num_layers]])
        self._held = held

    def kept(self, num_tokens: int) -> tuple[Tensor, ...]:
        """[num_tokens, H] of each layer of `kept`, of the first tokens of the last pass, a replayed one too; valid until the
        next."""
        return self._keeping(num_tokens)

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

    def _computed(self) -> Activations:
        if self._held is None:
            raise RuntimeError("no step has been computed")
        return self._held

    def _keeping(self, num_tokens: int) -> tuple[Tensor, ...]:
        return tuple(self._space.take(f"kept {layer}", num_tokens, self._config.hidden_size) for layer in self._kept)
