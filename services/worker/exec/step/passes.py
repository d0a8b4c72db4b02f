"""The forward pass of the model over the rows of a step. Graphs capture it; other steps launch it kernel by kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contracts.ops import RaggedRows
from kernels.contracts.step_ops import StepKernels
from services.worker.exec.contracts.causal_model import CausalModel
from services.worker.exec.pools.kv_pool import KVPool
from services.worker.exec.step.forward_batch import DeviceBatch, ForwardBatch

POISON = -1  # value of a slot in the relay until a token is sampled for it


class UnwrittenToken(RuntimeError):
    """A decode row read a slot of the relay for which no step has sampled a token."""


class ForwardPass:
    """The tensors and kernels of a forward pass: it resolves input tokens and positions, then runs the model.

    Model and pool are replaced when their memory is released and resumed.
    """

    def __init__(
        self,
        model: CausalModel,
        pool: KVPool,
        kernels: StepKernels,
        table: Tensor,
        relay: Tensor,
        page_size: int,
        vocab_size: int,
        unwritten: Tensor | None,
    ) -> None:
        """Stores the parts.

        Args:
            table: int32[slots, pages], the page table.
            relay: int64[slots], the last token sampled for each slot.
            unwritten: int32[1], counts reads of POISON from the relay, or None if relayed tokens are not checked.
        """
        self.model, self.pool = model, pool
        self._kernels, self.table, self._relay = kernels, table, relay
        self._page_size, self._vocab_size, self._unwritten = page_size, vocab_size, unwritten
        self.device = table.device
        self._nothing = torch.empty(0, dtype=torch.int32, device=table.device)

    @property
    def capacity(self) -> int:
        """Number of positions that the table maps for a slot."""
        return int(self.table.shape[1]) * self._page_size

    def fresh_rows(self, columns: ForwardBatch, device: DeviceBatch) -> tuple[Tensor, RaggedRows]:
        """Returns input ids, int64[T], and rows. Both have uninitialized columns that run() fills."""
        total = columns.total
        assert columns.max_context <= self.capacity, "no position lies beyond the pages of its slot"
        ids = torch.empty(total, dtype=torch.int64, device=self.device)
        rows = RaggedRows(
            page_table=self.table,
            slots=device.slots,
            starts=device.starts,
            num_tokens=device.num_tokens,
            offsets=device.offsets,
            positions=torch.empty(total, dtype=torch.int32, device=self.device),
            locations=torch.empty(total, dtype=torch.int64, device=self.device),
            max_context=columns.max_context,
        )
        return ids, rows

    def run(
        self, ids: Tensor, rows: RaggedRows, columns: ForwardBatch, given: Tensor | None, known: Tensor | None = None
    ) -> None:
        """Resolves ids, positions and locations, and runs the model. Attention must have been planned for these rows.

        Args:
            ids: int64[T], filled here.
            rows: its positions and locations are filled here.
            given: int32, the tokens of the extend rows, or None for none.
            known: int32[T], the ids of decode rows, -1 for a row that reads the relay, or None if all read it.
        """
        assert len(ids) == len(rows.positions) == len(rows.locations), "each token has an id, a position and a place"
        assert known is None or len(known) == len(ids), "what is known is known by token"
        tokens = self._nothing if given is None else given
        extends, longest = columns.num_extend, columns.max_tokens
        self._kernels.resolve_tokens(
            ids, rows, tokens, self._relay, self._unwritten, extends, self._page_size, self._vocab_size, longest, known
        )
        self.model.forward(ids, rows, self.pool)

    def all_logits(self, count: int) -> Tensor:
        """Returns logits of the first `count` tokens of the pass, float32[count, V]."""
        return self.model.logits(torch.arange(count, device=self.device))
