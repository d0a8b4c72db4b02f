"""Rules for steps in which a grammar's forced tokens are computed next to other rows.

Such a step uses a CUDA graph, unless an eager step saves more time for its forced tokens than it costs the other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits, rereads, strides
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan
from tests.core.fake_grammar import spec
from tests.core.harness import Engine
from tests.core.test_scheduler_basic import make

WIDE = {"graph_rows": 64, "graph_rereads": 10_000, "eager_step_cost": 0.1}
RUNS = spec(3, 60)  # runs of 16 forced tokens


def run(config: dict[str, Any], overlap: bool = True, jumping: int = 1, plain: int = 2, **params: Any) -> Engine:
    """Runs requests with and without a grammar that begin in the same step."""
    engine = make(overlap, num_pages=256, chunked_prefill_size=128, **config)
    engine.book.ready.add(RUNS)
    for handle in range(jumping + plain):
        wish = {"grammar": RUNS} if handle < jumping else {"ignore_eos": True}
        engine.submit(handle, [1 + handle] * 4, max_new_tokens=60, **wish, **params)
    engine.drain()
    for handle in range(jumping + plain):
        engine.check_answer(handle)
    return engine


def replayed(engine: Engine) -> list[bool]:
    """Returns whether a graph can replay each step after the first one."""
    limits = engine.config.graphs
    return [limits.hold(plan.starts, plan.num_tokens) for plan in engine.plans[1:]]


def forced_steps(engine: Engine) -> list[BatchPlan]:
    return [plan for plan in engine.plans[1:] if plan.num_extend]


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("overlap", [True, False])
def test_forced_tokens_are_computed_in_one_graph_step_when_the_graph_has_enough_rows(overlap: bool) -> None:
    without, held = run({}, overlap), run(WIDE, overlap)
    assert len(held.plans) == len(without.plans)
    assert all(replayed(held)) and max(int(plan.num_tokens.max()) for plan in forced_steps(held)) >= 15


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("overlap", [True, False])
def test_forced_tokens_use_an_eager_step_only_when_the_eager_step_saves_time(overlap: bool) -> None:
    narrow = {"graph_rows": 3, "graph_rereads": 10_000}
    cheap = run({**narrow, "eager_step_cost": 4.0}, overlap)  # saves one row 15 steps, and costs each of 3 rows 4 steps
    dear = run({**narrow, "eager_step_cost": 6.0}, overlap)
    assert [plan.num_extend for plan in forced_steps(cheap)] == [plan.num_extend for plan in forced_steps(run({}, overlap))]
    assert not all(replayed(cheap)) and all(replayed(dear))
    assert all(plan.num_tokens.max() == 1 for plan in forced_steps(dear)), (
        "forced tokens are computed one per step, like sampled tokens"
    )


def test_forced_tokens_of_several_rows_share_the_cost_of_an_eager_step() -> None:
    narrow = {"graph_rows": 4, "graph_rereads": 10_000, "eager_step_cost": 6.0}
    assert all(replayed(run(narrow, jumping=1, plain=3))) and not all(replayed(run(narrow, jumping=4, plain=0)))


def test_forced_tokens_fill_the_free_rows_of_a_small_graph() -> None:
    engine = run({"graph_rows": 8, "graph_rereads": 10_000, "eager_step_cost": 9.0}, jumping=1, plain=2)
    assert all(replayed(engine)) and max(int(plan.num_tokens.sum()) for plan in forced_steps(engine)) == 8
    assert [int(plan.num_tokens[0]) for plan in forced_steps(engine)] == [6, 6, 4], (
        "the graph's free rows take 6, 6 and 4 of the 16 forced tokens"
    )


def test_forced_tokens_use_an_eager_step_when_rereading_the_context_costs_more() -> None:
    engine = run({"graph_rows": 64, "graph_rereads": 300, "eager_step_cost": 9.0})
    assert [plan.num_extend for plan in forced_steps(engine)] == [plan.num_extend for plan in forced_steps(run({}))]
    assert not all(replayed(engine)) and all(replayed(run({**WIDE, "graph_rereads": 600})))


def test_all_forced_tokens_are_computed_in_one_step_when_a_prompt_shares_the_step() -> None:
    engine = make(True, num_pages=256, chunked_prefill_size=128, graph_rows=1, graph_rereads=10_000, eager_step_cost=99.0)
    engine.book.ready.add(RUNS)
    engine.submit(0, [1] * 4, max_new_tokens=60, grammar=RUNS)
    while not forced_steps(engine):
        engine.turn()
    assert engine.plans[-1].num_tokens.tolist() == [1]
    engine.submit(1, [2] * 4, max_new_tokens=4)
    engine.turn()
    assert engine.plans[-1].num_tokens.max() > 4, "a step with a prompt uses no graph, so it takes the rest of the forced tokens"
    engine.drain()
    engine.check_answer(0)
    engine.check_answer(1)


@given(
    st.integers(0, 12), st.integers(0, 400), st.floats(0, 3, allow_nan=False), st.integers(1, 4), st.integers(0, 3), st.booleans()
)
@settings(max_examples=15, deadline=None)
def test_outputs_do_not_depend_on_the_graph_limits(
    rows: int, limit: int, cost: float, jumping: int, plain: int, overlap: bool
) -> None:
    config = {"graph_rows": rows, "graph_rereads": limit, "eager_step_cost": cost}
    engine = run(config, overlap, jumping, plain)
    again = run(config, overlap, jumping, plain)
    assert engine.outputs == run({}, overlap, jumping, plain).outputs
    pairs = zip(engine.plans, again.plans, strict=True)
    assert all((one.num_tokens == other.num_tokens).all() and (one.slots == other.slots).all() for one, other in pairs)


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 300)), min_size=1, max_size=20),
    st.integers(0, 300),
    st.sampled_from([0, 20_000, 10**9]),
    st.integers(0, 40),
)
def test_number_of_forced_tokens_per_row_fits_the_graph_and_is_at_least_one(
    rows: list[tuple[int, int]], size: int, limit: int, others: int
) -> None:
    starts, left = zip(*rows, strict=True)
    never = GraphLimits(size, limit, float("inf"))
    taken = strides(never, starts, left, len(rows) + others)
    assert (taken is None) == (len(rows) + others > size or sum(map(rereads, starts, left)) > limit)
    if taken is not None:
        ones = [1] * others
        assert all(1 <= count <= known for count, known in zip(taken, left, strict=True))
        columns = [np.array([*values], dtype=np.int32) for values in ((*starts, *ones), (*taken, *ones))]
        assert never.hold(*columns)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 4), (100, 1), (100, 3)])
def test_number_of_rereads_is_the_sum_of_the_contexts_of_all_rows_except_the_last(start: int, count: int) -> None:
    assert rereads(start, count) == sum(start + index + 1 for index in range(count - 1))
