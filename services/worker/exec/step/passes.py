"""Runs the forward pass of the model over the rows of a step, or over a piece of the step.

A pass is captured in a graph, or launched kernel by kernel. A step that does not fit into the device's memory is computed in
several passes, each over a piece of the plan. A piece has no admissions and no page-table updates, because they are applied
before the first piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows, StateRows
from rootstock_llm.kernels.contracts.step_ops import StepKernels
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan
from rootstock_llm.services.worker.exec.contracts.causal_model import CausalModel, RoutedModel
from rootstock_llm.services.worker.exec.contracts.step_data import ForwardBatch
from rootstock_llm.services.worker.exec.pools.kv_pool import KVPool

I64 = NDArray[np.int64]
NOTHING = np.empty(0, dtype=np.int32)
SCRATCH = -2  # stands for the state between two parts of a row; the runner replaces it by a scratch state of the pool
POISON = -1  # value of a slot in the relay until a token is sampled for it


class UnwrittenToken(RuntimeError):
    """Raised if a decode row has read a slot of the relay for which no step has sampled a token."""


class ForwardPass:
    """Resolves the input tokens and positions of a pass, then runs the model.

    The attributes `model` and `pool` are replaced when memory is released and resumed.
    """

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
        window_table: Tensor | None = None,
        has_states: bool = False,
    ) -> None:
        """Stores the arguments.

        Args:
            table: int32[slots, pages], the page table.
            relay: int64[slots], the last token sampled for each slot.
            unwritten: int32[1], to which each pass adds the number of rows that read POISON from the relay, because no token
                was sampled for their slot. None: no check.
            window_table: int32[slots, pages], the page table of windowed layers. None if their KV is in the same pages.
            has_states: whether the model has recurrent layers.
        """
        self.window_table, self.has_states = window_table, has_states
        self.model, self.pool = model, pool
        self._kernels, self.table, self._relay = kernels, table, relay
        self._page_size, self._vocab_size, self._unwritten = page_size, vocab_size, unwritten
        self.device = table.device
        self._nothing = torch.empty(0, dtype=torch.int32, device=table.device)

    @property
    def capacity(self) -> int:
        """Number of positions for which the page table has pages, per slot."""
        return int(self.table.shape[1]) * self._page_size

    def fresh_rows(
        self, columns: ForwardBatch, words: Tensor, states: Tensor | None = None, recurrent: Tensor | None = None
    ) -> tuple[Tensor, RaggedRows]:
        """Allocates input ids, int64[T], and the rows of a pass. run() fills the ids, and positions and locations of the rows.

        Args:
            words: columns.words() on the device.
            states: columns.states on the device; None if no row reads or writes a state.
            recurrent: columns.recurrent.words() on the device; None if columns.recurrent is not set.
        """
        total = columns.total
        assert columns.max_context <= self.capacity, "no row is longer than the pages of a slot"
        ids = torch.empty(total, dtype=torch.int64, device=self.device)
        slots, starts, num_tokens, offsets = columns.row_columns(words)
        state_rows, drafts = self._state_rows(len(slots), states) if self.has_states else None, None
        if columns.recurrent is not None:
            assert recurrent is not None, "the columns of recurrent layers are uploaded"
            state_rows, drafts = columns.recurrent.on_device(recurrent)
        rows = RaggedRows(
            page_table=self.table,
            slots=slots,
            starts=starts,
            num_tokens=num_tokens,
            offsets=offsets,
            positions=torch.empty(total, dtype=torch.int32, device=self.device),
            locations=torch.empty(total, dtype=torch.int64, device=self.device),
            max_context=columns.max_context,
            window_table=self.window_table,
            window_locations=None if self.window_table is None else torch.empty(total, dtype=torch.int64, device=self.device),
            states=state_rows,
            drafts=drafts,
        )
        return ids, rows

    def _state_rows(self, num_rows: int, states: Tensor | None) -> StateRows:
        if states is None:
            states = torch.full((4, num_rows), -1, dtype=torch.int32, device=self.device)
        return StateRows(*states.view(4, num_rows).unbind(0))

    def run(
        self, ids: Tensor, rows: RaggedRows, columns: ForwardBatch, extend_ids: Tensor | None, known: Tensor | None = None
    ) -> None:
        """Resolves ids, positions and locations, and runs the model. Attention must have been planned for these rows.

        Args:
            ids: int64[T], filled here.
            rows: rows whose positions and locations are filled here.
            columns: columns of the pass.
            extend_ids: int32, token ids of the extend rows, or None without extend rows.
            known: int32[T], token ids of decode rows, -1 for a row that reads the relay, or None if all decode rows read it.
        """
        assert len(ids) == len(rows.positions) == len(rows.locations), "each token has an id, a position and a location"
        assert known is None or len(known) == len(ids), "known has an element for each token"
        tokens = self._nothing if extend_ids is None else extend_ids
        extends, longest = columns.num_extend, columns.max_tokens
        self._kernels.resolve_tokens(
            ids, rows, tokens, self._relay, self._unwritten, extends, self._page_size, self._vocab_size, longest, known
        )
        if self.window_table is not None:  # a second call for the locations in the windows; its ids are not used
            again, windows = torch.empty_like(ids), rows.in_windows()
            self._kernels.resolve_tokens(
                again, windows, tokens, self._relay, None, extends, self._page_size, self._vocab_size, longest, known
            )
        self.model.forward(ids, rows, self.pool)

    def routed_experts(self, num_tokens: int) -> tuple[Tensor, int]:
        """Returns the experts of the last pass, see RoutedModel, and the number of experts of a layer."""
        model = cast(RoutedModel, self.model)  # a check of the type would take longer than the rest of the call
        assert model.experts is not None, "only models with experts report them"
        return model.routed_experts(num_tokens), model.experts.num_experts

    def all_logits(self, count: int) -> Tensor:
        """Returns logits of the first `count` tokens of the pass, float32[count, V]."""
        return self.model.logits(torch.arange(count, device=self.device))


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a plan, or a part of one extend row."""

    plan: BatchPlan  # with the rows of this piece only
    rows: I64  # int64[rows of the piece], the row of the whole plan for each row of the piece

    @property
    def num_tokens(self) -> int:
        return int(self.plan.num_tokens.sum())


