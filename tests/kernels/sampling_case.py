"""Arguments and results of a call of the sampling kernels, for the tests of all back ends.

Defines the random sampling parameters and the tolerance for rounding.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.sample_ops import SEEN, SampleKernels, SampleRows, SlotColumn, SlotTable
from rootstock_llm.kernels.reference import sampling
from rootstock_llm.kernels.reference.sampling import draw_token, support, tempered

ALWAYS = (1 << 31) - 1  # value of the column EDITED_UNTIL if logits are edited at every position
POISON = 777.0  # content of memory that a kernel must write or must not read
# If a uniform number is nearer than this to the boundary between two tokens, rounding decides which token is drawn.
NEAR = 2e-6
Columns = TypeVar("Columns", SampleRows, SlotTable)


@dataclass(frozen=True)
class SlotCase:
    """Sampling parameters of one slot, with the meanings of the API; the defaults are neutral."""

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    seed: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    biases: tuple[tuple[int, float], ...] = ()
    stops: tuple[int, ...] = ()
    stopped_until: int = 0  # position from which stop tokens may be sampled
    counted: bool = False  # whether penalties use the token counts of the slot
    seen: tuple[int, ...] = ()  # tokens of the prompt; used if `counted`
    outputs: Mapping[int, int] = field(default_factory=dict)  # number of occurrences in the output by token; used if `counted`
    allowed: Sequence[int] | None = None  # allowed tokens, or None for all

    @property
    def edited(self) -> bool:
        return bool(self.counted or self.biases or self.allowed is not None)


@dataclass(frozen=True)
class Row:
    """A row to sample."""

    slot: int  # below 0: padding
    position: int = 10  # position of the sampled token in the sequence
    mask: Sequence[int] | None = None  # tokens that the grammar allows, or None for all
    losses: Mapping[int, float] = field(default_factory=dict)  # DRY penalty by token, which is subtracted from the logit


def random_cuts(chance: random.Random, vocab_size: int) -> dict[str, Any]:
    """Returns random temperature, cuts and seed. The names are fields of SlotCase and of the core's SamplingParams."""
    return {
        "temperature": chance.choice([0.0, 0.0, 0.25, 0.5, 0.7, 1.0, 2.0, 3.0, 1e-9, 2.0**-30]),
        "top_k": chance.choice([-1, -1, -1, 0, 1, 2, 3, 20, 50, vocab_size - 1, vocab_size, vocab_size + 7]),
        "top_p": chance.choice([1.0, 1.0, 1.0, 0.0, 1e-6, 0.015625, 0.3, 0.5, 0.90625, 0.999]),
        "min_p": chance.choice([0.0, 0.0, 0.0, 0.05, 0.125, 1.0]),
        "top_n_sigma": chance.choice([0.0, 0.0, 0.0, 0.0, 0.01, 0.5, 1.0, 2.0, 1e6]),
        "seed": chance.getrandbits(64),
    }


def could_be(logits: Tensor, case: SlotCase, position: int) -> set[int]:
    """Returns the tokens that a kernel may draw if it rounds differently from the reference.

    Args:
        logits: float32[V] after the edits.
        case: parameters of the slot.
        position: position of the drawn token.
    """
    scaled = tempered(logits, float(np.float32(case.temperature)), float(np.float32(case.top_n_sigma)))
    uniform, found = sampling.uniform(case.seed, position), set()
    for step in (-NEAR, 0.0, NEAR):
        top_p = min(case.top_p + step, 1.0) if case.top_p < 1 else 1.0
        kept = support(scaled, case.top_k, top_p, float(np.float32(case.min_p)))
        found |= {draw_token(scaled, kept, min(max(uniform + shift, 0.0), 1.0)) for shift in (-NEAR, 0.0, NEAR)}
    return found


def words_of(tokens: Sequence[int], vocab_size: int) -> Tensor:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float32)


