"""What a model that drafts is asked for. An entry of a slot is what it keeps of one position, in pages of its own pool that have
the numbers of the target's. One thread at a time; no state of requests."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.contracts.ops import RaggedRows
from services.worker.exec.pools.kv_pool import KVPool, LayerKV


class DraftModel(Protocol):
    """Entry p is of the token at p + shift, and of what the target knows at p, if shift is 1. layers: what each keeps of an
    entry. max_context: entries of a slot."""

    shift: int
    layers: tuple[LayerKV, ...]
    max_context: int

    def forward(self, ids: Tensor, states: Tensor | None, rows: RaggedRows, pool: KVPool) -> None:
        """ids: int64[T], of the target's tokens. states: [T, H], of entry() or guess(); None where shift is 0."""

    def entry(self, kept: tuple[Tensor, ...]) -> Tensor | None:
        """States [T, H] of what the target has kept of T tokens."""

    def guess(self, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        """int64[W], the most likely tokens behind entries of the last pass, and states for entries of these tokens. wanted:
        int64[W], indices into T. Valid until the next pass."""
