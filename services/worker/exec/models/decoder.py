"""Runs a dense model over the ragged batch of a step. Holds no request state."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contracts.ops import RaggedRows
from services.worker.exec.contracts.causal_model import NoVocabulary
from services.worker.exec.models.dense import DenseModel
from services.worker.exec.models.layers import Activations, Attend, ForwardContext, Workspace
from services.worker.exec.pools.kv_pool import KVPool


class Decoder:
    """Implements CausalModel. Owns the activation buffers of its passes; one thread calls it at a time."""

    def __init__(self, model: DenseModel, cos_sin: Tensor, attend: Attend, aux_layers: tuple[int, ...] = ()) -> None:
        """
        Args:
            cos_sin: float32[positions, D], see rope_table().
            attend: Kernels.paged_attention, or that of an attention back end.
            aux_layers: layers whose inputs are kept for a draft head, ascending; the number of layers stands for the last one's
                output.
        """
        assert all(0 <= layer <= len(model.layers) for layer in aux_layers), "a layer's input, or the last one's output"
        self.model = model
        self._cos_sin, self._attend, self._aux_layers = cos_sin, attend, aux_layers
        self._hidden_size = model.config.hidden_size
        self._space = Workspace(model.embedding.weight.dtype, model.embedding.weight.device)
        self._last: Activations | None = None

    def attending(self, attend: Attend, aux_layers: tuple[int, ...] = ()) -> Decoder:
        """Returns a decoder of the same model with another attention, and with buffers of its own."""
        return Decoder(self.model, self._cos_sin, attend, aux_layers)

    def reserve(self, num_tokens: int, num_wanted: int) -> None:
        """Takes the buffers of the largest step, and fixes them.

        Args:
            num_tokens: tokens of the step.
            num_wanted: largest number of rows of one call of states() or logits().
        """
        self.model.reserve(Activations(self._space, num_tokens, self._hidden_size))
        self.aux_states(num_tokens)
        self._space.take("normed", num_wanted, self._hidden_size)
        if self.model.head is not None:
            self._space.take("logits", num_wanted, self.model.head.vocab_size, torch.float32)
        self._space.fix()

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> None:
        assert len(input_ids) == len(rows.positions) == len(rows.locations), "a position and a place in the pool for each token"
        assert len(pool.keys) == len(self.model.layers), "a pool for each layer"
        activations = Activations(self._space, len(input_ids), self._hidden_size)
        context = ForwardContext(rows, self._cos_sin, self._attend, activations)
        aux = dict(zip(self._aux_layers, self.aux_states(len(input_ids)), strict=True))
        self.model.forward(input_ids, pool, context, aux)
        self._last = activations

    def aux_states(self, num_tokens: int) -> tuple[Tensor, ...]:
        """Returns the inputs of the aux layers, [num_tokens, N] each, for the first tokens of the last pass.

        They are also those of a pass that a graph replayed, and are valid until the next pass.
        """
        return tuple(self._space.take(f"aux {layer}", num_tokens, self._hidden_size) for layer in self._aux_layers)

    def states(self, wanted: Tensor) -> Tensor:
        """Returns the final norm of the wanted rows. See CausalModel."""
        if self._last is None:
            raise RuntimeError("no step has been computed")
        assert wanted.dim() == 1, "indices into the step's tokens"
        normed = self._space.take("normed", len(wanted), self._hidden_size)
        if len(wanted):
            self.model.norm.add(normed, self._last.update[wanted], self._last.residual[wanted])
        return normed

    def logits(self, wanted: Tensor) -> Tensor:
        """Projects the states of the wanted rows. Raises NoVocabulary. See CausalModel."""
        head = self.model.head
        if head is None:
            raise NoVocabulary("this model gives vectors and no tokens")
        logits = self._space.take("logits", len(wanted), head.vocab_size, torch.float32)
        if len(wanted):
            head.forward(logits, self.states(wanted))
        return logits
