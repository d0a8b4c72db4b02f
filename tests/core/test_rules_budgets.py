"""Rules for the size of a step and for the memory that admission reserves (docs/design/scheduler.md#admission-and-budgets)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.plan import ForwardMode
from rootstock_llm.services.worker.core.planning.planner import NewTokenRatio
from rootstock_llm.services.worker.core.planning.step_rows import AddResult, PrefillAdder, RunningRows, adapted_chunk
from tests.core.test_scheduler_basic import make

Row = tuple[int, int, bool]  # (largest number of further output tokens, tokens of KV, ignore_eos)
CONTINUE, NO_TOKEN, OTHER = AddResult.CONTINUE, AddResult.NO_TOKEN, AddResult.OTHER


def adder(rows: list[Row] | None = None, **changes: Any) -> PrefillAdder:
    columns = list(zip(*rows, strict=True)) if rows else [(), (), ()]
    values: dict[str, Any] = {
        "page_size": 1,
        "rows": RunningRows(
            np.array(columns[0], dtype=np.int64), np.array(columns[1], dtype=np.int64), np.array(columns[2], dtype=np.bool_)
        ),
        "new_token_ratio": 1.0,
        "max_prefill_tokens": 1 << 20,
        "chunked_prefill_size": 0,
        "num_decode_tokens": 0,
        "max_requests": 0,
        "max_logprob_tokens": 1 << 20,
    }
    values |= changes
    budgets = PrefillAdder(values.pop("page_size"))
    budgets.begin(**values)
    return budgets


class TestNewTokenRatio:
    @pytest.mark.parametrize(("conservativeness", "first"), [(1.4, 0.98), (1.5, 1.0)])
    def test_new_token_ratio_starts_at_70_percent_times_conservativeness_but_at_most_1(
        self, conservativeness: float, first: float
    ) -> None:
        assert NewTokenRatio(conservativeness).value == pytest.approx(first)

    @pytest.mark.parametrize("conservativeness", [0.3, 2.0])
    def test_new_token_ratio_decays_linearly_to_14_percent_in_600_steps(self, conservativeness: float) -> None:
        ratio = NewTokenRatio(conservativeness)
        first, seen = ratio.value, []
        for _ in range(700):
            ratio.step()
            seen.append(ratio.value)
        floor = 0.14 * first
        assert seen[299] == pytest.approx((first + floor) / 2)
        assert seen[598] > floor
        assert seen[599:] == pytest.approx([floor] * 101)

    @pytest.mark.parametrize(
        ("decoded", "batch", "max_new", "value"),
        [(100, 4, 1000, 180 / 1001), (0, 1, 99, 0.2), (920, 4, 999, 1.0), (990, 4, 1000, 1.0)],
    )
    def test_new_token_ratio_becomes_the_share_that_the_remaining_rows_need_when_a_request_is_retracted(
        self, decoded: int, batch: int, max_new: int, value: float
    ) -> None:
        ratio = NewTokenRatio(1.0)
        ratio.raise_on_retract(decoded, batch, max_new)
        assert ratio.value == pytest.approx(value)

    def test_new_token_ratio_decays_only_in_decode_steps(self) -> None:
        engine = make(chunked_prefill_size=16)
        engine.submit(0, range(100), max_new_tokens=20, ignore_eos=True)
        engine.drain()
        decodes = sum(plan.mode is ForwardMode.DECODE for plan in engine.plans)
        assert 0 < decodes < len(engine.plans)
        assert engine.core.stats().new_token_ratio == pytest.approx(0.7 - decodes * 0.7 * 0.86 / 600)

    def test_new_token_ratio_is_reset_when_the_worker_is_idle(self) -> None:
        engine = make()
        engine.submit(0, [1] * 8, max_new_tokens=50, ignore_eos=True)
        engine.drain()
        assert engine.core.stats().new_token_ratio < 0.7
        engine.turn()
        assert engine.core.stats().new_token_ratio == 0.7


class TestTotalBudget:
    @pytest.mark.parametrize(("available", "result"), [(30, NO_TOKEN), (31, CONTINUE)])
    def test_admission_requires_free_memory_for_prompt_and_output(self, available: int, result: AddResult) -> None:
        assert adder().admit(available, 0, 10, 20, False, False)[0] is result

    def test_admission_reserves_a_ratio_of_the_remaining_output_of_running_requests(self) -> None:
        rows, ratio, reserved = [(60, 5, False), (40, 5, False)], 0.098, 9.8
        enough = int(30 + reserved) + 1
        assert adder(rows, new_token_ratio=ratio).admit(enough, 0, 10, 20, False, False)[0] is CONTINUE
        assert adder(rows, new_token_ratio=ratio).admit(enough - 1, 0, 10, 20, False, False)[0] is NO_TOKEN

    @pytest.mark.parametrize(("max_new", "counted"), [(4096, 4096), (4097, 4096)])
    def test_admission_counts_at_most_4096_output_tokens_per_request(self, max_new: int, counted: int) -> None:
        assert adder().admit(10 + counted, 0, 10, max_new, False, False)[0] is NO_TOKEN
        assert adder().admit(11 + counted, 0, 10, max_new, False, False)[0] is CONTINUE
        rows = [(max_new, 1, False)]
        assert adder(rows).admit(11 + counted, 0, 10, 1, False, False)[0] is NO_TOKEN
        assert adder(rows).admit(12 + counted, 0, 10, 1, False, False)[0] is CONTINUE

    @pytest.mark.parametrize(("extend", "counted"), [(16, 16), (17, 32)])
    def test_admission_counts_prompts_in_whole_pages(self, extend: int, counted: int) -> None:
        assert adder(page_size=16).admit(counted + 8, 0, extend, 8, False, False)[0] is NO_TOKEN
        assert adder(page_size=16).admit(counted + 9, 0, extend, 8, False, False)[0] is CONTINUE

    def test_admission_reserves_memory_for_requests_admitted_earlier_in_the_same_pass(self) -> None:
        budget = adder(page_size=16, new_token_ratio=0.1)
        budget.added(16, 20, 50, False, False)
        reserved = 32 + 50
        assert budget.admit(reserved + 16 + 5, 0, 10, 5, False, False)[0] is NO_TOKEN
        assert budget.admit(reserved + 16 + 6, 0, 10, 5, False, False)[0] is CONTINUE


class TestIgnoreEos:
    """For requests with ignore_eos, admission simulates the rows to their ends instead of using the new-token ratio."""

    @pytest.mark.parametrize(
        ("running", "result"),
        [([(10, 50, True)], CONTINUE), ([(60, 50, True)], NO_TOKEN), ([(10, 5, True)], NO_TOKEN), ([], NO_TOKEN)],
        ids=["row ends early", "row ends too late", "row frees too little", "no row ends"],
    )
    def test_admission_counts_memory_that_running_rows_free_before_it_is_needed(
        self, running: list[Row], result: AddResult
    ) -> None:
        assert adder(running).admit(60, 0, 20, 60, True, False)[0] is result

    def test_admission_estimates_the_output_of_other_rows_with_the_new_token_ratio(self) -> None:
        assert adder([(100, 50, False)], new_token_ratio=0.1).admit(60, 0, 20, 60, True, False)[0] is CONTINUE
        assert adder([(100, 50, False)], new_token_ratio=1.0).admit(60, 0, 20, 60, True, False)[0] is NO_TOKEN

    @pytest.mark.parametrize(("available", "result"), [(81, NO_TOKEN), (82, CONTINUE)])
    def test_admission_keeps_a_spare_page_per_row(self, available: int, result: AddResult) -> None:
        assert adder().admit(available, 0, 20, 60, True, False)[0] is result

    def test_admission_counts_prompts_admitted_earlier_in_the_same_pass(self) -> None:
        budget = adder()
        budget.added(10, 30, 5, True, False)
        assert budget.admit(70, 0, 20, 5, True, False)[0] is CONTINUE
        assert budget.admit(55, 0, 20, 5, True, False)[0] is NO_TOKEN

    def test_request_with_ignore_eos_is_admitted_earlier_than_a_request_without(self) -> None:
        admitted = []
        for ignore_eos in (True, False):
            engine = make(num_pages=32, eos_token_ids=(), schedule_conservativeness=9.0)
            engine.submit(0, [1] * 40, max_new_tokens=30, ignore_eos=ignore_eos)
            engine.turn()
            for _ in range(20):
                engine.turn()
            engine.submit(1, [2] * 20, max_new_tokens=50, ignore_eos=ignore_eos)
            engine.turn()
            admitted.append(engine.core.stats().num_running)
            engine.drain()
            assert engine.core.stats().retractions_total == 0
        assert admitted == [2, 1]


class TestInputBudget:
    def test_input_budget_admits_whole_prompts_up_to_max_prefill_tokens(self) -> None:
        budget = adder(max_prefill_tokens=100)
        assert budget.admit(10_000, 0, 60, 1, False, False) == (CONTINUE, 60)
        budget.added(60, 0, 1, False, False)
        assert budget.admit(10_000, 0, 41, 1, False, False) == (OTHER, 0)
        assert budget.admit(10_000, 0, 40, 1, False, False) == (CONTINUE, 40)

    def test_input_budget_admits_a_first_prompt_of_any_length(self) -> None:
        assert adder(max_prefill_tokens=100).admit(10_000, 0, 500, 1, False, False) == (CONTINUE, 500)

    def test_input_budget_admits_no_request_when_exhausted(self) -> None:
        budget = adder(max_prefill_tokens=100)
        assert not budget.exhausted
        budget.added(100, 0, 1, False, False)
        assert budget.exhausted
        assert budget.admit(10_000, 0, 1, 1, False, False) == (OTHER, 0)


class TestChunkBudget:
    @pytest.mark.parametrize(
        ("page_size", "start", "extend", "chunk", "taken"),
        [
            (1, 0, 100, 50, 50),
            (16, 0, 100, 50, 48),
            (16, 5, 100, 50, 43),
            (16, 0, 50, 50, 50),
            (16, 0, 49, 48, 48),
        ],
    )
    def test_chunk_ends_at_a_page_boundary_unless_the_rest_of_the_prompt_fits(
        self, page_size: int, start: int, extend: int, chunk: int, taken: int
    ) -> None:
        budget = adder(page_size=page_size, chunked_prefill_size=chunk)
        assert budget.admit(10_000, start, extend, 1, False, False) == (CONTINUE, taken)

    def test_chunk_is_empty_when_the_budget_has_less_than_a_page_left(self) -> None:
        budget = adder(page_size=16, chunked_prefill_size=32)
        budget.added(20, 0, 1, False, False)
        assert budget.admit(10_000, 0, 100, 1, False, False) == (OTHER, 0)
        assert budget.admit(10_000, 0, 12, 1, False, False) == (CONTINUE, 12)

    def test_input_budget_limits_a_chunk(self) -> None:
        assert adder(chunked_prefill_size=64, max_prefill_tokens=40).chunk(0, 100, False) == 40

    @pytest.mark.parametrize(("num_decode_tokens", "taken"), [(0, 64), (16, 48), (63, 16)])
    def test_chunk_has_at_least_one_page_when_decode_rows_share_the_step(self, num_decode_tokens: int, taken: int) -> None:
        budget = adder(page_size=16, chunked_prefill_size=64, max_prefill_tokens=64, num_decode_tokens=num_decode_tokens)
        assert budget.chunk(0, 1000, False) == taken


class TestLogprobBudget:
    def test_logprob_budget_cuts_prompts_when_chunking_is_off(self) -> None:
        budget = adder(max_logprob_tokens=40)
        assert budget.chunk(0, 100, True) == 40
        assert budget.chunk(0, 100, False) == 100

    def test_logprob_budget_is_shared_by_the_rows_of_a_step(self) -> None:
        budget = adder(max_logprob_tokens=40, chunked_prefill_size=1000)
        budget.added(30, 0, 1, False, True)
        assert budget.chunk(0, 100, True) == 10
        assert budget.chunk(0, 100, False) == 100

    def test_logprob_budget_limits_each_step(self) -> None:
        engine = make(chunked_prefill_size=0, max_prompt_logprob_tokens=16)
        for handle in range(3):
            engine.submit(handle, range(handle, handle + 50), max_new_tokens=2, prompt_logprobs_from=1)
        engine.submit(3, [900] * 60, max_new_tokens=2)
        engine.drain()
        for plan in engine.plans:
            assert plan.num_tokens[plan.prompt_logprob_rows].sum() <= 16
        for handle in range(4):
            engine.check_answer(handle)


class TestAdaptedChunk:
    @pytest.mark.by_day(one_in=2, seed=7)
    @pytest.mark.parametrize(
        ("size", "page_size", "decoding", "half_at", "chunk"),
        [
            (8192, 16, 0, 64, 8192),
            (8192, 16, 64, 64, 4096),
            (8192, 16, 448, 64, 1024),
            (8192, 16, 100_000, 64, 1024),
            (8192, 16, 100_000, 0, 8192),
            (0, 16, 100, 64, 0),
            (100, 16, 0, 64, 96),
            (1000, 16, 10, 64, 864),
            (16, 16, 1000, 64, 16),
        ],
    )
    def test_adapted_chunk_is_halved_at_the_configured_number_of_rows_and_has_a_minimum(
        self, size: int, page_size: int, decoding: int, half_at: int, chunk: int
    ) -> None:
        assert adapted_chunk(size, page_size, decoding, half_at) == chunk

    @pytest.mark.parametrize(("half_at", "length"), [(0, 32), (2, 16), (6, 24)])
    def test_adapted_chunk_shrinks_with_two_decode_rows(self, half_at: int, length: int) -> None:
        engine = make(chunked_prefill_size=32, adaptive_chunk_rows=half_at)
        for handle in range(2):
            engine.submit(handle, [handle] * 4, max_new_tokens=60, ignore_eos=True)
        for _ in range(3):
            engine.turn()
        engine.submit(2, range(100), max_new_tokens=2)
        engine.turn()
        assert engine.plans[-1].num_tokens.tolist() == [length]


class TestMixedChunk:
    @pytest.mark.parametrize(("mixed", "modes"), [(True, ForwardMode.MIXED), (False, ForwardMode.EXTEND)])
    def test_mixed_chunk_combines_decode_rows_with_a_prompt(self, mixed: bool, modes: ForwardMode) -> None:
        engine = make(enable_mixed_chunk=mixed, chunked_prefill_size=16, adaptive_chunk_rows=0)
        for handle in range(3):
            engine.submit(handle, [handle] * 4, max_new_tokens=60, ignore_eos=True)
        for _ in range(3):
            engine.turn()
        engine.submit(3, range(100, 180), max_new_tokens=2)
        engine.turn()
        engine.turn()
        for plan in engine.plans[-2:]:
            assert plan.mode is modes
            assert plan.num_tokens.tolist() == ([12, 1, 1, 1] if mixed else [16])
        engine.drain()
        for handle in engine.submitted:
            engine.check_answer(handle)


class TestExtendSteps:
    @pytest.mark.parametrize("limit", [1, 3])
    def test_decode_rows_get_a_step_after_max_extend_steps(self, limit: int) -> None:
        modes = self.modes(limit)
        begin = modes.index("E")
        assert modes[begin : begin + 2 * (limit + 1)] == ("E" * limit + "D") * 2

    def test_extend_steps_continue_when_no_limit_is_set(self) -> None:
        assert "EEEEEE" in self.modes(0)

    @staticmethod
    def modes(limit: int) -> str:
        """Returns the first letter of the mode of each step after the first three.

        After these three steps, one row decodes, and a prompt of seven chunks arrives.
        """
        engine = make(max_extend_steps=limit, chunked_prefill_size=16, adaptive_chunk_rows=0)
        engine.submit(0, [1] * 4, max_new_tokens=60, ignore_eos=True)
        for _ in range(3):
            engine.turn()
        first = len(engine.plans)
        engine.submit(1, range(100, 200), max_new_tokens=2)
        engine.drain()
        engine.check_answer(1)
        return "".join(plan.mode.name[0] for plan in engine.plans[first:])

    def test_extend_steps_continue_when_no_request_decodes(self) -> None:
        engine = make(max_extend_steps=1, chunked_prefill_size=16)
        engine.submit(0, range(100), max_new_tokens=1)
        engine.drain()
        assert [plan.mode for plan in engine.plans] == [ForwardMode.EXTEND] * 7


class TestPrefillMaxRequests:
    @pytest.mark.parametrize(("limit", "rows"), [(0, [6]), (1, [1] * 6), (4, [4, 2])])
    def test_step_admits_at_most_prefill_max_requests(self, limit: int, rows: list[int]) -> None:
        engine = make(prefill_max_requests=limit, chunked_prefill_size=0)
        for handle in range(6):
            engine.submit(handle, [handle] * 4, max_new_tokens=9, ignore_eos=True)
        engine.drain()
        assert [plan.num_extend for plan in engine.plans if plan.num_extend] == rows
