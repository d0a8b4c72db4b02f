"""Declares the model that proposes draft tokens.

A draft model keeps one entry per position of a slot: its own KV. Entries are in a pool of the draft model whose pages have the
numbers of the target's pages. One thread at a time calls the model, which holds no state of requests. Letters in shapes: T tokens
of a pass, W wanted tokens, H hidden size.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.contracts.ops import RaggedRows
from services.worker.exec.pools.kv_pool import KVPool, LayerKV


class DraftModel(Protocol):
    """A model that computes entries and draft tokens.

    With shift 1, entry p is computed from the token at position p + 1 and from the target's hidden state at p. With shift 0, it
    is computed from the token at p only.
    """

    shift: int  # distance from an entry's position to its token: 0 or 1
    layers: tuple[LayerKV, ...]  # KV of an entry, per layer
    max_context: int  # largest number of entries of a slot

    def forward(self, ids: Tensor, states: Tensor | None, rows: RaggedRows, pool: KVPool) -> None:
        """Computes entries and writes them to the pool.

        Args:
            ids: int64[T], tokens of the target's vocabulary.
            states: [T, H] from entry() or guess(), None if shift is 0.
        """

    def entry(self, kept: tuple[Tensor, ...]) -> Tensor | None:
        """Returns the input states [T, H] for the hidden states that the target kept of T tokens, None if shift is 0."""

    def guess(self, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the most likely tokens after wanted entries of the last pass, and the states for the entries of these tokens.

        Tokens are int64[W], states [W, H] or None if shift is 0. Both are valid until the next pass.

        Args:
            wanted: int64[W], indices into the T tokens of the pass.
        """
