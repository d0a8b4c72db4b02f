"""The sampling kernels in Triton, as one object. See kernels.contracts.sample_ops."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contracts.sample_ops import Measured, SampleRows, SlotTable
from kernels.triton.sampling import edit_logits, measure_logprobs, select_tokens
from kernels.triton.sampling.measure_logprobs import MeasureScratch
from kernels.triton.sampling.select_scratch import SelectScratch


class TritonSampling:
    """Owns the memory its kernels leave values in for one another: its calls must follow one another on one stream."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """max_rows: of one call of select_tokens. Raises ValueError for a vocabulary that is too large."""
        self._select = SelectScratch.of(max_rows, vocab_size, device)
        self._measure = MeasureScratch.of(max_rows, vocab_size, device)

    def edit_logits(self, edited: Tensor, logits: Tensor, rows: SampleRows, table: SlotTable) -> None:
        edit_logits.edit_logits(edited, logits, rows, table)

    def select_tokens(
        self,
        tokens: Tensor,
        faults: Tensor,
        logits: Tensor,
        edited: Tensor,
        rows: SampleRows,
        table: SlotTable,
        relay: Tensor,
    ) -> None:
        select_tokens.select_tokens(tokens, faults, logits, edited, rows, table, relay, self._select)

    def measure_logprobs(self, out: Measured, logits: Tensor, tokens: Tensor, rows: Tensor) -> None:
        measure_logprobs.measure_logprobs(out, logits, tokens, rows, self._measure)
