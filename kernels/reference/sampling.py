"""Implements the sampling kernels in plain torch, row by row.

These functions are the reference for tests of the C++ and Triton kernels. No CUDA graph can capture them, because they read
values on the host. For shapes see rootstock_llm.kernels.contracts.sample_ops.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.row_fault import RowFault
from rootstock_llm.kernels.contracts.sample_ops import MAX_COUNT, Measured, SampleRows, SlotColumn, SlotTable

FIRST_CANDIDATES = 256  # top-p first ranks this number of most likely tokens, then 16 times as many, and so on


def largest(logits: Tensor, count: int) -> Tensor:
    """Returns the ids of the `count` largest logits of float32[V], ascending. Among equal logits, the lowest ids are chosen."""
    least = torch.topk(logits, count).values[-1]
    above = (logits > least).nonzero().squeeze(1)
    level = (logits == least).nonzero().squeeze(1)[: count - len(above)]
    return torch.cat((above, level)).sort().values


def _nucleus(logits: Tensor, ids: Tensor, total: Tensor, top_p: float) -> tuple[Tensor, bool]:
    """Returns the fewest of the most likely `ids` whose probabilities add up to top_p, and whether all `ids` add up to top_p.

    Args:
        logits: float32[V].
        ids: int64[k], the tokens to choose from.
        total: log of the sum of exp(logit) over all tokens, by which probabilities are normalized.
        top_p: share of the total (nucleus sampling: Holtzman et al., arXiv 1904.09751, section 3.1).

    Returns:
        (ids of the set in ascending order, whether the probability of all `ids` is at least top_p).
    """
    chances, order = (logits[ids].double() - total).exp().sort(descending=True, stable=True)
    before = chances.cumsum(0) - chances
    kept = before < top_p
    kept[0] = True
    return ids[order[kept]].sort().values, bool(chances.sum() >= top_p)


def _log_mass(logits: Tensor) -> Tensor:
    return logits.double().logsumexp(0)


def _nucleus_of_all(logits: Tensor, top_p: float) -> Tensor:
    total, size, count = _log_mass(logits), len(logits), FIRST_CANDIDATES
    while count < size:
        ids, reached = _nucleus(logits, largest(logits, count), total, top_p)
        if reached:
            return ids
        count *= 16
    return _nucleus(logits, torch.arange(size), total, top_p)[0]


def tempered(logits: Tensor, temperature: float, top_n_sigma: float) -> Tensor:
    """Returns float32[V], each logit minus the maximum, divided by the temperature; -inf for tokens that top-n-sigma cuts.

    The maximum must be finite. top_n_sigma of 0 or less cuts nothing.
    """
    scaled = (logits - logits.max()) / temperature  # subtracts first, so that a tiny temperature cannot overflow
    if top_n_sigma <= 0.0:
        return scaled
    sigma = logits[logits.isfinite()].double().std(correction=0).float()
    return scaled.masked_fill(scaled < -(sigma * top_n_sigma / temperature), -torch.inf)


def support(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor | None:
    """Returns the ascending ids that remain after top-k, then top-p and then min-p; None if nothing is cut.

    Args:
        logits: float32[V], the result of tempered().
        top_k: below 1: no cut.
        top_p: share of the probability that remains after top-k; 1: no cut.
        min_p: smallest probability relative to the most likely token; 0: no cut (Nguyen et al., arXiv 2407.01082, section 3).
    """
    ids: Tensor | None = None
    if 0 < top_k < len(logits):
        ids = largest(logits, top_k)
    if top_p < 1.0:
        ids = _nucleus_of_all(logits, top_p) if ids is None else _nucleus(logits, ids, _log_mass(logits[ids]), top_p)[0]
    if min_p > 0.0:
        ids = torch.arange(len(logits)) if ids is None else ids
        ids = ids[logits[ids] >= logits.max() + math.log(min_p)]
    return ids


def draw_token(logits: Tensor, ids: Tensor | None, uniform: float) -> int:
    """Returns the first id, in ascending order, whose cumulated mass (the sum of exp(logit)) exceeds uniform * total mass.

    Args:
        logits: float32[V], the result of tempered().
        ids: int64[k], the tokens to draw from; None for all.
        uniform: number in [0, 1).
    """
    kept = logits if ids is None else logits[ids]
    mass = (kept - kept.max()).exp_().cumsum(0, dtype=torch.float64)
    index = int(torch.searchsorted(mass, mass[-1] * uniform, right=True))
    # Because of rounding, no cumulated mass may exceed the product. The draw is then the last id with a mass above 0.
    if index >= len(mass):
        index = int(torch.searchsorted(mass, mass[-1]))
    return index if ids is None else int(ids[index])


UINT64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FINITE = torch.finfo(torch.float32)


class SlotParams:
    """A copy of one slot's row of SlotTable.params on the host."""

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
    """Returns splitmix64's finalizer of a 64-bit value (Steele et al., OOPSLA 2014, with the constants of Stafford's Mix13)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & UINT64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & UINT64
    return value ^ value >> 31


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) with 53 random bits, a function of only the 64-bit seed and the position."""
    stream = _mixed((seed + GOLDEN) & UINT64)
    return (_mixed((stream + (position + 1) * GOLDEN) & UINT64) >> 11) * 2.0**-53


def _bits(words: Tensor, size: int) -> Tensor:
    """Unpacks int32[ceil(size / 32)] into bool[size]."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[:, None] >> shifts & 1).flatten()[:size] != 0


def _is_edited(row: int, rows: SampleRows, params: SlotParams) -> bool:
    losses = int(rows.loss_offsets[row + 1]) > int(rows.loss_offsets[row])
    return int(rows.positions[row]) < params.number(SlotColumn.EDITED_UNTIL) or int(rows.mask_rows[row]) >= 0 or losses


def _penalized(x: Tensor, counts: Tensor, params: SlotParams) -> Tensor:
    """Applies the penalties of SampleKernels.edit_logits() to the logits of one row.

    The products are computed in float64 and clamped to the range of float32, so that a finite logit does not become infinite.

    Args:
        x: float32[V].
        counts: int16[V].
        params: the slot's parameters.

    Returns:
        float32[V].
    """
    wide, repetition = x.double(), params.real(SlotColumn.REPETITION)
    scaled = torch.where(x > 0, wide / repetition, wide * repetition).clamp(FINITE.min, FINITE.max).float()
    x = torch.where((counts != 0) & x.isfinite(), scaled, x)
    outputs = (counts & MAX_COUNT).double()
    lost = outputs * params.real(SlotColumn.FREQUENCY) + params.real(SlotColumn.PRESENCE)
    return torch.where(outputs > 0, x - lost.float(), x)


def _edit_row(x: Tensor, row: int, slot: int, params: SlotParams, rows: SampleRows, table: SlotTable) -> None:
    """Edits the logits of one row, float32[V], in place."""
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
    """Returns the token of one row of logits, float32[V] on the host, whose maximum is finite."""
    temperature = params.real(SlotColumn.TEMPERATURE)
    if temperature == 0:
        return int(x.argmax())
    scaled = tempered(x, temperature, params.real(SlotColumn.TOP_N_SIGMA))
    top_p, min_p = params.real(SlotColumn.TOP_P), params.real(SlotColumn.MIN_P)
    return draw_token(scaled, support(scaled, params.number(SlotColumn.TOP_K), top_p, min_p), uniform(params.seed, position))


def _is_finite(x: Tensor) -> bool:
    """Whether the maximum of x is finite. A NaN counts as the maximum."""
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
