"""What the model runner needs of a model. One thread at a time; a model holds no state of requests.

Shapes: T tokens of a step's ragged batch, W of them wanted, hidden size H, vocabulary V.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.contracts.ops import RaggedRows
from services.worker.exec.pools.kv_pool import KVPool


class NoVocabulary(RuntimeError):
    """Logits were asked of a model that has no vocabulary projection."""


class TokenModel(Protocol):
    """A model that gives a vector for each token: an encoder, or a causal model below its vocabulary projection."""

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> None:
        """Computes every token of the step; a causal model writes their keys and values to the pool at rows.locations.

        input_ids: int64[T], inside the vocabulary.
        """

    def states(self, wanted: Tensor) -> Tensor:
        """[W, H] in the model dtype: the last layer's hidden states after the final norm. wanted: int64[W], indices into T.

        Valid until the next call of any method; to be called between one forward and the next, as often as is useful.
        """


class CausalModel(TokenModel, Protocol):
    def logits(self, wanted: Tensor) -> Tensor:
        """float32[W, V] of the tokens after the wanted ones. wanted: int64[W], indices into T.

        Valid until the next call of logits() or forward(): whoever wants several pieces reads one before asking for the next.
        """
