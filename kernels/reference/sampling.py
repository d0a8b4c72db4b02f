"""Sampling on the device in plain torch, row by row on the host: what kernels.triton and kernels.cpu are measured against. See
kernels.contracts.sample_ops. It reads values on the host, so it is for no CUDA graph."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.contracts.row_fault import RowFault
from kernels.contracts.sample_ops import MAX_COUNT, Measured, SampleRows, SlotColumn, SlotTable
from kernels.reference.draws import draw_token, support, tempered

UINT64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FINITE = torch.finfo(torch.float32)


class SlotParams:
    """One slot's row of SlotTable.params, read on the host."""

    def __init__(self, params: Tensor) -> None:
        host = params.cpu()
        self._ints: list[int] = host.tolist()
        self._floats: list[float] = host.view(torch.float32).tolist()

    def number(self, column: SlotColumn) -> int:
        return self._ints[column]

    def real(self, column: SlotColumn) -> float:
        return self._floats[column]

    @property
    def seed(self) -> int:
        low, high = self._ints[SlotColumn.SEED_LOW], self._ints[SlotColumn.SEED_HIGH]
        return (high & 0xFFFFFFFF) << 32 | low & 0xFFFFFFFF


def _mixed(value: int) -> int:
    """splitmix64's finaliser."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & UINT64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & UINT64
    return value ^ value >> 31


def uniform(seed: int, position: int) -> float:
    """In [0, 1), with 53 bits: a function of the seed (64 bits) and the position alone."""
    stream = _mixed((seed + GOLDEN) & UINT64)
    return (_mixed((stream + (position + 1) * GOLDEN) & UINT64) >> 11) * 2.0**-53


def _bits(words: Tensor, size: int) -> Tensor:
    """int32[ceil(size / 32)] -> bool[size]."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[:, None] >> shifts & 1).flatten()[:size] != 0


def _is_edited(row: int, rows: SampleRows, params: SlotParams) -> bool:
    losses = int(rows.loss_offsets[row + 1]) > int(rows.loss_offsets[row])
    return int(rows.positions[row]) < params.number(SlotColumn.EDITED_UNTIL) or int(rows.mask_rows[row]) >= 0 or losses


def _penalized(x: Tensor, counts: Tensor, params: SlotParams) -> Tensor:
    """x: float32[V]; counts: int16[V]. In float64 until the end, so that what is finite stays so."""
    wide, repetition = x.double(), params.real(SlotColumn.REPETITION)
    scaled = torch.where(x > 0, wide / repetition, wide * repetition).clamp(FINITE.min, FINITE.max).float()
    x = torch.where((counts != 0) & x.isfinite(), scaled, x)
    outputs = (counts & MAX_COUNT).double()
    lost = outputs * params.real(SlotColumn.FREQUENCY) + params.real(SlotColumn.PRESENCE)
    return torch.where(outputs > 0, x - lost.float(), x)


def _edit_row(x: Tensor, row: int, slot: int, params: SlotParams, rows: SampleRows, table: SlotTable) -> None:
    """Edits float32[V] in place."""
    if params.number(SlotColumn.COUNTS):
        x.copy_(_penalized(x, table.counts[slot], params))
    lost = slice(int(rows.loss_offsets[row]), int(rows.loss_offsets[row + 1]))
    x[rows.loss_ids[lost].long()] -= rows.losses[lost]
    biased = params.number(SlotColumn.NUM_BIASES)
    for token, bias in zip(table.bias_ids[slot, :biased].tolist(), table.biases[slot, :biased], strict=True):
        x[token] += bias
    if int(rows.positions[row]) < params.number(SlotColumn.STOPPED_UNTIL):
        x[table.stop_ids[slot, : params.number(SlotColumn.NUM_STOPS)].long()] = -torch.inf
    if params.number(SlotColumn.WORDS):
        x.masked_fill_(~_bits(table.words[slot], len(x)), -torch.inf)
    if (mask := int(rows.mask_rows[row])) >= 0:
        x.masked_fill_(~_bits(rows.masks[mask], len(x)), -torch.inf)


def edit_logits(edited: Tensor, logits: Tensor, rows: SampleRows, table: SlotTable) -> None:
    for row, slot in enumerate(rows.slots.tolist()):
        if slot < 0:
            continue
        params = SlotParams(table.params[slot])
        if _is_edited(row, rows, params):
            edited[row] = logits[row]
            _edit_row(edited[row], row, slot, params, rows, table)


def _drawn(x: Tensor, position: int, params: SlotParams) -> int:
    """x: float32[V] on the host, with a finite maximum."""
    temperature = params.real(SlotColumn.TEMPERATURE)
    if temperature == 0:
        return int(x.argmax())
    scaled = tempered(x, temperature, params.real(SlotColumn.TOP_N_SIGMA))
    top_p, min_p = params.real(SlotColumn.TOP_P), params.real(SlotColumn.MIN_P)
    return draw_token(scaled, support(scaled, params.number(SlotColumn.TOP_K), top_p, min_p), uniform(params.seed, position))


def _is_finite(x: Tensor) -> bool:
    """Of the maximum; a NaN counts as the maximum."""
    return math.isfinite(float(x.max()))


def select_tokens(
    tokens: Tensor,
    faults: Tensor,
    logits: Tensor,
    edited: Tensor,
    rows: SampleRows,
    table: SlotTable,
    relay: Tensor,
) -> None:
    tokens.zero_()
    faults.zero_()
    for row, slot in enumerate(rows.slots.tolist()):
        if slot < 0:
            continue
        params = SlotParams(table.params[slot])
        source = edited[row].cpu() if _is_edited(row, rows, params) else logits[row].cpu()
        if not _is_finite(logits[row]):
            faults[row] = RowFault.NAN_LOGITS
        elif not _is_finite(source):
            faults[row] = RowFault.NO_TOKEN_ALLOWED
        else:
            token = _drawn(source, int(rows.positions[row]), params)
            tokens[row] = relay[slot] = token
            if params.number(SlotColumn.COUNTS) and int(table.counts[slot, token]) & MAX_COUNT < MAX_COUNT:
                table.counts[slot, token] += 1


def measure_logprobs(out: Measured, logits: Tensor, tokens: Tensor, rows: Tensor) -> None:
    vocab_size, num_top = logits.shape[1], out.top_ids.shape[1]
    kept = min(num_top, vocab_size)
    for index, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
        if row < 0:
            continue
        x = logits[row]
        mass = x.logsumexp(0)
        out.mass[index] = mass
        out.own[index] = x[token] - mass if 0 <= token < vocab_size else -torch.inf
        values, ids = x.sort(descending=True, stable=True)
        out.top_ids[index], out.top[index] = -1, -torch.inf
        out.top_ids[index, :kept] = ids[:kept].int()
        out.top[index, :kept] = values[:kept] - mass
