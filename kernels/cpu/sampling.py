"""Implements SampleKernels with the C++ library."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import misfit, require_contiguous
from rootstock_llm.kernels.contracts.sample_ops import MAX_TOP, Measured, SampleRows, SlotColumn, SlotTable
from rootstock_llm.kernels.cpu.functions import INT, INT64, POINTER, load_functions

SAMPLING_SIGNATURES: dict[str, list[type]] = {
    "edit_logits": [POINTER] * 15 + [INT64] * 4 + [INT],
    "select_tokens": [POINTER] * 11 + [INT64] * 2 + [INT],
    "measure_logprobs": [POINTER] * 7 + [INT64] * 3 + [INT],
    "uniforms": [POINTER] * 3 + [INT64, INT],
}


class CpuSampling:
    """The C++ sampling kernels."""

    def __init__(self, path: Path, threads: int) -> None:
        """Loads the library.

        Args:
            path: the shared library.
            threads: size of the OpenMP team of each call.

        Raises:
            OSError: the library cannot be loaded.
        """
        functions = load_functions(path, SAMPLING_SIGNATURES)
        self._threads = threads
        self._edit, self._select = functions["edit_logits"], functions["select_tokens"]
        self._measure, self._uniforms = functions["measure_logprobs"], functions["uniforms"]

    def edit_logits(self, edited: Tensor, logits: Tensor, rows: SampleRows, table: SlotTable) -> None:
        """Implements SampleKernels.edit_logits(). Raises ValueError if the shapes do not fit."""
        _check_shapes(edited, logits, rows, table)
        columns = (rows.slots, rows.positions, rows.mask_rows, rows.loss_offsets, rows.loss_ids, rows.losses, rows.masks)
        tables = (table.params, table.counts, table.words, table.bias_ids, table.biases, table.stop_ids)
        require_contiguous(rows.masks, *tables)
        addresses = [tensor.data_ptr() for tensor in (edited, logits, *columns, *tables)]
        self._edit(*addresses, *logits.shape, table.bias_ids.shape[1], table.stop_ids.shape[1], self._threads)

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
        """Implements SampleKernels.select_tokens(). Raises ValueError if the shapes do not fit."""
        _check_shapes(edited, logits, rows, table)
        if len(tokens) != len(logits) or relay.dtype != torch.int64:
            raise misfit(tokens, logits, relay)
        columns = (rows.slots, rows.positions, rows.mask_rows, rows.loss_offsets, table.params, table.counts, relay)
        addresses = [tensor.data_ptr() for tensor in (tokens, faults, logits, edited, *columns)]
        self._select(*addresses, *logits.shape, self._threads)

    def measure_logprobs(self, out: Measured, logits: Tensor, tokens: Tensor, rows: Tensor) -> None:
        """Implements SampleKernels.measure_logprobs(). Raises ValueError if the shapes do not fit."""
        count, num_top = out.top_ids.shape
        if num_top > MAX_TOP or not len(tokens) == len(rows) == count or logits.dtype != torch.float32:
            raise misfit(out.top_ids, logits, tokens, rows)
        require_contiguous(logits, tokens, rows, out.top_ids, out.top)
        addresses = [tensor.data_ptr() for tensor in (out.own, out.top_ids, out.top, out.mass, logits, tokens, rows)]
        self._measure(*addresses, count, num_top, logits.shape[1], self._threads)

    def uniforms(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Returns float64[n] in [0, 1): the uniform numbers of draws with int64[n] seeds at int32[n] positions."""
        require_contiguous(seeds, positions)
        out = torch.empty(len(seeds), dtype=torch.float64)
        self._uniforms(out.data_ptr(), seeds.data_ptr(), positions.data_ptr(), len(seeds), self._threads)
        return out


def _check_shapes(edited: Tensor, logits: Tensor, rows: SampleRows, table: SlotTable) -> None:
    count, vocab_size = logits.shape
    if (
        logits.dtype != torch.float32
        or edited.shape != logits.shape
        or not len(rows.slots) == len(rows.positions) == len(rows.mask_rows) == len(rows.loss_offsets) - 1 == count
        or table.counts.shape[1] != vocab_size
        or table.params.shape[1] != SlotColumn.WIDTH
        or rows.masks.shape[1] != table.words.shape[1]
    ):
        raise misfit(logits, edited, rows.slots, rows.loss_offsets, rows.masks, table.counts, table.words)
    require_contiguous(edited, logits, table.params, table.counts)
