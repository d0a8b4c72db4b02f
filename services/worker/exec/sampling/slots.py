"""The sampling state of slots: parameters and token counts on the device, past tokens on the host. Owned by the sampler.

A step uploads the parameters of newly admitted slots as an Admission, and DeviceSlots writes them into its SlotTable. PastTokens
computes the corrections of the device's token counts, and the losses of DRY. A loss is a value that is subtracted from a logit. A
set of tokens is a row of bits over the vocabulary: bit i of word w represents token 32 w + i.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.sample_ops import MAX_COUNT, SEEN, SlotColumn, SlotTable
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, SlotParams
from rootstock_llm.services.worker.exec.sampling.dry import Repeats

I32 = NDArray[np.int32]
Words = NDArray[np.uint32]
Loss = tuple[NDArray[np.int64], NDArray[np.float32]]  # all losses of a row: distinct token ids, and the loss of each
WORD_BITS = 32
MASK32 = (1 << 32) - 1
MAX_BIASES = 1024  # largest number of logit biases per slot, which is the limit of a request
MAX_STOPS = 512  # largest number of stop tokens per slot: those of the request and of the model
LATEST = np.iinfo(np.int32).max  # a position after the end of any sequence
NO_LOSS: Loss = (np.empty(0, np.int64), np.empty(0, np.float32))
FLOATS = (  # columns with float32 bits, in the order in which _fill() writes them
    SlotColumn.TEMPERATURE,
    SlotColumn.TOP_P,
    SlotColumn.MIN_P,
    SlotColumn.TOP_N_SIGMA,
    SlotColumn.REPETITION,
    SlotColumn.FREQUENCY,
    SlotColumn.PRESENCE,
)


class TooManyEdits(ValueError):
    """Raised if a slot has more logit biases or stop tokens than a row of the table holds. The slot's rows then get a fault."""


