"""Cuts a plan in two, so that a step that does not fit into the device's memory is computed in pieces.

A piece has no admissions and no page-table updates, because these were applied before the first piece.
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
    """Some rows of a plan, or a part of one extend row."""

    plan: BatchPlan  # with the rows of this piece only
    rows: I64  # int64[rows of the piece], their rows in the whole plan

    @property
    def num_tokens(self) -> int:
        return int(self.plan.num_tokens.sum())


def whole(plan: BatchPlan) -> Piece:
    rest = replace(plan, admitted=(), table_slots=NOTHING, table_firsts=NOTHING, table_counts=NOTHING, table_pages=NOTHING)
    return Piece(rest, np.arange(plan.num_rows))


def halves(piece: Piece, cut_rows: bool = True) -> tuple[Piece, Piece] | None:
    """Returns two consecutive pieces with about half of the tokens each.

    Several rows are distributed whole. A single row is cut if cut_rows is set.

    Returns:
        None if the piece is a single token, or a single row that must not be cut.
    """
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
    """Returns a piece with the given rows of this piece, which are rising."""
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
    """Returns the parts of a single extend row before its token `at` and from that token on."""
    plan, size = piece.plan, piece.num_tokens
    return _part(piece, 0, at, int(plan.input_ids[at])), _part(piece, at, size, None)


def _part(piece: Piece, first: int, end: int, following: int | None) -> Piece:
    """Returns the tokens first to end - 1 of a single extend row.

    Args:
        following: the token after the part, or None for the last part, which keeps the plan's next token and its `sample`.
    """
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
