"""Cuts a plan in two, so that a step that the device has no room for can be computed piece by piece.

A piece leaves out what was done before the first one: admissions and page-table updates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.plan import BatchPlan

I64 = NDArray[np.int64]
NOTHING = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Piece:
    """rows: int64[rows of plan], those of the whole plan."""

    plan: BatchPlan
    rows: I64

    @property
    def num_tokens(self) -> int:
        return int(self.plan.num_tokens.sum())


def whole(plan: BatchPlan) -> Piece:
    rest = replace(plan, admitted=(), table_slots=NOTHING, table_firsts=NOTHING, table_counts=NOTHING, table_pages=NOTHING)
    return Piece(rest, np.arange(plan.num_rows))


def halves(piece: Piece, cut_rows: bool = True) -> tuple[Piece, Piece] | None:
    """Two pieces that follow each other and hold about half of its tokens each: whole rows, or one row cut. None if it is a
    single token; or a single row, where rows may not be cut."""
    counts = piece.plan.num_tokens
    if len(counts) > 1:
        ends = np.cumsum(counts)
        first = int(np.clip(np.searchsorted(ends, int(ends[-1]) // 2) + 1, 1, len(counts) - 1))
        assert 0 < first < len(counts), "neither half is empty"
        return select(piece, np.arange(first)), select(piece, np.arange(first, len(counts)))
    if piece.num_tokens < 2 or not cut_rows:
        return None
    return _cut(piece, piece.num_tokens // 2)


def select(piece: Piece, rows: I64) -> Piece:
    """The given rows of it alone, in order."""
    plan = piece.plan
    ends = np.cumsum(plan.num_tokens[: plan.num_extend])
    extends = rows[rows < plan.num_extend]
    ids = [plan.input_ids[int(ends[row] - plan.num_tokens[row]) : int(ends[row])] for row in extends.tolist()]
    scored = np.flatnonzero(np.isin(plan.prompt_logprob_rows, rows))
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
    )
    assert len(chosen.input_ids) == int(chosen.num_tokens[: chosen.num_extend].sum()), "rows keep their own ids"
    assert len(chosen.prompt_logprob_rows) == len(scored), "and what they score"
    return Piece(chosen, piece.rows[rows])


def _cut(piece: Piece, at: int) -> tuple[Piece, Piece]:
    """An extend row alone, before and from its token `at` on."""
    plan, size = piece.plan, piece.num_tokens
    return _part(piece, 0, at, int(plan.input_ids[at])), _part(piece, at, size, None)


def _part(piece: Piece, first: int, end: int, following: int | None) -> Piece:
    """Tokens first .. end - 1 of a single extend row. following: the token after them, None where the plan says it."""
    plan = piece.plan
    assert 0 <= first < end <= piece.num_tokens and plan.num_rows == plan.num_extend == 1, "a part of one extend row"
    offsets = np.maximum(plan.prompt_logprob_offsets - first, 0)
    nexts = plan.prompt_logprob_nexts if following is None else np.full_like(plan.prompt_logprob_nexts, following)
    kept = np.flatnonzero(offsets < end - first)
    part = replace(
        plan,
        starts=plan.starts + first,
        num_tokens=np.array([end - first], dtype=np.int32),
        input_ids=plan.input_ids[first:end],
        sample=plan.sample if following is None else np.zeros_like(plan.sample),
        prompt_logprob_rows=plan.prompt_logprob_rows[kept],
        prompt_logprob_offsets=offsets[kept],
        prompt_logprob_nexts=nexts[kept],
    )
    return Piece(part, piece.rows)
