"""Declares the kernels that prepare a step on the device: page tables and input tokens.

The module rootstock_llm.kernels.reference.layers and the classes CpuKernels and TritonLayers implement the protocol.

No call reads a device value on the host. The Triton kernels allocate no tensor, so that a CUDA graph can capture each call with
its host arguments and its tensors' addresses. Columns are int32 unless a line states another dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rootstock_llm.kernels.contracts.ops import Kernels, RaggedRows

BringPieces = Callable[[Tensor, Tensor, Tensor], None]
"""Copies pages into pools, both given by address, see rootstock_llm.kernels.triton.page_pieces.bring_pieces()."""


@dataclass(frozen=True, slots=True)
class DevicePageTableUpdates:
    """Updates of page table rows, on the device.

    Update u sets entries firsts[u] .. firsts[u] + counts[u] - 1 of row slots[u] to counts[u] page ids, from pages[offsets[u]] on.
    An update with a slot below 0 or a count of 0 does nothing. Entries outside the table are skipped. No two updates of one
    call set the same entry.
    """

    slots: Tensor  # int32[U]
    firsts: Tensor  # int32[U]
    counts: Tensor  # int32[U]
    offsets: Tensor  # int32[U]
    pages: Tensor  # int32[N]: page ids of all updates


class StepKernels(Protocol):
    """The kernels that run before a step's forward pass."""

    def update_page_table(self, table: Tensor, updates: DevicePageTableUpdates) -> None:
        """Applies the updates to table, int32[slots, pages], in place."""

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
        """Fills input_ids, rows.positions and rows.locations of the step.

        Token i of row r has position starts[r] + i. Its location comes from the page table of slots[r]. The location is below 0
        if the slot is below 0, if the position is outside the table, or if its page id is below 0. Token ids are clamped to
        0 .. vocab_size - 1. A row with num_tokens 0 has no tokens.

        Args:
            input_ids: int64[T], filled.
            rows: the step's rows; positions int32[T] and locations int64[T] are filled.
            given: int32[T], the token ids of the first num_extend rows; the other entries are not read.
            relay: int64[slots], the last sampled token per slot, which is the token id of the other rows.
            unwritten: int32[1], increased by the number of rows whose relay entry is below 0 because no token was written to it.
                Rows with a slot below 0 do not count. None: no row is counted.
            num_extend: number of rows whose ids are in `given`.
            page_size: tokens per page.
            vocab_size: number of token ids.
            max_tokens: upper bound of the tokens of any row.
            known: int32[T], per token: an id of 0 or more replaces the id in `relay`. None: no id is replaced.
        """

    def page_indices(self, out: Tensor, indptr: Tensor, rows: RaggedRows) -> None:
        """Gathers the page ids of each row: out[indptr[r] + i] is page i of row r.

        Args:
            out: int32[N], filled.
            indptr: int32[R + 1]; row r has indptr[r + 1] - indptr[r] pages.
            rows: the pages of row r are those of rows.page_table[rows.slots[r]]. An entry below 0 and every entry of a slot
                below 0 become 0.
        """


class LayerKernels(Kernels, StepKernels, Protocol):
    """The kernels of a model's layers and of the start of its steps."""
