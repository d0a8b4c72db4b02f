"""Tests that a prompt's chunks are so short that waiting decode rows get their next token within `adaptive_chunk_s`.

docs/design/scheduler.md#chunks has the rules.
"""

from __future__ import annotations

from typing import Any

import pytest

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan
from rootstock_llm.services.worker.core.contracts.reservations import RESERVATION_SECRET_BYTES, KvReservation
from rootstock_llm.services.worker.core.planning.step_rows import (
    FADES,
    MIN_PACED_SHARE,
    MOST_TOKENS,
    OUTLIER,
    ChunkPace,
    paced_chunk,
)
from tests.all_pairs import each_pair
from tests.core.harness import Engine
from tests.core.test_scheduler_basic import make

TOKEN_S, ROW_S, TURN_S = 0.001, 0.002, 0.01  # seconds of a step: per token, per row, and constant
SIZE = 1024


def pace(decode_s: dict[int, float] | None = None) -> ChunkPace:
    """Returns a pace with the given seconds of a decode step, by its number of rows."""
    made = ChunkPace()
    for rows, seconds in (decode_s or {}).items():
        made.record(0, rows, seconds, 1)
    return made


def test_paced_chunk_has_whole_pages_and_a_minimum_length() -> None:
    assert [paced_chunk(SIZE, 16, tokens) for tokens in (5000, 500, 0)] == [SIZE, 496, SIZE // MIN_PACED_SHARE]
    assert [paced_chunk(64, 16, 0), paced_chunk(0, 16, 5), paced_chunk(40, 16, 39)] == [16, 0, 32]


class TestPace:
    def test_pace_is_unknown_before_the_first_prompt(self) -> None:
        assert not pace().is_known
        assert not pace({1: 0.01}).is_known

    def test_pace_subtracts_the_time_of_decode_rows(self) -> None:
        """The times of 1 and of 4 decode rows are known. For other numbers, the time of the next smaller number counts."""
        for rows, alone in ((1, 0.02), (3, 0.02), (4, 0.05), (7, 0.05), (100, 0.05)):
            known = pace({1: 0.02, 4: 0.05})
            known.record(1000, rows, alone + 1.0, 1)
            assert known.tokens(0.3, rows, 0) == pytest.approx((0.3 - alone) / 0.001, abs=1), rows

    def test_constant_time_of_an_extend_step_is_the_time_of_the_shortest_decode_step(self) -> None:
        known = pace({4: 0.05, 1: 0.02})
        known.record(1000, 0, 0.02 + 1.0, 1)
        assert known.tokens(0.3, 4, 1) == pytest.approx((0.3 - 0.05 - 0.02) / 0.001, abs=1)
        assert known.tokens(0.3, 4, 3) == pytest.approx((0.3 - 0.05 - 0.06) / 0.003, abs=1)
        assert known.tokens(0.3, 4, 0) == pytest.approx((0.3 - 0.05) / 0.001, abs=1)

    def test_pace_returns_the_smallest_number_of_extend_steps_that_fill_the_time_limit(self) -> None:
        """A step of 100 tokens takes 0.12 s, and a step of 4 decode rows takes 0.05 s."""
        known = pace({4: 0.05, 1: 0.02})
        known.record(1000, 0, 0.02 + 1.0, 1)
        assert [known.steps(within_s, 4, 100) for within_s in (0.01, 0.16, 0.18, 0.6)] == [1, 1, 2, 5]
        assert [known.steps(0.6, 4, 1000), known.steps(1e308, 4, 9)] == [1, MOST_TOKENS]

    def test_pace_gives_prompts_at_least_as_much_time_as_decode_rows(self) -> None:
        """The decode rows take 0.2 s. A prompt gets the rest of the time limit.

        If the rest is shorter than 0.2 s, the prompt gets 0.2 s, or the whole limit if that is shorter still.
        """
        known = pace({8: 0.2})
        known.record(1000, 8, 1.2, 1)
        tokens = [known.tokens(within_s, 8, 0) for within_s in (0.01, 0.15, 0.3, 0.5)]
        assert tokens == pytest.approx([10, 150, 200, 300], abs=1)
        assert known.tokens(1e308, 8, 0) == known.tokens(float("inf"), 8, 0) == MOST_TOKENS

    def test_pace_counts_decode_rows_as_at_most_half_of_a_step(self) -> None:
        """If a mixed step takes less time than an earlier decode step, half of the mixed step's time counts for the prompt."""
        known = pace({1: 5.0})
        known.record(1000, 1, 1.0, 1)
        assert known.tokens(11.0, 1, 0) == pytest.approx(6.0 / 0.0005, rel=0.01)

    def test_pace_ignores_small_and_untimed_steps(self) -> None:
        known = pace()
        for extended_then, seconds in ((63, 1.0), (1000, 0.0), (1000, -1.0)):
            known.record(extended_then, 1, seconds, 64)
        assert not known.is_known

    def test_pace_gives_more_weight_to_steps_with_more_tokens(self) -> None:
        """The constant time of a step makes the tokens of short prompts expensive."""
        known = pace()
        known.record(16, 0, 0.8 + 0.016, 16)
        for _ in range(3):
            known.record(1000, 0, 0.8 + 1.0, 16)
        assert known.tokens(1.8, 0, 1) > 800

    def test_pace_follows_step_times_and_limits_outliers(self) -> None:
        known = pace()
        known.record(1000, 0, 1.0, 1)
        known.record(1000, 0, 1000.0, 1)
        assert known.tokens(1.0, 0, 1) == pytest.approx(1000 * (FADES + 1) / (FADES + OUTLIER), abs=1)
        for _ in range(30):
            known.record(1000, 0, 2.0, 1)
        assert known.tokens(1.0, 0, 1) == pytest.approx(500, abs=5)


class Timed:
    """An engine whose steps take modelled times."""

    def __init__(self, overlap: bool = False, row_s: float = ROW_S, step_s: float = TURN_S, **changes: Any) -> None:
        sizes = {"num_pages": 4096, "page_size": 4, "context_len": 8192, "chunked_prefill_size": SIZE, "adaptive_chunk_rows": 0}
        self.engine, self._row_s, self._step_s = make(overlap, **{**sizes, **changes}), row_s, step_s

    def run(self, turns: int) -> list[tuple[BatchPlan, float]]:
        """Runs `turns` loop iterations. Returns the new steps with their seconds."""
        engine, begun = self.engine, len(self.engine.plans)
        for _ in range(turns):
            if engine.prev is not None:
                engine.now += self.seconds(engine.prev.plan) - TURN_S  # engine.turn() adds TURN_S
            engine.turn()
        return [(plan, self.seconds(plan)) for plan in engine.plans[begun:]]

    def seconds(self, plan: BatchPlan) -> float:
        return self.seconds_of(int(plan.num_tokens.sum()), plan.num_rows)

    def seconds_of(self, tokens: int, rows: int) -> float:
        return self._step_s + TOKEN_S * tokens + self._row_s * rows

    def beside(self, decoding: int, turns: int = 40) -> list[tuple[BatchPlan, float]]:
        """Returns the steps with chunks of a long prompt that arrives while `decoding` rows decode."""
        for handle in range(decoding):
            self.engine.submit(handle, [handle] * 4, max_new_tokens=500, ignore_eos=True)
        self.run(8)
        self.engine.submit(decoding, range(7000), max_new_tokens=2)
        return [(plan, seconds) for plan, seconds in self.run(turns) if plan.num_extend]


def extended(plan: BatchPlan) -> int:
    return int(plan.num_tokens[: plan.num_extend].sum())


@pytest.mark.by_day(one_in=2, seed=24)
@each_pair(overlap=[False, True], mixed=[False, True], time=[(0.3, 2, 1), (0.3, 0, 1), (1.5, 2, 2), (1.5, 0, 2)])
def test_decode_rows_wait_at_most_adaptive_chunk_s(overlap: bool, mixed: bool, time: tuple[float, int, int]) -> None:
    """`time` has the time limit, max_extend_steps, and the expected extend steps before each decode step.

    A chunk of the full size takes 1.04 s.
    """
    within_s, most, extends = time
    timed = Timed(overlap, enable_mixed_chunk=mixed, max_extend_steps=most, adaptive_chunk_s=within_s)
    steps = timed.beside(4, turns=30)
    late = [plan for plan, _ in steps[6:-1]]
    assert late and all(plan.num_rows == (5 if mixed else 1) for plan in late)
    if mixed and within_s > 1:
        assert {extended(plan) for plan in late} == {SIZE - 4}, "a whole chunk takes less time than the limit"
        return
    per_step = 1 if mixed else extends
    wait = per_step * timed.seconds(late[0]) + (0 if mixed else timed.seconds_of(4, 4))
    assert 0.9 * within_s < wait <= 1.03 * within_s, "decode rows wait for 0.9 to 1.03 of the limit"
    assert max(map(extended, late)) - min(map(extended, late)) <= 24, "later chunks have nearly equal sizes"


def test_mixed_steps_use_the_whole_time_limit() -> None:
    timed = Timed(enable_mixed_chunk=True, adaptive_chunk_s=0.08)
    steps = timed.beside(7)
    assert all(plan.num_rows == 8 and 0.93 * 0.08 < seconds < 1.03 * 0.08 for plan, seconds in steps[8:])


@pytest.mark.parametrize(("within_s", "most", "modes"), [(0.3, 2, "ED"), (1.5, 2, "EED"), (60.0, 2, "EED"), (1.5, 0, "EED")])
def test_decode_step_follows_the_extend_steps_that_fill_the_time_limit(within_s: float, most: int, modes: str) -> None:
    timed = Timed(max_extend_steps=most, adaptive_chunk_s=within_s)
    begun = len(timed.engine.plans)
    timed.beside(4, turns=20)
    seen = "".join(plan.mode.name[0] for plan in timed.engine.plans[begun:])
    late = seen[seen.index("DE") + 4 :]
    assert modes * 2 in late and "E" + modes not in late


@pytest.mark.parametrize("changes", [{"adaptive_chunk_s": 0.0}, {"adaptive_chunk_s": 60.0}])
def test_chunks_have_full_size_when_the_time_limit_is_long_or_off(changes: dict[str, float]) -> None:
    steps = Timed(**changes).beside(2)
    assert {extended(plan) for plan, _ in steps[:-1]} == {SIZE}


@pytest.mark.parametrize("overlap", [False, True])
def test_chunks_have_full_size_when_no_row_decodes(overlap: bool) -> None:
    """A row whose only token is in flight does not count as a decode row."""
    timed = Timed(overlap, adaptive_chunk_s=0.05)
    assert extended(timed.beside(1)[-1][0]) < SIZE
    for handle in range(2):
        timed.engine.abort(handle)
    timed.run(2)
    for handle in range(9, 12):
        timed.engine.submit(handle, range(handle * 700, handle * 700 + 1500), max_new_tokens=1)
    assert [extended(plan) for plan, _ in timed.run(8)] == [SIZE] * 4 + [4500 - 4 * SIZE]


def test_chunks_have_full_size_for_requests_that_are_handed_over() -> None:
    timed = Timed(overlap=True, adaptive_chunk_s=0.25)
    for number in range(4):
        reservation = KvReservation(number + 1, 1, bytes(RESERVATION_SECRET_BYTES))
        timed.engine.submit(number, range(number * 1500, number * 1500 + 1500), max_new_tokens=90, hand_over=reservation)
    steps = timed.run(20)
    assert [extended(plan) for plan, _ in steps if plan.num_extend] == [SIZE] * 5 + [6000 - 5 * SIZE]
    assert "EEE" in "".join(plan.mode.name[0] for plan, _ in steps), (
        "handed-over requests cause no decode step between two chunks"
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_prompts_advance_when_decode_rows_need_most_of_the_time_limit(mixed: bool) -> None:
    """A step with only 4 decode rows takes 0.83 s. A chunk gets as much time, so the chunk is much longer than a page."""
    steps = Timed(row_s=0.2, adaptive_chunk_s=0.9, enable_mixed_chunk=mixed).beside(4, turns=60)
    assert len(steps) > 10 and all(300 < extended(plan) <= SIZE for plan, _ in steps[-6:-1])


def test_chunks_stay_large_when_each_step_has_a_large_constant_time() -> None:
    """A step has a constant time of 0.15 s, and the time limit is 0.25 s.

    An extend step and a decode step together exceed the limit, but chunks must not become tiny.
    """
    steps = Timed(step_s=0.15, adaptive_chunk_s=0.25).beside(1)
    assert all(100 < extended(plan) < 200 for plan, _ in steps[6:-1])


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_take_at_most_twice_the_time_limit_after_a_hung_step(overlap: bool) -> None:
    timed = Timed(overlap, enable_mixed_chunk=True, adaptive_chunk_s=0.25)
    timed.engine.submit(0, [0] * 4, max_new_tokens=500, ignore_eos=True)
    timed.run(2)
    timed.engine.now += 3.0
    for handle in range(1, 6):
        timed.engine.submit(handle, range(handle * 700, handle * 700 + 3000), max_new_tokens=2)
    steps = [(plan, seconds) for plan, seconds in timed.run(40) if plan.num_extend]
    assert len(steps) > 20 and all(seconds < 2.1 * 0.25 for _, seconds in steps[8:])


def test_several_small_extend_steps_run_within_the_time_limit() -> None:
    """With many decode rows, a chunk has a fourth of its full size; two chunks take less than the limit."""
    timed = Timed(adaptive_chunk_s=0.6, adaptive_chunk_rows=2, max_extend_steps=2)
    begun = len(timed.engine.plans)
    timed.beside(6, turns=20)
    assert "EEDEED" in "".join(plan.mode.name[0] for plan in timed.engine.plans[begun:])


def test_time_of_a_failed_step_does_not_count_for_the_next_step() -> None:
    timed = Timed(adaptive_chunk_s=0.25)
    engine, core = timed.engine, timed.engine.core
    for handle in range(2):
        engine.submit(handle, range(handle * 2000, handle * 2000 + 1500), max_new_tokens=9)
    runs = []
    for _ in range(2):
        plan = core.plan(0.0)
        assert plan is not None
        runs.append(engine.executor.forward(plan))
        engine.executor.sample(runs[-1], {}, {})
    hung, run = runs[0].plan, runs[1]
    core.fail(hung.step_id, "hung", 60.0)
    core.commit(engine.executor.wait(run), 60.1)
    engine.now = 60.1
    core.abort_peer(0, engine.now)
    engine.submit(2, [2] * 4, max_new_tokens=500, ignore_eos=True)
    timed.run(8)
    engine.submit(3, range(4000, 8000), max_new_tokens=2)
    assert extended(timed.run(1)[0][0]) == SIZE


def test_adaptive_chunk_s_can_be_changed_at_run_time() -> None:
    timed = Timed()
    timed.engine.control.retune({"adaptive_chunk_s": 0.1})
    assert all(0.075 < seconds <= 0.09 for _, seconds in timed.beside(2)[6:])


def test_chunk_has_a_minimum_length_when_the_time_limit_is_tiny() -> None:
    steps = Timed(adaptive_chunk_s=1e-6).beside(1)
    assert all(extended(plan) >= SIZE // MIN_PACED_SHARE - 4 for plan, _ in steps[6:-1])


def test_pacing_does_not_change_the_output_tokens() -> None:
    timed = Timed(adaptive_chunk_s=0.05)
    timed.beside(3)
    timed.engine.drain()
    assert isinstance(timed.engine, Engine)
    for handle in timed.engine.submitted:
        timed.engine.check_answer(handle)
