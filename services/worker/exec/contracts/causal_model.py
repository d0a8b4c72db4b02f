"""Declares the models that the model runner runs.

One thread at a time calls a model. A model stores nothing about a request outside the KV pool. Letters in shapes: T tokens of the
step's ragged batch, W tokens whose states or logits are requested, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows
from rootstock_llm.services.worker.core.contracts.experts import ExpertShape
from rootstock_llm.services.worker.exec.pools.kv_pool import KVPool


class NoVocabulary(RuntimeError):
    """Raised if logits are requested from a model without a vocabulary projection."""


class TokenModel(Protocol):
    """A model that computes a vector per token: an encoder, or a causal model without its vocabulary projection."""

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> None:
        """Computes all tokens of the step. A causal model writes their keys and values to `pool` at rows.locations.

        Args:
            input_ids: int64[T], ids within the vocabulary.
        """

    def states(self, wanted: Tensor) -> Tensor:
        """Returns [W, H] in the model dtype: the last layer's hidden states after the final norm.

        The result is valid until the next call of any method. states() can be called any number of times after a forward pass.

        Args:
            wanted: int64[W], indices into the T tokens.
        """


class CausalModel(TokenModel, Protocol):
    """A model that also predicts the next token."""

    def logits(self, wanted: Tensor) -> Tensor:
        """Returns float32[W, V], the logits for the token after each of the wanted tokens.

        The result is valid until the next call of logits() or forward().

        Args:
            wanted: int64[W], indices into the T tokens.
        """


class RoutedModel(Protocol):
    """A model that reports the experts that have computed each token."""

    @property
    def experts(self) -> ExpertShape | None:
        """Shape of the model's experts; None if the model has no experts."""

    def routed_experts(self, num_tokens: int) -> Tensor:
        """Returns int32[layers, num_tokens, chosen]: the ids of the experts that computed each token of the last pass.

        The last pass may be a replay of a graph, because the buffer has a constant address. The result is valid until the next
        pass. Called only if the model has experts.

        Args:
            num_tokens: tokens of the last pass, padding included.
        """
