"""One pass of the model over a step's rows: tokens resolved, layers run. What graphs capture and what eager steps launch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contracts.ops import RaggedRows
from kernels.contracts.step_ops import StepKernels
from services.worker.exec.contracts.causal_model import CausalModel
from services.worker.exec.pools.kv_pool import KVPool
from services.worker.exec.step.forward_batch import DeviceBatch, ForwardBatch

POISON = -1  # what the relay holds for a slot until something is sampled for it


class UnwrittenToken(RuntimeError):
    """A decode row read a slot of the relay that no step has written."""


class ForwardPass:
    """table: int32[slots, pages]; relay: int64[slots], the last token sampled for each
    slot; unwritten: int32[1] where relayed tokens are checked, else None."""

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
        self.model, self.pool = model, pool
        self._kernels, self.table, self._relay = kernels, table, relay
        self._page_size, self._vocab_size, self._unwritten = page_size, vocab_size, unwritten
        self.device = table.device
        self._nothing = torch.empty(0, dtype=torch.int32, device=table.device)

    @property
    def capacity(self) -> int:
        """Tokens that a slot's row of the table maps."""
        return int(self.table.shape[1]) * self._page_size

    def fresh_rows(self, columns: ForwardBatch, device: DeviceBatch) -> tuple[Tensor, RaggedRows]:
        """Input ids int64[T] and rows, both to be filled by run()."""
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
        """given: int32 tokens of the extend rows. known: int32[T], of the others: -1 where the relay has the token. Attention has
        been planned."""
        assert len(ids) == len(rows.positions) == len(rows.locations), "each token has an id, a position and a place"
        assert known is None or len(known) == len(ids), "what is known is known by token"
        tokens = self._nothing if given is None else given
        extends, longest = columns.num_extend, columns.max_tokens
        self._kernels.resolve_tokens(
            ids, rows, tokens, self._relay, self._unwritten, extends, self._page_size, self._vocab_size, longest, known
        )
        self.model.forward(ids, rows, self.pool)

    def all_logits(self, count: int) -> Tensor:
        """float32[count, V], of the first tokens of the pass."""
        return self.model.logits(torch.arange(count, device=self.device))