class DeviceSlots:
    """Writes the slot table on the device, on the forward stream in the order of steps."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.table = allocate_slot_table(max_slots, vocab_size, device)

    def admission(self, admitted: Sequence[SlotParams]) -> Admission:
        """Returns the sampling parameters of new slots for an upload. Raises TooManyEdits."""
        admission = Admission.of(admitted, self._vocab_size)
        for column, limit, noun in (
            (SlotColumn.NUM_BIASES, MAX_BIASES, "logit biases"),
            (SlotColumn.NUM_STOPS, MAX_STOPS, "stop tokens"),
        ):
            if len(admitted) and admission.params[:, column].max() > limit:
                raise TooManyEdits(f"a slot has more than {limit} {noun}")
        return admission

    def admit(self, views: Mapping[str, Tensor]) -> None:
        """Writes an uploaded Admission into the table."""
        table, slots = self.table, views["slots"].long()
        assert len(views["params"]) == len(slots) * SlotColumn.WIDTH, "each slot has a row of parameters"
        assert len(views["words"]) == len(views["word_slots"]) * table.words.shape[1], (
            "each slot with a token set has the words of its set"
        )
        table.params.index_copy_(0, slots, views["params"].view(-1, SlotColumn.WIDTH))
        if len(views["bias_slots"]):
            indices = views["bias_slots"].long(), views["bias_indices"].long()
            table.bias_ids.index_put_(indices, views["bias_ids"])
            table.biases.index_put_(indices, views["biases"].view(torch.float32))
        if len(views["stop_slots"]):
            indices = views["stop_slots"].long(), views["stop_indices"].long()
            table.stop_ids.index_put_(indices, views["stop_ids"])
        if len(views["word_slots"]):
            table.words.index_copy_(0, views["word_slots"].long(), views["words"].view(-1, table.words.shape[1]))
        if len(views["counted_slots"]):
            table.counts.index_fill_(0, views["counted_slots"].long(), 0)
            indices = views["count_slots"].long(), views["count_ids"].long()
            table.counts.index_put_(indices, views["counts"].to(torch.int16))

    def adjust_counts(self, slots: Tensor, ids: Tensor, changes: Tensor) -> None:
        """Adds `changes` to counts[slots, ids]. Each pair of slot and id must occur at most once."""
        assert len(slots) == len(ids) == len(changes), "each change has a slot and a token id"
        indices = slots.long(), ids.long()
        self.table.counts.index_put_(indices, self.table.counts[indices] + changes.to(torch.int16))


def allocate_slot_table(max_slots: int, vocab_size: int, device: torch.device) -> SlotTable:
    """Returns a table of zeros: every slot samples greedily, and no logits are edited."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return SlotTable(
        params=zeros(max_slots, SlotColumn.WIDTH),
        counts=zeros(max_slots, vocab_size, dtype=torch.int16),
        words=zeros(max_slots, -(-vocab_size // WORD_BITS)),
        bias_ids=zeros(max_slots, MAX_BIASES),
        biases=zeros(max_slots, MAX_BIASES, dtype=torch.float32),
        stop_ids=zeros(max_slots, MAX_STOPS),
    )


def merged_changes(changes: Mapping[tuple[int, int], int]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Returns changes of token counts, by (slot, token), as columns of slots, tokens and changes. Changes of 0 are omitted."""
    entries = [(slot, token, change) for (slot, token), change in changes.items() if change]
    columns = np.array(entries, dtype=np.int32).reshape(-1, 3)
    assert (columns[:, 2] != 0).all(), "changes of 0 are left out"
    return columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy()


@dataclass(frozen=True, slots=True)
class Admission:
    """The parameters of A slots that a step admits, as flat columns. Columns whose sizes have the same letter are parallel."""

    slots: I32  # [A]
    params: I32  # [A, SlotColumn.WIDTH]
    bias_slots: I32  # [B], slot of each logit bias
    bias_indices: I32  # [B], index of the bias in the slot's list
    bias_ids: I32  # [B], token of the bias
    biases: NDArray[np.float32]  # [B], value of the bias
    stop_slots: I32  # [C], slot of each stop token
    stop_indices: I32  # [C], index of the stop token in the slot's list
    stop_ids: I32  # [C], the stop tokens
    word_slots: I32  # [W], slots with allowed or banned tokens
    words: NDArray[np.uint32]  # [W * ceil(V / 32)], set of the tokens that each of these slots may sample
    counted_slots: I32  # slots whose past tokens are counted for penalties
    count_slots: I32  # [P], slot of each distinct past token
    count_ids: I32  # [P], the past token
    counts: I32  # [P], value of the token in SlotTable.counts

    @classmethod
    def of(cls, admitted: Sequence[SlotParams], vocab_size: int) -> Admission:
        biases = [_biases(slot, vocab_size) for slot in admitted]
        stops = [inside(slot.stop_token_ids if slot.params.min_new_tokens else (), vocab_size) for slot in admitted]
        worded = [slot for slot in admitted if slot.params.allowed_token_ids or slot.params.banned_token_ids]
        counted = [slot for slot in admitted if needs_counts(slot)]
        past = [past_counts(slot, vocab_size) for slot in counted]
        assert len({slot.slot for slot in admitted}) == len(admitted), "a step admits a slot at most once"
        params = np.zeros((len(admitted), SlotColumn.WIDTH), dtype=np.int32)
        for row, slot, bias, stop in zip(params, admitted, biases, stops, strict=True):
            _fill(row, slot, len(bias[0]), len(stop))
        bias_slots, bias_indices = _addresses(admitted, [ids for ids, _ in biases])
        stop_slots, stop_indices = _addresses(admitted, stops)
        return cls(
            slots=_i32([slot.slot for slot in admitted]),
            params=params,
            bias_slots=bias_slots,
            bias_indices=bias_indices,
            bias_ids=_joined([ids for ids, _ in biases]),
            biases=np.concatenate([np.empty(0, np.float32), *(values for _, values in biases)]),
            stop_slots=stop_slots,
            stop_indices=stop_indices,
            stop_ids=_joined(stops),
            word_slots=_i32([slot.slot for slot in worded]),
            words=np.concatenate([np.empty(0, np.uint32), *(_words(slot, vocab_size) for slot in worded)]),
            counted_slots=_i32([slot.slot for slot in counted]),
            count_slots=np.repeat(_i32([slot.slot for slot in counted]), [len(ids) for ids, _ in past]).astype(np.int32),
            count_ids=_joined([ids for ids, _ in past]),
            counts=_joined([values for _, values in past]),
        )

    def sections(self) -> list[tuple[str, NDArray[np.generic]]]:
        """Returns the columns as sections of an upload, with the names of the fields."""
        return [(name, getattr(self, name)) for name in self.__slots__]


def edited_until(slot: SlotParams) -> int:
    """Returns the first position whose logits the slot's parameters no longer change.

    Losses of DRY are ignored here, because each step uploads them separately (SampleRows.losses).

    Returns:
        0 if no logits are changed. The position after min_new_tokens output tokens, if only stop tokens are forbidden until then.
        Otherwise LATEST.
    """
    params = slot.params
    if needs_counts(slot) or params.logit_bias or params.allowed_token_ids or params.banned_token_ids:
        return int(LATEST)
    return slot.num_prompt_tokens + params.min_new_tokens if params.min_new_tokens and slot.stop_token_ids else 0


def needs_counts(slot: SlotParams) -> bool:
    params = slot.params
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0)


def past_counts(slot: SlotParams, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the distinct tokens of the slot's history, and their values in SlotTable.counts.

    A value is the number of occurrences in the output part of the history, with the bit SEEN if the prompt has the token.
    """
    history = slot.history.astype(np.int64).clip(0, vocab_size - 1)
    prompt, output = history[: slot.num_prompt_tokens], history[slot.num_prompt_tokens :]
    ids = np.unique(history)
    counts = np.zeros(len(ids), dtype=np.int64)
    output_ids, times = np.unique(output, return_counts=True)
    counts[np.searchsorted(ids, output_ids)] = times.clip(max=MAX_COUNT)
    counts[np.searchsorted(ids, np.unique(prompt))] += SEEN  # SEEN is the sign bit of an int16, so adding SEEN sets the bit
    assert not len(counts) or (counts.min() >= SEEN and counts.max() <= MAX_COUNT), "a count fits 16 bits"
    assert (counts != 0).all(), "each token of the history is counted or has the bit SEEN"
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


def _addresses(admitted: Sequence[SlotParams], lists: Sequence[NDArray[np.integer]]) -> tuple[I32, I32]:
    """Returns, for each entry of all slots' lists (such as biases), its slot and its index in the list, int32[entries] each."""
    sizes = [len(entries) for entries in lists]
    assert len(lists) == len(admitted), "each slot has a list, which may be empty"
    slots = np.repeat(_i32([slot.slot for slot in admitted]), sizes).astype(np.int32)
    return slots, _joined([np.arange(size) for size in sizes])


def _biases(slot: SlotParams, vocab_size: int) -> tuple[I32, NDArray[np.float32]]:
    biases = [(token, bias) for token, bias in slot.params.logit_bias if 0 <= token < vocab_size]
    return _i32([token for token, _ in biases]), np.array([bias for _, bias in biases], dtype=np.float32)


def _words(slot: SlotParams, vocab_size: int) -> NDArray[np.uint32]:
    return token_words(slot.params.allowed_token_ids, slot.params.banned_token_ids, vocab_size)


def _i32(values: Sequence[int]) -> I32:
    return np.array(values, dtype=np.int32)


def _joined(parts: Sequence[NDArray[np.integer]]) -> I32:
    return np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32)


def inside(tokens: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    """Returns the tokens that are inside the vocabulary, int64, in the given order."""
    ids = np.array(tokens, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def token_words(allowed: Sequence[int], banned: Sequence[int], vocab_size: int) -> Words:
    """Returns the set of allowed tokens without the banned ones, uint32[ceil(V / 32)]. An empty `allowed` means all tokens."""
    bits = np.full(-(-vocab_size // WORD_BITS) * WORD_BITS, not allowed, dtype=np.uint8)
    bits[inside(allowed, vocab_size)] = 1
    bits[inside(banned, vocab_size)] = 0
    assert len(bits) % WORD_BITS == 0 and len(bits) >= vocab_size, "the set has whole words, and a bit for each token"
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


class PastTokens:
    """The past tokens of slots whose requests have penalties or DRY, until the next admission to the slot.

    Before losses of a step are requested, the caller passes the sampled tokens of all earlier steps to Past.add().
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._of: dict[int, Past] = {}  # by slot

    def __len__(self) -> int:
        return len(self._of)

    def admit(self, slot: SlotParams) -> None:
        self._of.pop(slot.slot, None)
        dry = slot.params.dry if slot.params.dry is not None and slot.params.dry.multiplier else None
        if dry is None and not needs_counts(slot):
            return
        history = slot.history.astype(np.int64).clip(0, self._vocab_size - 1)
        repeats = Repeats(dry, history) if dry is not None else None
        self._of[slot.slot] = Past(FollowedTokens(len(history)), repeats, needs_counts(slot))

    def of_rows(self, slots: I32) -> list[tuple[int, Past]]:
        """Returns (index of a row, Past) for the rows whose slots have a Past.

        The caller keeps the Past objects until the step's result arrives, because a slot may have another request by then.
        """
        return [(row, past) for row, slot in enumerate(slots.tolist()) if (past := self._of.get(slot))] if self._of else []

    def follows(self, plan: BatchPlan) -> bool:
        """Returns whether follow() has to be called for the plan: whether an extend row belongs to a slot with a Past."""
        return bool(self._of) and any(slot in self._of for slot in plan.slots[: plan.num_extend].tolist())

    def follow(self, plan: BatchPlan) -> dict[tuple[int, int], int]:
        """Adds the tokens of the plan's extend rows to the Past of their slots.

        Returns:
            By (slot, token), the number to add to the device's count.
        """
        changes: Counter[tuple[int, int]] = Counter()
        ends = np.cumsum(plan.num_tokens[: plan.num_extend]).tolist()
        for row, end in enumerate(ends):
            slot = int(plan.slots[row])
            past = self._of.get(slot)
            if past is None:
                continue
            ids = plan.input_ids[end - int(plan.num_tokens[row]) : end].clip(0, self._vocab_size - 1)
            assert len(ids) == int(plan.num_tokens[row]), "an extend row has the ids of all its tokens"
            removed, added = past.follow(int(plan.starts[row]), ids.tolist())
            if past.counts:
                changes.update((slot, token) for token in added)
                changes.subtract((slot, token) for token in removed)
        return changes

    def losses_of(self, slot: int) -> Loss:
        """Returns the losses that DRY causes for the slot's next token."""
        past = self._of.get(slot)
        return NO_LOSS if past is None or past.repeats is None else past.repeats.penalties()

    def losses_after(self, slot: int, draft_tokens: Sequence[int]) -> list[Loss]:
        """Returns for each draft token the losses at the position after it, if it and all draft tokens before it are accepted."""
        past = self._of.get(slot)
        if past is None or past.repeats is None:
            return [NO_LOSS] * len(draft_tokens)
        continued, losses = past.repeats.continued(), []
        for token in draft_tokens:
            continued.add(token)
            losses.append(continued.penalties())
        return losses


@dataclass(slots=True)
class Past:
    """The past tokens of one admission of a slot."""

    followed: FollowedTokens
    repeats: Repeats | None  # repetitions for DRY, or None without DRY
    counts: bool  # whether the device counts the slot's tokens for penalties

    def add(self, token: int) -> None:
        self.followed.add(token)
        if self.repeats is not None:
            self.repeats.add(token)

    def follow(self, start: int, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        removed, added = self.followed.follow(start, ids)
        if self.repeats is not None:
            if removed:
                self.repeats.remove_last(len(removed))
            for token in added:
                self.repeats.add(token)
        return removed, added


class FollowedTokens:
    """The tokens of one sequence after its history: sampled tokens, and input tokens of extend rows.

    If an input token differs from the token that was sampled at its position, the sampled token and all later tokens are removed.
    """

    def __init__(self, first: int) -> None:
        self._first = first  # position of the first token after the history
        self._tokens: list[int] = []

    def add(self, token: int) -> None:
        """Appends a sampled token."""
        self._tokens.append(token)

    def follow(self, start: int, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Replaces the tokens from position `start` on by input tokens.

        Returns:
            The removed tokens in order, and the added tokens. Tokens that stay equal are in neither list.
        """
        skipped = max(0, self._first - start)
        begin, end = max(0, start - self._first), start + len(ids) - self._first
        if end < 0:
            return [], []
        inputs = list(ids[skipped:])
        same = begin
        while same < min(end, len(self._tokens)) and self._tokens[same] == inputs[same - begin]:
            same += 1
        removed, added = self._tokens[same:], inputs[same - begin :]
        self._tokens[same:] = added
        assert self._tokens[begin:end] == inputs, "the tokens equal the input tokens"
        assert len(self._tokens) == max(end, 0), "no token follows the input tokens"
        return removed, added


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a batch's rows, in the form of rootstock_llm.kernels.contracts.sample_ops.SampleRows."""

    offsets: I32  # [n + 1], index of each row's first loss, and the number of losses L
    ids: I32  # [L], token of each loss
    values: NDArray[np.float32]  # [L], value that is subtracted from the token's logit

    @classmethod
    def of(cls, rows: Sequence[Loss]) -> Losses:
        offsets = np.cumsum([0, *(len(ids) for ids, _ in rows)]).astype(np.int32)
        ids = np.concatenate([NO_LOSS[0], *(ids for ids, _ in rows)]).astype(np.int32)
        losses = cls(offsets, ids, np.concatenate([NO_LOSS[1], *(values for _, values in rows)]))
        assert len(losses.ids) == len(losses.values) == losses.offsets[-1], "each loss has a token"
        return losses