def table_of(case: Sequence[SlotCase], vocab_size: int, max_listed: int = 140) -> SlotTable:
    num_words = -(-vocab_size // 32)
    table = SlotTable(
        params=torch.zeros((len(case), SlotColumn.WIDTH), dtype=torch.int32),
        counts=torch.zeros((len(case), vocab_size), dtype=torch.int16),
        words=torch.zeros((len(case), num_words), dtype=torch.int32),
        bias_ids=torch.full((len(case), max_listed), vocab_size - 1, dtype=torch.int32),
        biases=torch.full((len(case), max_listed), POISON),
        stop_ids=torch.zeros((len(case), max_listed), dtype=torch.int32),
    )
    for slot, one in enumerate(case):
        _admit(table, slot, one, vocab_size)
    return table


def _admit(table: SlotTable, slot: int, one: SlotCase, vocab_size: int) -> None:
    integers = {
        SlotColumn.SEED_LOW: np.uint32(one.seed & 0xFFFFFFFF).view(np.int32),
        SlotColumn.SEED_HIGH: np.uint32(one.seed >> 32).view(np.int32),
        SlotColumn.TOP_K: one.top_k,
        SlotColumn.EDITED_UNTIL: ALWAYS if one.edited else one.stopped_until,
        SlotColumn.STOPPED_UNTIL: one.stopped_until,
        SlotColumn.NUM_BIASES: len(one.biases),
        SlotColumn.NUM_STOPS: len(one.stops),
        SlotColumn.COUNTS: one.counted,
        SlotColumn.WORDS: one.allowed is not None,
    }
    reals = {
        SlotColumn.TEMPERATURE: one.temperature,
        SlotColumn.TOP_P: one.top_p,
        SlotColumn.MIN_P: one.min_p,
        SlotColumn.TOP_N_SIGMA: one.top_n_sigma,
        SlotColumn.REPETITION: one.repetition,
        SlotColumn.FREQUENCY: one.frequency,
        SlotColumn.PRESENCE: one.presence,
    }
    for column, value in integers.items():
        table.params[slot, column] = int(value)
    for column, value in reals.items():
        table.params[slot, column] = int(np.float32(value).view(np.int32))
    for token, count in one.outputs.items():
        table.counts[slot, token] = count
    for token in one.seen:
        table.counts[slot, token] |= SEEN
    if one.allowed is not None:
        table.words[slot] = words_of(one.allowed, vocab_size)
    if one.biases:
        table.bias_ids[slot, : len(one.biases)] = ints([token for token, _ in one.biases])
        table.biases[slot, : len(one.biases)] = floats([bias for _, bias in one.biases])
    if one.stops:
        table.stop_ids[slot, : len(one.stops)] = ints(one.stops)


def rows_of(rows: Sequence[Row], vocab_size: int) -> SampleRows:
    masked = [row.mask for row in rows if row.mask is not None]
    mask_rows = iter(range(len(masked)))
    masks = [words_of(mask, vocab_size) for mask in masked] or [torch.zeros(-(-vocab_size // 32), dtype=torch.int32)]
    ends = np.cumsum([0] + [len(row.losses) for row in rows])
    return SampleRows(
        slots=ints([row.slot for row in rows]),
        positions=ints([row.position for row in rows]),
        mask_rows=ints([-1 if row.mask is None else next(mask_rows) for row in rows]),
        masks=torch.stack(masks),
        loss_offsets=torch.from_numpy(ends.astype(np.int32)),
        loss_ids=ints([token for row in rows for token in row.losses] or [0]),
        losses=floats([loss for row in rows for loss in row.losses.values()] or [0.0]),
    )


def on_device(columns: Columns, device: torch.device) -> Columns:
    """Returns a copy with all tensors on the device."""
    return replace(columns, **{name.name: getattr(columns, name.name).to(device) for name in fields(columns)})


@dataclass
class Written:
    """Tensors that the sampling kernels have written in a call."""

    tokens: Tensor
    faults: Tensor
    edited: Tensor
    relay: Tensor
    counts: Tensor


def sampled(kernels: SampleKernels, logits: Tensor, rows: SampleRows, table: SlotTable, device: torch.device) -> Written:
    """Runs edit_logits and select_tokens over poisoned outputs, and checks that the logits stay unchanged."""
    table = on_device(replace(table, counts=table.counts.clone()), device)
    rows, device_logits = on_device(rows, device), logits.to(device, copy=True)
    written = Written(
        tokens=torch.full((len(logits),), 99, dtype=torch.int32, device=device),
        faults=torch.full((len(logits),), 99, dtype=torch.int32, device=device),
        edited=torch.full(logits.shape, POISON, device=device),
        relay=torch.full((len(table.params),), -1, dtype=torch.int64, device=device),
        counts=table.counts,
    )
    kernels.edit_logits(written.edited, device_logits, rows, table)
    kernels.select_tokens(written.tokens, written.faults, device_logits, written.edited, rows, table, written.relay)
    assert device_logits.cpu().view(torch.int32).equal(logits.view(torch.int32)), "the kernels must not change the input logits"
    return Written(*(column.cpu() for column in (written.tokens, written.faults, written.edited, written.relay, written.counts)))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.float64]:
    """Returns the reference's uniform numbers, float64[n]."""
    pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
    return np.array([sampling.uniform(seed, position) for seed, position in pairs])
