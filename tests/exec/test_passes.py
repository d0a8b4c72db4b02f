"""The pieces of a plan compute the plan's tokens in its order, and score its prompt tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, ForwardMode
from rootstock_llm.services.worker.exec.step.passes import SCRATCH, Piece, halves, select, whole
from tests.exec.driver import i32

ROWS = st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(-1, 8), st.booleans()), min_size=1, max_size=6)


def plan_of(rows: list[tuple[int, bool, int, bool]], num_decode: int) -> BatchPlan:
    """Returns a plan.

    Args:
        rows: extend rows as (number of tokens, whether the row is sampled, index of the first scored token or -1, whether the
            token after the row is scored).
        num_decode: number of decode rows.
    """
    counts = [count for count, *_ in rows] + [1] * num_decode
    scored = [(row, offset, after) for row, (count, _, offset, after) in enumerate(rows) if 0 <= offset < count]
    return BatchPlan(
        step_id=1,
        mode=ForwardMode.MIXED,
        num_extend=len(rows),
        slots=i32(list(range(len(counts)))),
        starts=i32([10 * row for row in range(len(counts))]),
        num_tokens=i32(counts),
        input_ids=i32(list(range(100, 100 + sum(count for count, *_ in rows)))),
        sample=np.array([sampled for _, sampled, _, _ in rows] + [True] * num_decode),
        mask_rows=i32([]),
        prompt_logprob_rows=i32([row for row, _, _ in scored]),
        prompt_logprob_offsets=i32([offset for _, offset, _ in scored]),
        prompt_logprob_nexts=i32([7000 + row if after else -1 for row, _, after in scored]),
        admitted=(),
        table_slots=i32([3]),
        table_firsts=i32([0]),
        table_counts=i32([1]),
        table_pages=i32([5]),
    )


def tokens_of(piece: Piece) -> list[tuple[int, int, int, int]]:
    """Returns (row, slot, position, id) of each token. The id is -1 if the token was sampled and is only on the device."""
    plan, at, found = piece.plan, 0, []
    for row in range(plan.num_rows):
        for index in range(int(plan.num_tokens[row])):
            token = int(plan.input_ids[at]) if row < plan.num_extend else -1
            at += row < plan.num_extend
            found.append((int(piece.rows[row]), int(plan.slots[row]), int(plan.starts[row]) + index, token))
    return found


def scores_of(piece: Piece) -> list[tuple[int, int, int]]:
    """Returns (row, position, predicted token) of each scored prompt token."""
    plan, found = piece.plan, []
    ends = np.cumsum(plan.num_tokens)
    columns = (plan.prompt_logprob_rows, plan.prompt_logprob_offsets, plan.prompt_logprob_nexts)
    for row, offset, after in zip(*(column.tolist() for column in columns), strict=True):
        first, end = int(ends[row] - plan.num_tokens[row]), int(ends[row])
        targets = [*plan.input_ids[first + offset + 1 : end].tolist(), *([after] if after >= 0 else [])]
        start = int(plan.starts[row]) + offset
        found += [(int(piece.rows[row]), start + index, target) for index, target in enumerate(targets)]
    return found


def samples_of(piece: Piece) -> list[tuple[int, int]]:
    """Returns (row, position after the last token) of each sampled row."""
    plan = piece.plan
    return [
        (int(piece.rows[row]), int(plan.starts[row] + plan.num_tokens[row])) for row in range(plan.num_rows) if plan.sample[row]
    ]


def cut_up(piece: Piece) -> list[Piece]:
    parts = halves(piece)
    return [piece] if parts is None else [end for part in parts for end in cut_up(part)]


@settings(max_examples=100, deadline=None)
@given(ROWS, st.integers(0, 5))
def test_pieces_of_one_token_equal_the_whole_plan(rows: list[tuple[int, bool, int, bool]], num_decode: int) -> None:
    begun = whole(plan_of(rows, num_decode))
    ends = cut_up(begun)
    assert all(end.num_tokens == 1 for end in ends) and not any(len(end.plan.table_slots) for end in ends)
    for told in (tokens_of, scores_of, samples_of):
        assert [each for end in ends for each in told(end)] == told(begun)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, 5), st.data())
def test_select_keeps_only_the_chosen_rows_of_a_piece(
    rows: list[tuple[int, bool, int, bool]], num_decode: int, data: st.DataObject
) -> None:
    begun = whole(plan_of(rows, num_decode))
    kept = data.draw(st.lists(st.sampled_from(range(len(rows) + num_decode)), min_size=1, unique=True).map(sorted))
    chosen = select(begun, np.array(kept))
    for told in (tokens_of, scores_of, samples_of):
        assert told(chosen) == [each for each in told(begun) if each[0] in kept]


def units_after(pieces: list[Piece], states: dict[int, list[tuple[int, int]]]) -> dict[int, list[tuple[int, int]]]:
    """Returns the states after the pieces. A state is the list of (row, position) of the tokens that it stands for.

    Args:
        states: states before the pieces, by unit.
    """
    states = dict(states)
    for piece in pieces:
        plan = piece.plan
        for row in range(plan.num_rows):
            before, start = int(plan.state_before[row]), int(plan.starts[row])
            tokens = [(int(piece.rows[row]), start + index) for index in range(int(plan.num_tokens[row]))]
            state = states[before] if before != -1 else []
            if cut := int(plan.state_cuts[row]):
                assert plan.state_at_cut[row] >= 0 and cut <= len(tokens)
                states[int(plan.state_at_cut[row])] = state + tokens[:cut]
            states[int(plan.state_after[row])] = state + tokens
    return states


@settings(max_examples=100, deadline=None)
@given(ROWS, st.integers(0, 3), st.data())
def test_pieces_leave_the_same_states_as_the_whole_plan(
    rows: list[tuple[int, bool, int, bool]], num_decode: int, data: st.DataObject
) -> None:
    plan = plan_of(rows, num_decode)
    total = plan.num_rows
    cuts = [data.draw(st.integers(0, int(count))) if row < len(rows) else 0 for row, count in enumerate(plan.num_tokens)]
    plan = replace(
        plan,
        state_before=i32([data.draw(st.sampled_from([-1, row])) for row in range(total)]),
        state_after=i32(list(range(total, 2 * total))),
        state_cuts=i32(cuts),
        state_at_cut=i32([2 * total + row if cut else -1 for row, cut in enumerate(cuts)]),
        state_starts=plan.starts,
    )
    begun, states = whole(plan), {row: [(row, -1)] for row in range(total)}
    found = units_after(cut_up(begun), states)
    found.pop(SCRATCH, None)
    assert found == units_after([begun], states)


def test_plan_is_halved_between_rows_or_within_a_single_row() -> None:
    first, second = halves(whole(plan_of([(9, True, -1, False), (3, True, -1, False)], 4))) or ()
    assert (first.num_tokens, second.num_tokens) == (9, 7)
    first, second = halves(whole(plan_of([(9, True, 2, True)], 0))) or ()
    assert (first.num_tokens, second.num_tokens) == (4, 5) and scores_of(first) == [(0, 2, 103), (0, 3, 104)]
