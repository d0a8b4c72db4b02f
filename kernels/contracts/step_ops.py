"""What a step needs on the device before its forward pass: page tables and input tokens. kernels.reference.layers satisfies it
as a module, kernels.triton and kernels.cpu as objects.

No call reads a device value on the host, and none allocates: each can be captured in a CUDA graph, where its host arguments
and the tensors' addresses are fixed. Columns are int32 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.contracts.ops import Kernels, RaggedRows

BringPieces = Callable[[Tensor, Tensor, Tensor], None]
"""Pieces of rows into pools, by addresses: see kernels/triton/page_pieces.py."""


@dataclass(frozen=True, slots=True)
class TableUpdates:
    """For update u, entries firsts[u] .. firsts[u] + counts[u] - 1 of row slots[u] become pages[offsets[u] + i].

    slots, firsts, counts, offsets: [U]; pages: [N]. An update whose slot is below 0 or whose count is 0 does nothing; what
    would lie outside the table is left out. Two updates of one call never name the same entry.
    """

    slots: Tensor
    firsts: Tensor
    counts: Tensor
    offsets: Tensor
    pages: Tensor


class StepKernels(Protocol):
    def update_page_table(self, table: Tensor, updates: TableUpdates) -> None:
        """table: int32[slots, pages], in place."""

    def resolve_tokens(
        self,
        input_ids: Tensor,
        rows: RaggedRows,
        given: Tensor,
        relay: Tensor,
        unwritten: Tensor | None,
        num_extend: int,
        page_size: int,
        vocab_size: int,
        max_tokens: int,
        known: Tensor | None = None,
    ) -> None:
        """Fills input_ids int64[T], rows.positions int32[T] and rows.locations int64[T] of the step.

        Token i of row r: position starts[r] + i; location through the page table of slots[r], below 0 where the slot is
        below 0, the position is outside the table or its page is. Its id: of the first num_extend rows, given[offsets[r] +
        i] (given: int32[T], read there alone); of the others, relay[slots[r]] (int64[slots]), unless known has an id at or
        above 0 for that token (known: int32[T]; None: for none). Ids are cut to 0 .. vocab_size - 1. unwritten: int32[1],
        counts the relayed ids that were below 0 in slots at or above 0; None: not counted. max_tokens: no row has more.
        Tokens of rows with num_tokens 0 do not exist.
        """

    def page_indices(self, out: Tensor, indptr: Tensor, rows: RaggedRows) -> None:
        """out: int32[N]; indptr: int32[R + 1]. out[indptr[r] + i] = page i of row r, for i < indptr[r + 1] - indptr[r].

        Pages are those of rows.page_table[rows.slots[r]]; 0 stands for an entry below 0, and for all of a slot below 0.
        """


class LayerKernels(Kernels, StepKernels, Protocol):
    """What runs the model's layers also begins its steps."""
