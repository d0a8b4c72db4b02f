"""Draft tokens from a draft model, which reads the text of each slot and continues it token by token.

An entry is the draft model's KV for one position of a slot. The entries of a prompt are computed in the step after the prompt's
step. The entries of an output are computed when draft tokens are requested, so that steps without draft tokens cost almost
nothing. A missing or wrong entry is no error; it only makes draft tokens worse. An entry is wrong, for example, in a page that
was cached while its request was not drafted for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows
from rootstock_llm.services.worker.core.contracts.plan import I32, SlotParams
from rootstock_llm.services.worker.exec.contracts.drafter import Computed, DraftModel, HiddenStates
from rootstock_llm.services.worker.exec.pools.kv_pool import KVPool
from rootstock_llm.services.worker.exec.streams.copies import Readback, UploadRing
from rootstock_llm.services.worker.exec.streams.cuda_streams import Streams

# Largest number of pending entries of a slot. If there are more, the next step computes them even without a request for drafts.
MOST_PENDING = 64
UPLOAD_WORDS = 1 << 12  # words of an upload buffer; the buffer is enlarged if a pass needs more


@dataclass(slots=True)
class _DrafterSlot:
    """The text of a slot and the progress of its entries."""

    text: list[int]  # tokens from position 0
    covered: int = 0  # number of tokens whose KV the target has computed; their pages exist
    valid: int = -1  # entries before this position count as computed; -1 until the first step of the request is computed
    pending: list[HiddenStates] = field(default_factory=list)  # hidden states of the target for the positions from `valid` on
    ahead: int = 0  # number of entries after `valid` that were computed from draft tokens

    @property
    def num_pending(self) -> int:
        return sum(len(part[0]) for part in self.pending)

    def cut_pending(self, count: int) -> None:
        """Shortens the pending states to the first `count` positions."""
        first: list[HiddenStates] = []
        for part in self.pending:
            if count > 0:
                first.append(part if count >= len(part[0]) else tuple(each[:count].clone() for each in part))
            count -= len(part[0])
        self.pending = first


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of one slot that a pass computes, from position `first` on."""

    slot: int
    first: int
    ids: Sequence[int]  # n token ids
    states: Tensor | None  # [n, H], or None if the model reads no states


@dataclass(frozen=True, slots=True)
class _Columns:
    """The rows of one pass of the draft model."""

    slots: I32  # [R]
    starts: I32  # [R], position of the row's first entry
    counts: I32  # [R], entries of the row

    @property
    def max_context(self) -> int:
        return int((self.starts + self.counts).max())

    def sections(self, prefix: str) -> list[tuple[str, NDArray[np.generic]]]:
        ends = np.cumsum(self.counts)
        offsets = ends - self.counts
        positions = np.arange(int(ends[-1])) + np.repeat(self.starts - offsets, self.counts)
        columns = {
            "slots": self.slots,
            "starts": self.starts,
            "counts": self.counts,
            "offsets": offsets,
            "lasts": ends - 1,
            "positions": positions,
            "slot_of": np.repeat(self.slots, self.counts),
        }
        return [(f"{prefix}{name}", column) for name, column in columns.items()]


