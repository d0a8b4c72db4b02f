"""The sampling parameters of newly admitted slots as columns for the device (kernels.contracts.sample_ops.SlotTable)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.contracts.sample_ops import MAX_COUNT, SEEN, SlotColumn
from services.worker.core.contracts.plan import SlotParams
from services.worker.exec.sampling.token_sets import inside, token_words

I32 = NDArray[np.int32]
MASK32 = (1 << 32) - 1
LATEST = np.iinfo(np.int32).max  # position beyond every sequence
FLOATS = (
    SlotColumn.TEMPERATURE,
    SlotColumn.TOP_P,
    SlotColumn.MIN_P,
    SlotColumn.TOP_N_SIGMA,
    SlotColumn.REPETITION,
    SlotColumn.FREQUENCY,
    SlotColumn.PRESENCE,
)


@dataclass(frozen=True, slots=True)
class Admission:
    """The parameters of A slots that a step admits, as flat columns. Columns with the same size letter are parallel."""

    slots: I32  # [A]
    params: I32  # [A, SlotColumn.WIDTH]
    bias_slots: I32  # [B], the slot of each logit bias
    bias_places: I32  # [B], its index in the slot's list
    bias_ids: I32  # [B]
    biases: NDArray[np.float32]  # [B]
    stop_slots: I32  # [C], the slot of each stop token
    stop_places: I32  # [C], its index in the slot's list
    stop_ids: I32  # [C]
    word_slots: I32  # [W], slots with allowed or banned tokens
    words: NDArray[np.uint32]  # [W * ceil(V / 32)], their token sets
    counted_slots: I32  # slots whose past tokens are counted for penalties
    count_slots: I32  # [P], a slot and one of its distinct past tokens
    count_ids: I32  # [P]
    counts: I32  # [P], as in SlotTable.counts

    @classmethod
    def of(cls, admitted: Sequence[SlotParams], vocab_size: int) -> Admission:
        biases = [_biases(slot, vocab_size) for slot in admitted]
        stops = [inside(slot.stop_token_ids if slot.params.min_new_tokens else (), vocab_size) for slot in admitted]
        worded = [slot for slot in admitted if slot.params.allowed_token_ids or slot.params.banned_token_ids]
        counted = [slot for slot in admitted if needs_counts(slot)]
        past = [past_counts(slot, vocab_size) for slot in counted]
        assert len({slot.slot for slot in admitted}) == len(admitted), "a step admits a slot once"
        params = np.zeros((len(admitted), SlotColumn.WIDTH), dtype=np.int32)
        for row, slot, bias, stop in zip(params, admitted, biases, stops, strict=True):
            _fill(row, slot, len(bias[0]), len(stop))
        bias_slots, bias_places = _addresses(admitted, [ids for ids, _ in biases])
        stop_slots, stop_places = _addresses(admitted, stops)
        return cls(
            slots=_i32([slot.slot for slot in admitted]),
            params=params,
            bias_slots=bias_slots,
            bias_places=bias_places,
            bias_ids=_joined([ids for ids, _ in biases]),
            biases=np.concatenate([np.empty(0, np.float32), *(values for _, values in biases)]),
            stop_slots=stop_slots,
            stop_places=stop_places,
            stop_ids=_joined(stops),
            word_slots=_i32([slot.slot for slot in worded]),
            words=np.concatenate([np.empty(0, np.uint32), *(_words(slot, vocab_size) for slot in worded)]),
            counted_slots=_i32([slot.slot for slot in counted]),
            count_slots=np.repeat(_i32([slot.slot for slot in counted]), [len(ids) for ids, _ in past]).astype(np.int32),
            count_ids=_joined([ids for ids, _ in past]),
            counts=_joined([values for _, values in past]),
        )

    def sections(self) -> list[tuple[str, NDArray[np.generic]]]:
        """Returns the columns as sections of an upload, named by their fields."""
        return [(name, getattr(self, name)) for name in self.__slots__]


def edited_until(slot: SlotParams) -> int:
    """Returns the first position whose logits the slot's parameters leave unchanged.

    The losses of DRY do not count here, because each step uploads its own (SampleRows.losses).

    Returns:
        0 if nothing is edited, the end of min_new_tokens if only stop tokens are forbidden, else LATEST.
    """
    params = slot.params
    if needs_counts(slot) or params.logit_bias or params.allowed_token_ids or params.banned_token_ids:
        return int(LATEST)
    return slot.num_prompt_tokens + params.min_new_tokens if params.min_new_tokens and slot.stop_token_ids else 0


def needs_counts(slot: SlotParams) -> bool:
    params = slot.params
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0)


def _i32(values: Sequence[int]) -> I32:
    return np.array(values, dtype=np.int32)


def _joined(parts: Sequence[NDArray[np.integer]]) -> I32:
    return np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32)


def _addresses(admitted: Sequence[SlotParams], lists: Sequence[NDArray[np.integer]]) -> tuple[I32, I32]:
    """Returns the slot of each entry of the lists, and its index in its list."""
    sizes = [len(entries) for entries in lists]
    assert len(lists) == len(admitted), "each slot has a list, an empty one too"
    slots = np.repeat(_i32([slot.slot for slot in admitted]), sizes).astype(np.int32)
    return slots, _joined([np.arange(size) for size in sizes])


def _biases(slot: SlotParams, vocab_size: int) -> tuple[I32, NDArray[np.float32]]:
    kept = [(token, bias) for token, bias in slot.params.logit_bias if 0 <= token < vocab_size]
    return _i32([token for token, _ in kept]), np.array([bias for _, bias in kept], dtype=np.float32)


def _words(slot: SlotParams, vocab_size: int) -> NDArray[np.uint32]:
    return token_words(slot.params.allowed_token_ids, slot.params.banned_token_ids, vocab_size)


def past_counts(slot: SlotParams, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the distinct tokens of the slot's history and their values in SlotTable.counts.

    A value is the number of occurrences in the kept output, with the bit SEEN for a token of the prompt.
    """
    history = slot.history.astype(np.int64).clip(0, vocab_size - 1)
    prompt, output = history[: slot.num_prompt_tokens], history[slot.num_prompt_tokens :]
    ids = np.unique(history)
    counts = np.zeros(len(ids), dtype=np.int64)
    kept, times = np.unique(output, return_counts=True)
    counts[np.searchsorted(ids, kept)] = times.clip(max=MAX_COUNT)
    counts[np.searchsorted(ids, np.unique(prompt))] += SEEN  # SEEN is the sign bit of an int16; adding it sets it
    assert not len(counts) or (counts.min() >= SEEN and counts.max() <= MAX_COUNT), "a count fits 16 bits"
    assert (counts != 0).all(), "each token of the history has been seen"
    return ids, counts


def _fill(row: I32, slot: SlotParams, num_biases: int, num_stops: int) -> None:
    params, floats = slot.params, row.view(np.float32)
    row[SlotColumn.SEED_LOW] = np.uint32(params.seed & MASK32).astype(np.int32)
    row[SlotColumn.SEED_HIGH] = np.uint32(params.seed >> 32 & MASK32).astype(np.int32)
    row[SlotColumn.TOP_K] = min(max(params.top_k, 0), LATEST)
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    floats[list(FLOATS)] = (params.temperature, params.top_p, params.min_p, params.top_n_sigma, *penalties)
    row[SlotColumn.EDITED_UNTIL] = edited_until(slot)
    row[SlotColumn.STOPPED_UNTIL] = slot.num_prompt_tokens + params.min_new_tokens
    row[SlotColumn.NUM_BIASES], row[SlotColumn.NUM_STOPS] = num_biases, num_stops
    row[SlotColumn.COUNTS] = needs_counts(slot)
    row[SlotColumn.WORDS] = bool(params.allowed_token_ids or params.banned_token_ids)
