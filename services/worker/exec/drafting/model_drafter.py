"""Guesses by a model: what it knows of a slot follows the target's text, and goes on from there token by token.

What it keeps of prompts is computed a step behind them. What it keeps of an answer is computed when the next guess is wanted, so
steps without guesses cost next to nothing. Nothing here has to be right: an entry that is missing or of another text (pages that
were cached while nobody drafted) makes guesses worse, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.contracts.ops import RaggedRows
from services.worker.core.contracts.plan import SlotParams
from services.worker.exec.contracts.draft_model import DraftModel
from services.worker.exec.contracts.drafter import Computed
from services.worker.exec.pools.kv_pool import KVPool

MOST_PENDING = 64  # entries of an answer that wait for the next guess

Kept = tuple[Tensor, ...]


@dataclass(slots=True)
class _Slot:
    """text: tokens from position 0 on. covered: those whose KV the target has, for which there are pages. valid: entries that are
    there; -1: the first pass says. pending: what the target has kept of those from `valid` on. ahead: entries behind `valid` that
    are of guesses."""

    text: list[int]
    covered: int = 0
    valid: int = -1
    pending: list[Kept] = field(default_factory=list)
    ahead: int = 0

    @property
    def num_pending(self) -> int:
        return sum(len(kept[0]) for kept in self.pending)

    def keep(self, count: int) -> None:
        """The first `count` of what is pending."""
        kept: list[Kept] = []
        for part in self.pending:
            if count > 0:
                kept.append(tuple(each[:count] for each in part))
            count -= len(part[0])
        self.pending = kept


@dataclass(frozen=True, slots=True)
class _Entries:
    """Of one slot, from position `first` on. states: [n, H], None where the model reads none."""

    slot: int
    first: int
    ids: Sequence[int]
    states: Tensor | None


class ModelDrafter:
    """A Drafter. table: int32[slots, pages]. kept: what the target has kept in its last pass, by token of that pass; empty where
    the model does not read it. pool: of the model's layers. Both are None while memory is released."""

    def __init__(self, model: DraftModel, pool: KVPool, table: Tensor, page_size: int, kept: Callable[[], Kept]) -> None:
        self.model: DraftModel | None = model
        self.pool: KVPool | None = pool
        self._shift, self._max_context = model.shift, model.max_context
        self._table, self._page_size, self._kept = table, page_size, kept
        self._slots: dict[int, _Slot] = {}
        self._behind: set[int] = set()  # slots whose entries are to be computed before the next step begins

    def drop(self, model: bool, pool: bool) -> None:
        """Of its memory; who has taken it again sets it. Without the model alone, those who run keep their slots and pages."""
        if pool:
            self._slots.clear()
            self._behind.clear()
        self.model, self.pool = None if model else self.model, None if pool else self.pool

    def begin(self) -> None:
        due = [self._due(slot, self._slots[slot].covered) for slot in sorted(self._behind)]
        self._behind.clear()
        if rows := [entries for entries in due if entries is not None]:
            self._pass(rows)

    def admit(self, slot: SlotParams) -> None:
        self._slots[slot.slot] = _Slot(slot.history.tolist())

    def know(self, slot: int, start: int, ids: Sequence[int]) -> None:
        state = self._slots[slot]
        state.text[start:] = ids
        if state.valid > start:
            state.valid, state.pending = start, []
        elif state.valid >= 0:
            state.keep(start - state.valid)
        state.ahead = 0

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        shift, limit = self._shift, self._max_context
        assert self.model is not None, "nobody is asked to draft while its memory is released"
        ends = {slot: len(self._slots[slot].text) - shift for slot in wanted}
        due = [self._due(slot, ends[slot]) for slot, most in wanted.items() if ends[slot] + most <= limit]
        rows = [entries for entries in due if entries is not None]
        guesses: dict[int, list[int]] = {}
        for number in range(max((wanted[entries.slot] for entries in rows), default=0)):
            found, states = self.model.guess(self._pass(rows))
            tokens = found.tolist()
            for entries, token in zip(rows, tokens, strict=True):
                guesses.setdefault(entries.slot, []).append(token)
            going = [index for index, entries in enumerate(rows) if wanted[entries.slot] > number + 1]
            rows = [
                _Entries(
                    rows[index].slot,
                    rows[index].first + len(rows[index].ids),
                    tokens[index : index + 1],
                    None if states is None else states[index : index + 1].clone(),
                )
                for index in going
            ]
        for slot, guessed in guesses.items():
            self._slots[slot].ahead = len(guessed) - 1
        return guesses

    def predicted(self, slot: int) -> bool:
        """It reads none."""
        return False

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        state = self._slots[slot]
        state.text.extend(tokens)
        if not self._shift:
            state.valid += min(state.ahead, len(tokens) - 1)
        state.ahead = 0

    def computed(self, rows: Sequence[Computed]) -> None:
        kept = self._kept() if self._shift else ()
        for row in rows:
            state = self._slots[row.slot]
            state.covered = row.start + row.count
            if not self._shift:
                state.valid = row.start if state.valid < 0 else state.valid
            elif row.first < 0:
                state.valid, state.pending = state.covered, []
            else:
                if state.valid < 0 or row.start != state.valid + state.num_pending:
                    state.valid, state.pending = row.start, []
                state.pending.append(tuple(each[row.first : row.first + row.count].clone() for each in kept))
            if row.given or state.num_pending > MOST_PENDING:
                self._behind.add(row.slot)

    def _due(self, slot: int, end: int) -> _Entries | None:
        """What of a slot's text has no entry, as far as there can be one and before `end`, counted as if it had."""
        state, shift = self._slots[slot], self._shift
        count = min(end, len(state.text) - shift, self._max_context) - state.valid
        if shift:
            count = min(count, state.num_pending)
        if state.valid < 0 or count < 1:
            return None
        states = None
        if shift:
            assert self.model is not None, "no step runs while memory is released"
            whole = tuple(torch.cat(parts) for parts in zip(*state.pending, strict=True))
            states = self.model.entry(tuple(each[:count] for each in whole))
            state.pending = [tuple(each[count:] for each in whole)] if len(whole[0]) > count else []
        first, state.valid = state.valid, state.valid + count
        return _Entries(slot, first, state.text[first + shift : first + shift + count], states)

    def _pass(self, rows: Sequence[_Entries]) -> Tensor:
        """Over the rows. int64[rows], index of the last entry of each."""
        assert self.model is not None and self.pool is not None, "no step runs while memory is released"
        counts = torch.tensor([len(row.ids) for row in rows], dtype=torch.int32)
        starts = torch.tensor([row.first for row in rows], dtype=torch.int32)
        slots = torch.tensor([row.slot for row in rows], dtype=torch.int32)
        ends = counts.cumsum(0)
        offsets = (ends - counts).int()
        of_row = torch.repeat_interleave(torch.arange(len(rows)), counts)
        positions = torch.arange(int(ends[-1]), dtype=torch.int32) - offsets[of_row] + starts[of_row]
        pages = self._table[slots[of_row].long(), (positions // self._page_size).long()].long()
        assert int((starts + counts).max()) <= self._max_context, "no entry lies beyond the model's context"
        ragged = RaggedRows(
            page_table=self._table,
            slots=slots,
            starts=starts,
            num_tokens=counts,
            offsets=offsets,
            positions=positions,
            locations=torch.where(pages < 0, -1, pages * self._page_size + positions % self._page_size),
            max_context=int((starts + counts).max()),
        )
        ids = torch.tensor([token for row in rows for token in row.ids])
        given = [row.states for row in rows if row.states is not None]
        self.model.forward(ids, torch.cat(given) if given else None, ragged, self.pool)
        return ends - 1