def whole(plan: BatchPlan) -> Piece:
    """Returns a piece with all rows of the plan."""
    rest = replace(plan, admitted=(), table_slots=NOTHING, table_firsts=NOTHING, table_counts=NOTHING, table_pages=NOTHING)
    rest = replace(rest, window_slots=NOTHING, window_firsts=NOTHING, window_counts=NOTHING, window_units=NOTHING)
    return Piece(rest, np.arange(plan.num_rows))


def halves(piece: Piece, cut_rows: bool = True) -> tuple[Piece, Piece] | None:
    """Splits a piece into two consecutive pieces with about half of the tokens each.

    If the piece has several rows, no row is cut. A single row is cut if cut_rows is set.

    Returns:
        None if the piece is a single token, or a single row that must not be cut.
    """
    counts = piece.plan.num_tokens
    if len(counts) > 1:
        ends = np.cumsum(counts)
        first = int(np.clip(np.searchsorted(ends, int(ends[-1]) // 2) + 1, 1, len(counts) - 1))
        assert 0 < first < len(counts), "both halves have rows"
        return select(piece, np.arange(first)), select(piece, np.arange(first, len(counts)))
    if piece.num_tokens < 2 or not cut_rows:
        return None
    return _cut(piece, piece.num_tokens // 2)


def select(piece: Piece, rows: I64) -> Piece:
    """Returns a piece with some rows of another piece. `rows` has their indices in it, ascending."""
    plan = piece.plan
    ends = np.cumsum(plan.num_tokens[: plan.num_extend])
    extends = rows[rows < plan.num_extend]
    ids = [plan.input_ids[int(ends[row] - plan.num_tokens[row]) : int(ends[row])] for row in extends.tolist()]
    scored = np.flatnonzero(np.isin(plan.prompt_logprob_rows, rows))
    routed = np.flatnonzero(np.isin(plan.routed_rows, rows))
    chosen = replace(
        plan,
        num_extend=len(extends),
        slots=plan.slots[rows],
        starts=plan.starts[rows],
        num_tokens=plan.num_tokens[rows],
        input_ids=np.concatenate([NOTHING, *ids]),
        sample=plan.sample[rows],
        prompt_logprob_rows=np.searchsorted(rows, plan.prompt_logprob_rows[scored]).astype(np.int32),
        prompt_logprob_offsets=plan.prompt_logprob_offsets[scored],
        prompt_logprob_nexts=plan.prompt_logprob_nexts[scored],
        routed_rows=np.searchsorted(rows, plan.routed_rows[routed]).astype(np.int32),
        routed_offsets=plan.routed_offsets[routed],
    )
    if len(plan.state_before):
        chosen = replace(
            chosen,
            state_before=plan.state_before[rows],
            state_after=plan.state_after[rows],
            state_cuts=plan.state_cuts[rows],
            state_at_cut=plan.state_at_cut[rows],
            state_starts=plan.state_starts[rows],
        )
    assert len(chosen.input_ids) == int(chosen.num_tokens[: chosen.num_extend].sum()), (
        "the piece has exactly the token ids of its extend rows"
    )
    assert len(chosen.prompt_logprob_rows) == len(scored), "the piece has the prompt logprob rows of its rows"
    return Piece(chosen, piece.rows[rows])


def _cut(piece: Piece, at: int) -> tuple[Piece, Piece]:
    """Cuts a piece of one extend row before its token with the index `at`."""
    plan, size = piece.plan, piece.num_tokens
    return _part(piece, 0, at, int(plan.input_ids[at])), _part(piece, at, size, None)


def _part(piece: Piece, first: int, end: int, following: int | None) -> Piece:
    """Returns the part of a piece of one extend row that has the tokens first .. end - 1.

    Args:
        following: id of the token after the part. None for the last part, which keeps `sample` and prompt_logprob_nexts of the
            plan.
    """
    plan = piece.plan
    assert 0 <= first < end <= piece.num_tokens and plan.num_rows == plan.num_extend == 1, (
        "the piece has one extend row, and the part has tokens of it"
    )
    offsets = np.maximum(plan.prompt_logprob_offsets - first, 0)
    nexts = plan.prompt_logprob_nexts if following is None else np.full_like(plan.prompt_logprob_nexts, following)
    inside = np.flatnonzero(offsets < end - first)
    routed_offsets = np.maximum(plan.routed_offsets - first, 0)
    routed = np.flatnonzero(routed_offsets < end - first)
    part = replace(
        plan,
        starts=plan.starts + first,
        num_tokens=np.array([end - first], dtype=np.int32),
        input_ids=plan.input_ids[first:end],
        sample=plan.sample if following is None else np.zeros_like(plan.sample),
        prompt_logprob_rows=plan.prompt_logprob_rows[inside],
        prompt_logprob_offsets=offsets[inside],
        prompt_logprob_nexts=nexts[inside],
        routed_rows=plan.routed_rows[routed],
        routed_offsets=routed_offsets[routed],
    )
    if len(plan.state_before):
        part = _with_part_of_states(part, plan, first, end)
    return Piece(part, piece.rows)


def _with_part_of_states(part: BatchPlan, plan: BatchPlan, first: int, end: int) -> BatchPlan:
    """Returns a part with its states. Between two parts of a row, the state is in the unit SCRATCH."""
    scratch, cut = np.full(1, SCRATCH, dtype=np.int32), int(plan.state_cuts[0])
    has_cut = first < cut <= end
    return replace(
        part,
        state_before=plan.state_before if first == 0 else scratch,
        state_after=plan.state_after if end == int(plan.num_tokens[0]) else scratch,
        state_cuts=np.array([cut - first if has_cut else 0], dtype=np.int32),
        state_at_cut=plan.state_at_cut if has_cut else np.full(1, -1, dtype=np.int32),
    )