class ModelDrafter:
    """A Drafter with a draft model. The attributes `model` and `pool` are None while their memory is released."""

    def __init__(self, model: DraftModel, pool: KVPool, table: Tensor, page_size: int, vocab_size: int, streams: Streams) -> None:
        """Starts without slots.

        Args:
            pool: keys and values of the draft model's layers.
            table: int32[slots, pages], the target's page table.
            vocab_size: size of the target's vocabulary.
        """
        self.model: DraftModel | None = model
        self.pool: KVPool | None = pool
        self._shift, self._max_context = model.shift, model.max_context
        self._table, self._page_size, self._vocab_size, self._streams = table, page_size, vocab_size, streams
        self._ring = UploadRing(streams, UPLOAD_WORDS)
        self._slots: dict[int, _DrafterSlot] = {}
        self._due_slots: set[int] = set()  # slots whose pending entries are computed in the next begin()

    def drop(self, model: bool, pool: bool) -> None:
        """Releases the model, the pool, or both. The caller sets the attributes again when the memory is resumed.

        If only the model is released, running requests keep their slots and entries.
        """
        if pool:
            self._slots.clear()
            self._due_slots.clear()
        self.model, self.pool = None if model else self.model, None if pool else self.pool

    def rehearse(self, num_tokens: int, hidden: HiddenStates) -> None:
        """Launches a pass over num_tokens entries, all in page 0, to compile its kernels and measure its memory.

        Called on the forward stream. The page table is empty afterwards.

        Args:
            hidden: hidden states of the target, each [num_tokens, H].
        """
        assert self.model is not None, "no warm-up runs while the model is released"
        whole = self.model.entry(tuple(each.clone() for each in hidden)) if self._shift else None
        rows: list[_Entries] = []
        for first in range(0, num_tokens, self._max_context):
            end = min(first + self._max_context, num_tokens)
            slot = len(rows) % len(self._table)
            rows.append(_Entries(slot, 0, [0] * (end - first), None if whole is None else whole[first:end]))
        self._table.fill_(0)
        try:
            views = self._send([_columns_of(rows)], rows)
            self.model.draft(self._pass("0_", _columns_of(rows).max_context, views, views["ids"].long(), _joined(rows)))
        finally:
            self._ring.release(Readback(self._streams).launch())
        self._table.fill_(-1)

    def begin(self) -> None:
        due = [self._due(slot, self._slots[slot].covered) for slot in sorted(self._due_slots)]
        self._due_slots.clear()
        rows = [entries for entries in due if entries is not None]
        if not rows:
            return
        columns = _columns_of(rows)
        try:
            views = self._send([columns], rows)
            self._pass("0_", columns.max_context, views, views["ids"].long(), _joined(rows))
        finally:
            self._ring.release(Readback(self._streams).launch())

    def admit(self, slot: SlotParams) -> None:
        self._slots[slot.slot] = _DrafterSlot(slot.history.tolist())

    def set_tokens(self, slot: int, start: int, ids: Sequence[int]) -> None:
        state = self._slots[slot]
        state.text[start:] = ids
        if state.valid > start:
            state.valid, state.pending = start, []
        elif state.valid >= 0:
            state.cut_pending(start - state.valid)
        state.ahead = 0

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        shift, limit = self._shift, self._max_context
        assert self.model is not None, "no draft tokens are requested while the model is released"
        ends = {slot: len(self._slots[slot].text) - shift for slot in wanted}
        due = [self._due(slot, ends[slot]) for slot, most in wanted.items() if ends[slot] + most <= limit]
        rows = sorted((each for each in due if each is not None), key=lambda entries: -wanted[entries.slot])
        if not rows:
            return {}
        numbers = [wanted[entries.slot] for entries in rows]
        found = iter(self._drafted(rows, numbers))
        draft_tokens: dict[int, list[int]] = {entries.slot: [] for entries in rows}
        for number in range(numbers[0]):
            for entries, most in zip(rows, numbers, strict=True):
                if most > number:
                    draft_tokens[entries.slot].append(next(found))
        for slot, drafted in draft_tokens.items():
            self._slots[slot].ahead = len(drafted) - 1
        return draft_tokens

    def used_prediction(self, slot: int) -> bool:
        """Returns False, because a draft model does not read the client's prediction."""
        return False

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        state = self._slots[slot]
        state.text.extend(tokens)
        if not self._shift:
            state.valid += min(state.ahead, len(tokens) - 1)
        state.ahead = 0

    def computed(self, rows: Sequence[Computed]) -> None:
        for row in rows:
            state = self._slots[row.slot]
            state.covered = row.start + row.count
            if not self._shift:
                state.valid = row.start if state.valid < 0 else state.valid
            elif row.hidden is None or row.start >= self._max_context:  # these entries cannot be computed
                state.valid, state.pending = state.covered, []
            else:
                if state.valid < 0 or row.start != state.valid + state.num_pending:
                    state.valid, state.pending = row.start, []
                state.pending.append(row.hidden)
            if row.from_plan or state.num_pending > MOST_PENDING:
                self._due_slots.add(row.slot)

    def _due(self, slot: int, end: int) -> _Entries | None:
        """Returns the entries of a slot before position `end` that are missing and can be computed, and counts them as valid.

        Returns:
            None if there are no such entries.
        """
        state, shift = self._slots[slot], self._shift
        count = min(end, len(state.text) - shift, self._max_context) - state.valid
        if shift:
            count = min(count, state.num_pending)
        if state.valid < 0 or count < 1:
            return None
        states = None
        if shift:
            assert self.model is not None, "no step runs while memory is released"
            whole = tuple(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*state.pending, strict=True))
            states = self.model.entry(tuple(each[:count] for each in whole))
            rest = len(whole[0]) > count  # the rest is cloned, because a view would keep the states of the whole chunk in memory
            state.pending = [tuple(each[count:].clone() for each in whole)] if rest else []
        first, state.valid = state.valid, state.valid + count
        return _Entries(slot, first, state.text[first + shift : first + shift + count], states)

    def _drafted(self, rows: Sequence[_Entries], numbers: Sequence[int]) -> list[int]:
        """Computes the rows' entries and their draft tokens, with one wait for the device.

        The first pass drafts one token per row. Each later pass drafts one more token for the rows that need more. These are the
        first rows, because rows are in descending order of their numbers of draft tokens.

        Args:
            numbers: number of draft tokens of each row, descending.

        Returns:
            The draft tokens, pass by pass and in row order within a pass.
        """
        assert self.model is not None, "no draft tokens are requested while the model is released"
        columns = [_columns_of(rows)]
        ends = columns[0].starts + columns[0].counts
        for number in range(1, numbers[0]):
            num_rows = sum(most > number for most in numbers)  # rows that need more than `number` draft tokens
            starts = ends[:num_rows] + np.int32(number - 1)
            columns.append(_Columns(columns[0].slots[:num_rows], starts, np.ones(num_rows, dtype=np.int32)))
        readback, found = Readback(self._streams), list[Tensor]()
        try:
            views = self._send(columns, rows)
            ids, states = views["ids"].long(), _joined(rows)
            for number, own in enumerate(columns):
                tokens, after = self.model.draft(self._pass(f"{number}_", own.max_context, views, ids, states))
                found.append(tokens)
                next_rows = len(columns[number + 1].slots) if number + 1 < len(columns) else 0
                ids, states = tokens[:next_rows], None if after is None else after[:next_rows].clone()
            readback.add("found", torch.cat(found))
        finally:
            self._ring.release(readback.launch())
        drafted: list[int] = readback.host()["found"].tolist()
        return drafted

    def _send(self, columns: Sequence[_Columns], rows: Sequence[_Entries]) -> dict[str, Tensor]:
        """Uploads the columns of all passes, named "PASS_COLUMN" with the number of the pass, and the ids of the first pass."""
        sections = [section for number, each in enumerate(columns) for section in each.sections(f"{number}_")]
        ids = np.array([token for row in rows for token in row.ids], dtype=np.int32)
        views = self._ring.send([*sections, ("ids", np.clip(ids, 0, self._vocab_size - 1))])
        self._streams.forward_after_schedule()
        return views

    def _pass(self, prefix: str, max_context: int, views: Mapping[str, Tensor], ids: Tensor, states: Tensor | None) -> Tensor:
        """Launches a pass of the draft model over the rows of the uploaded columns whose names begin with `prefix`.

        Args:
            ids: int64[T].
            states: [T, H], or None if the model reads no states.

        Returns:
            The index of each row's last entry, int64[R].
        """
        assert self.model is not None and self.pool is not None, "no step runs while memory is released"
        assert max_context <= self._max_context, "all entries are inside the draft model's context"
        positions, page_size = views[f"{prefix}positions"], self._page_size
        pages = self._table[views[f"{prefix}slot_of"].long(), (positions // page_size).long()].long()
        ragged = RaggedRows(
            page_table=self._table,
            slots=views[f"{prefix}slots"],
            starts=views[f"{prefix}starts"],
            num_tokens=views[f"{prefix}counts"],
            offsets=views[f"{prefix}offsets"],
            positions=positions,
            locations=(pages * page_size + positions % page_size).masked_fill(pages < 0, -1),
            max_context=max_context,
        )
        self.model.forward(ids, states, ragged, self.pool)
        return views[f"{prefix}lasts"].long()


def _columns_of(rows: Sequence[_Entries]) -> _Columns:
    slots, starts = (np.array(column, dtype=np.int32) for column in zip(*((row.slot, row.first) for row in rows), strict=True))
    return _Columns(slots, starts, np.array([len(row.ids) for row in rows], dtype=np.int32))


def _joined(rows: Sequence[_Entries]) -> Tensor | None:
    states = [row.states for row in rows if row.states is not None]
    return torch.cat(states) if states else None
