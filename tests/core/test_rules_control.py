"""Rules for the operators' calls on the core: pauses, flushes, new weights and changed settings."""

from __future__ import annotations

from typing import Any

import pytest

from rootstock_llm.services.worker.core.contracts.config import SchedulePolicy
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason, PauseMode, SessionTurn
from rootstock_llm.services.worker.core.control import RANGES
from rootstock_llm.services.worker.exec.fake import hashed_token
from tests.all_pairs import each_value
from tests.core.fake_grammar import spec
from tests.core.harness import Engine
from tests.core.test_scheduler_basic import make


def busy(overlap: bool = True) -> Engine:
    """Returns an engine with two decoding requests, one extending request and one gated request."""
    engine = make(overlap, max_running_requests=3)
    for handle in range(2):
        engine.submit(handle, [handle + 1] * 9, max_new_tokens=40, ignore_eos=True)
    for _ in range(4):
        engine.turn()
    engine.submit(2, range(100), max_new_tokens=8, ignore_eos=True)
    engine.submit(3, [3] * 9, max_new_tokens=20, grammar=spec(0, 12))
    engine.turn()
    return engine


WITH_AND_WITHOUT_OVERLAP = pytest.mark.parametrize("overlap", [True, False])


class TestPause:
    @pytest.mark.by_day(one_in=2, seed=9)
    @WITH_AND_WITHOUT_OVERLAP
    @pytest.mark.parametrize("mode", PauseMode)
    def test_paused_scheduler_plans_no_step_and_queues_new_requests(self, overlap: bool, mode: PauseMode) -> None:
        engine = busy(overlap)
        planned = len(engine.plans)
        engine.control.pause(mode, engine.now)
        engine.check()
        engine.submit(9, [9] * 9, max_new_tokens=5, ignore_eos=True)
        for _ in range(3):
            engine.turn()
        assert len(engine.plans) == planned and 9 not in engine.finishes
        engine.idle_turns = 0
        engine.control.resume()
        engine.drain()
        assert engine.finishes[9].reason is FinishReason.LENGTH

    @pytest.mark.by_day(one_in=2, seed=2)
    @WITH_AND_WITHOUT_OVERLAP
    def test_pause_in_abort_mode_ends_all_requests(self, overlap: bool) -> None:
        engine = busy(overlap)
        engine.control.pause(PauseMode.ABORT, engine.now)
        engine.turn()
        assert {finish.error for finish in engine.finishes.values()} == {ErrorCode.CANCELLED}
        assert sorted(engine.finishes) == [0, 1, 2, 3] and engine.core.stats().pages_leased == 0
        for handle in range(4):
            engine.check_answer(handle)

    @pytest.mark.by_day(one_in=2)
    @WITH_AND_WITHOUT_OVERLAP
    def test_pause_in_retract_mode_frees_all_memory(self, overlap: bool) -> None:
        engine = busy(overlap)
        engine.control.pause(PauseMode.RETRACT, engine.now)
        engine.turn()
        stats = engine.core.stats()
        assert (stats.num_running, stats.pages_leased, stats.num_retracted) == (0, 0, 3)
        assert engine.control.flush_cache() > 0
        assert engine.core.stats().pages_free == engine.config.num_pages
        self.end(engine)

    @pytest.mark.by_day(one_in=2, seed=2)
    @WITH_AND_WITHOUT_OVERLAP
    def test_pause_in_place_keeps_the_memory(self, overlap: bool) -> None:
        engine = busy(overlap)
        before = engine.core.stats()
        engine.control.pause(PauseMode.IN_PLACE, engine.now)
        engine.turn()
        stats = engine.core.stats()
        assert (stats.num_running, stats.retractions_total) == (before.num_running, before.retractions_total)
        assert stats.pages_leased + stats.pages_cached >= before.pages_leased + before.pages_cached - 1
        self.end(engine)

    @staticmethod
    def end(engine: Engine) -> None:
        engine.idle_turns = 0
        engine.control.resume()
        engine.drain()
        for handle in range(4):
            assert engine.finishes[handle].reason is not FinishReason.ABORT
            engine.check_answer(handle)

    @each_value(overlap=[True, False], mode=[PauseMode.RETRACT, PauseMode.IN_PLACE])
    def test_aborts_and_timeouts_work_during_a_pause(self, overlap: bool, mode: PauseMode) -> None:
        engine = busy(overlap)
        engine.submit(4, [4] * 9, max_new_tokens=5, timeout_s=0.05)
        engine.control.pause(mode, engine.now)
        engine.abort(0)
        for _ in range(10):
            engine.turn()
        assert engine.finishes[0].error is ErrorCode.CANCELLED and engine.finishes[4].error is ErrorCode.TIMEOUT


class TestFlush:
    def test_flush_keeps_pages_of_running_requests(self) -> None:
        engine = busy()
        engine.control.flush_cache()
        engine.check()
        engine.drain()
        for handle in range(4):
            engine.check_answer(handle)

    def test_flush_forgets_cached_prefixes(self) -> None:
        engine = make()
        for handle in range(2):
            engine.submit(handle, [1] * 30, max_new_tokens=2)
            engine.drain()
            assert engine.control.flush_cache() > 0
        assert engine.finishes[1].cached_tokens == 0


class TestWeights:
    def answer(self, engine: Engine, handle: int) -> int:
        """Runs a prompt that is equal in every call. Returns the number of its cached tokens."""
        engine.submit(handle, [1] * 30, max_new_tokens=2)
        engine.drain()
        return engine.finishes[handle].cached_tokens

    def test_pages_of_another_model_version_are_not_found(self) -> None:
        engine = make()
        assert (self.answer(engine, 0), self.answer(engine, 1) > 0) == (0, True)
        engine.core.revision = "another"
        assert self.answer(engine, 2) == 0

    def test_replacing_the_weights_removes_cached_pages_and_sessions(self) -> None:
        engine = make()
        engine.open_session("chat")
        self.answer(engine, 0)
        engine.control.replace_weights("another")
        assert engine.core.stats().pages_cached == 0 and engine.core.take_cache_events() is not None
        engine.submit(1, [1] * 30, session=SessionTurn("chat"), max_new_tokens=2)
        engine.submit(2, [1] * 30, session=SessionTurn("never"), max_new_tokens=2)
        engine.turn()
        assert "was closed" in engine.finishes[1].message and "is not open on this worker" in engine.finishes[2].message
        assert engine.open_session("chat"), "the name of the forgotten session can be used again"


class TestRetune:
    def test_tunables_include_every_setting_that_can_be_changed_at_run_time(self) -> None:
        shown = make().control.tunables()
        assert set(shown) == {*RANGES, "new_token_ratio"}
        assert shown["schedule_policy"] == "fcfs" and shown["chunked_prefill_size"] == 16
        assert shown["max_running_requests"] == 8 and shown["new_token_ratio"] == 0.7

    @pytest.mark.parametrize(
        "name", ["schedule_policy", "schedule_conservativeness", "max_running_requests", "enable_mixed_chunk"]
    )
    def test_retuning_accepts_the_current_value_of_a_setting(self, name: str) -> None:
        control = make().control
        before = control.tunables()
        control.retune({name: before[name]})
        assert control.tunables() == before

    @pytest.mark.by_day(one_in=3, seed=37)
    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"page_size": 8}, "page_size"),
            ({"num_pages": 8}, "num_pages"),
            ({"eviction_policy": "lfu"}, "eviction_policy"),
            ({"enable_radix_cache": False}, "enable_radix_cache"),
            ({"nonsense": 1}, "nonsense"),
            ({"schedule_policy": "best"}, "schedule_policy"),
            ({"chunked_prefill_size": 3}, "chunked_prefill_size"),
            ({"chunked_prefill_size": 16.5}, "chunked_prefill_size"),
            ({"chunked_prefill_size": "16"}, "chunked_prefill_size"),
            ({"chunked_prefill_size": True}, "chunked_prefill_size"),
            ({"enable_mixed_chunk": 1}, "enable_mixed_chunk"),
            ({"max_prefill_tokens": 3}, "max_prefill_tokens"),
            ({"max_prompt_logprob_tokens": 0}, "max_prompt_logprob_tokens"),
            ({"max_running_requests": 0}, "max_running_requests"),
            ({"max_running_requests": 9}, "max_running_requests"),
            ({"new_token_ratio": 1.01}, "new_token_ratio"),
            ({"new_token_ratio": -0.01}, "new_token_ratio"),
            ({"waiting_timeout_s": -1.0}, "waiting_timeout_s"),
            ({"waiting_timeout_s": float("nan")}, "waiting_timeout_s"),
            ({"adaptive_chunk_s": float("inf")}, "adaptive_chunk_s"),
            ({"adaptive_chunk_s": 3600.5}, "adaptive_chunk_s"),
            ({"schedule_conservativeness": 0.0}, "schedule_conservativeness: is 0.0; must be a number, above 0"),
            ({"session_ttl_s": 0.0}, "session_ttl_s"),
            ({"session_capacity": 0}, "session_capacity"),
            ({"max_queued_requests": -1}, "max_queued_requests: is -1; must be an integer, 0 or more"),
            ({"max_prompt_logprob_tokens": 255}, "max_prompt_logprob_tokens"),
            ({"chunked_prefill_size": -2}, "chunked_prefill_size"),
        ],
    )
    def test_retuning_refuses_an_invalid_setting_and_keeps_all_settings(self, changes: dict[str, Any], named: str) -> None:
        control = make().control
        before = control.tunables()
        with pytest.raises(ValueError, match=named):
            control.retune({"max_queued_requests": 7, "new_token_ratio": 0.5, **changes})
        assert control.tunables() == before

    def test_retuning_changes_the_policy_of_the_next_plan(self) -> None:
        engine = make(max_running_requests=1)
        for handle, max_new in enumerate((1, 2, 3)):
            engine.submit(handle, [handle] * 4, max_new_tokens=max_new, ignore_eos=True)
        engine.control.retune({"schedule_policy": "lof"})
        assert engine.core.config.schedule_policy is SchedulePolicy.LOF
        engine.drain()
        assert list(engine.finishes) == [2, 1, 0]

    def test_retuning_changes_the_limit_of_running_requests(self) -> None:
        engine = make()
        engine.control.retune({"max_running_requests": 2})
        assert engine.core.stats().max_running_requests == 2, "statistics report the present limit, not the one from the start"
        for handle in range(6):
            engine.submit(handle, [handle] * 4, max_new_tokens=30, ignore_eos=True)
        for _ in range(4):
            engine.turn()
        assert engine.core.stats().num_running == 2
        engine.control.retune({"max_running_requests": 8})
        for _ in range(4):
            engine.turn()
        assert engine.core.stats().num_running == 6

    @pytest.mark.parametrize(("conservativeness", "ratio"), [(0.5, 0.35), (2.0, 1.0)])
    def test_retuning_resets_the_new_token_ratio_when_conservativeness_changes(
        self, conservativeness: float, ratio: float
    ) -> None:
        control = make().control
        control.retune({"schedule_conservativeness": conservativeness})
        assert control.stats().new_token_ratio == pytest.approx(ratio)

    def test_retuning_sets_the_new_token_ratio(self) -> None:
        control = make().control
        control.retune({"new_token_ratio": 0.25})
        assert control.stats().new_token_ratio == 0.25 == control.tunables()["new_token_ratio"]

    def test_retuned_settings_apply_to_the_next_step(self) -> None:
        engine = make(chunked_prefill_size=16, adaptive_chunk_rows=0)
        engine.submit(0, [1] * 4, max_new_tokens=60, ignore_eos=True)
        for _ in range(3):
            engine.turn()
        engine.submit(1, range(100), max_new_tokens=2)
        engine.turn()
        engine.control.retune({"chunked_prefill_size": 33, "enable_mixed_chunk": True, "max_queued_requests": 0})
        engine.turn()
        assert engine.plans[-2].num_tokens.tolist() == [16]
        assert engine.plans[-1].num_tokens.tolist() == [32, 1]
        engine.submit(2, [1] * 4, max_new_tokens=1)
        engine.drain()
        assert engine.finishes[2].error is ErrorCode.QUEUE_FULL

    def test_retuning_changes_no_output(self) -> None:
        engine = make(num_pages=40)
        settings: list[dict[str, Any]] = [
            {"schedule_policy": "lpm", "enable_mixed_chunk": True},
            {"chunked_prefill_size": 0, "max_running_requests": 1},
            {"chunked_prefill_size": 4, "retract_interval": 2, "max_running_requests": 8},
            {"enable_mixed_chunk": False, "max_extend_steps": 1, "prefill_max_requests": 1},
            {"schedule_policy": "dfs-weight", "adaptive_chunk_rows": 1, "new_token_ratio": 0.0},
        ]
        for handle in range(25):
            engine.submit(handle, [handle % 3] * (5 + handle), max_new_tokens=30)
            engine.control.retune(settings[handle % 5])
            for _ in range(3):
                engine.turn()
        engine.control.retune({"retract_interval": 0, "chunked_prefill_size": 16, "max_running_requests": 8})
        engine.drain()
        for handle in range(25):
            engine.check_answer(handle)


class TestStats:
    def test_stats_count_requests_tokens_and_pages(self) -> None:
        engine = make()
        for handle in range(2):
            engine.submit(handle, [1] * 30, max_new_tokens=5, ignore_eos=True)
            engine.drain()
        engine.submit(2, [2] * 30, max_new_tokens=5)
        engine.abort(2)
        stats = engine.core.stats()
        assert (stats.requests_total, stats.aborts_total) == (3, 1)
        assert (stats.prompt_tokens_total, stats.cached_tokens_total, stats.generated_tokens_total) == (60, 28, 10)
        assert stats.pages_free + stats.pages_cached + stats.pages_leased == engine.config.num_pages


MOST = (1 << 63) - 1  # largest int64, the type of tunables in the messages
MOST_S = 1e300


def retuned(**changes: Any) -> Engine:
    """Returns an engine with priorities on, whose tunables are changed before the first request."""
    engine = make(enable_priority_scheduling=True)
    engine.control.retune(changes)
    return engine


def modes(engine: Engine) -> str:
    """Returns the first letter of the mode of each step after the first three.

    After these three steps, one row decodes, and a prompt of seven chunks arrives.
    """
    engine.submit(0, [1] * 4, max_new_tokens=60, ignore_eos=True)
    for _ in range(3):
        engine.turn()
    engine.submit(1, range(100, 200), max_new_tokens=2)
    engine.drain()
    return "".join(plan.mode.name[0] for plan in engine.plans[3:])


class TestEndsOfRanges:
    """At the ends of its range, each tunable has the effect that docs/reference/control.md describes."""

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            (name, value)
            for name, limits in RANGES.items()
            if limits is not None
            for value in (limits.least, min(limits.most, MOST_S if name.endswith(("_s", "ness")) else MOST))
        ],
        ids=lambda value: str(value) if isinstance(value, str) else ("least" if abs(value) <= 256 else "most"),
    )
    def test_requests_finish_when_a_setting_has_the_smallest_or_largest_allowed_value(self, name: str, value: float) -> None:
        engine, limits = make(enable_priority_scheduling=True), RANGES[name]
        assert limits is not None
        value = max(value, 4) if name == "max_prefill_tokens" else min(value, 8) if name == "max_running_requests" else value
        kind = type(engine.control.tunables()[name])
        engine.control.retune({name: kind(value) if not limits.above or value else 5e-324})
        for handle in range(6):
            engine.submit(handle, [handle % 3] * (5 + 9 * handle), max_new_tokens=6, ignore_eos=True, priority=handle % 2)
            engine.turn()
        engine.drain()
        refused = name == "max_queued_requests" and not value
        assert {finish.error for finish in engine.finishes.values()} == {ErrorCode.QUEUE_FULL if refused else ErrorCode.NONE}
        for handle in range(6):
            engine.check_answer(handle)

    def test_queue_with_limit_0_accepts_only_resumed_requests(self) -> None:
        engine = retuned(max_queued_requests=0)
        engine.submit(0, [1] * 4, max_new_tokens=1)
        engine.submit(1, [1] * 4, max_new_tokens=1, priority=9)
        context = engine.submitted[0].prompt_ids
        engine.submit(2, context, output=[hashed_token(context, engine.config.vocab_size)], max_new_tokens=3, ignore_eos=True)
        engine.drain()
        assert [engine.finishes[handle].error for handle in range(3)] == [
            ErrorCode.QUEUE_FULL,
            ErrorCode.QUEUE_FULL,
            ErrorCode.NONE,
        ]
        assert engine.core.stats().refuses_new

    def test_running_requests_continue_when_the_queue_limit_becomes_0(self) -> None:
        engine = make()
        engine.submit(0, [1] * 4, max_new_tokens=20, ignore_eos=True)
        for _ in range(4):
            engine.turn()
        engine.control.retune({"max_queued_requests": 0})
        engine.drain()
        assert engine.finishes[0].reason is FinishReason.LENGTH
        engine.control.retune({"max_queued_requests": 1})
        engine.submit(1, [1] * 4, max_new_tokens=1)
        engine.drain()
        assert engine.finishes[1].reason is FinishReason.LENGTH and not engine.core.stats().refuses_new

    @pytest.mark.parametrize(("threshold", "preempted"), [(0, 1), (MOST, 0)])
    def test_priority_threshold_limits_preemption(self, threshold: int, preempted: int) -> None:
        engine = retuned(priority_preemption_threshold=threshold, max_running_requests=1)
        engine.submit(0, [1] * 4, max_new_tokens=20, ignore_eos=True)
        for _ in range(3):
            engine.turn()
        engine.submit(1, [2] * 4, max_new_tokens=2, priority=9)
        engine.drain()
        assert engine.core.stats().preemptions_total == preempted

    @pytest.mark.parametrize(("conservativeness", "ratio"), [(5e-324, 0.0), (1e300, 1.0)])
    def test_new_token_ratio_is_0_or_1_when_conservativeness_is_extreme(self, conservativeness: float, ratio: float) -> None:
        assert retuned(schedule_conservativeness=conservativeness).core.stats().new_token_ratio == pytest.approx(ratio)

    @pytest.mark.parametrize(("size", "steps"), [(0, 1), (-1, 1), (4, 25), (MOST, 1)])
    def test_chunked_prefill_size_cuts_a_prompt_unless_the_size_is_0(self, size: int, steps: int) -> None:
        engine = retuned(chunked_prefill_size=size)
        engine.submit(0, range(100), max_new_tokens=1)
        engine.drain()
        assert len(engine.plans) == steps
        assert engine.control.tunables()["chunked_prefill_size"] == max(size, 0)

    @pytest.mark.parametrize(("tokens", "steps"), [(4, 25), (MOST, 1)])
    def test_max_prefill_tokens_limits_the_prompt_tokens_of_a_step(self, tokens: int, steps: int) -> None:
        engine = retuned(chunked_prefill_size=100, max_prefill_tokens=tokens)
        engine.submit(0, range(100), max_new_tokens=1)
        engine.drain()
        assert len(engine.plans) == steps

    @pytest.mark.parametrize(
        ("changes", "seen"),
        [
            ({"max_extend_steps": 0}, "EEEEEEE"),
            ({"max_extend_steps": 1}, "EDEDED"),
            ({"max_extend_steps": MOST}, "EEEEEEE"),
            ({"max_extend_steps": 0, "adaptive_chunk_s": 3600.0}, "EEEEEEE"),
            ({"max_extend_steps": 0, "adaptive_chunk_s": 0.0}, "EEEEEEE"),
        ],
    )
    def test_decode_rows_run_between_extend_steps_unless_max_extend_steps_is_0(self, changes: dict[str, Any], seen: str) -> None:
        assert seen in modes(retuned(chunked_prefill_size=16, **({"adaptive_chunk_rows": 0} | changes)))

    @pytest.mark.parametrize(("rows", "longest"), [(0, 16), (1, 8), (MOST, 12)])
    def test_adaptive_chunk_rows_shortens_chunks_unless_the_setting_is_0(self, rows: int, longest: int) -> None:
        engine = retuned(chunked_prefill_size=16, adaptive_chunk_rows=rows, adaptive_chunk_s=0.0)
        modes(engine)
        assert max(int(plan.num_tokens.max()) for plan in engine.plans) == longest

    @pytest.mark.parametrize(("limit", "rows"), [(0, [6]), (1, [1] * 6), (MOST, [6])])
    def test_step_admits_prompts_up_to_the_limit(self, limit: int, rows: list[int]) -> None:
        engine = retuned(prefill_max_requests=limit, chunked_prefill_size=0)
        for handle in range(6):
            engine.submit(handle, [handle] * 4, max_new_tokens=9, ignore_eos=True)
        engine.drain()
        assert [plan.num_extend for plan in engine.plans if plan.num_extend] == rows

    @pytest.mark.parametrize("name", ["waiting_timeout_s", "running_timeout_s"])
    @pytest.mark.parametrize(("seconds", "error"), [(0.0, ErrorCode.NONE), (0.001, ErrorCode.TIMEOUT), (MOST_S, ErrorCode.NONE)])
    def test_timeout_ends_a_waiting_request_unless_the_timeout_is_0(self, name: str, seconds: float, error: ErrorCode) -> None:
        engine = retuned(max_running_requests=1, **{name: seconds})
        for handle in range(2):
            engine.submit(handle, [handle] * 4, max_new_tokens=9, ignore_eos=True)
        engine.drain()
        assert engine.finishes[1].error is error

    @pytest.mark.parametrize(("capacity", "refused"), [(1, True), (MOST, False)])
    def test_session_capacity_limits_the_tokens_of_a_turn(self, capacity: int, refused: bool) -> None:
        engine = retuned(session_capacity=capacity)
        assert engine.open_session("s")
        engine.submit(0, [1] * 4, session=SessionTurn("s"), max_new_tokens=2)
        engine.drain()
        assert (engine.finishes[0].error is ErrorCode.INVALID_ARGUMENT) == refused

    @pytest.mark.parametrize(("seconds", "open_sessions"), [(5e-324, 0), (MOST_S, 1)])
    def test_session_ends_when_the_lifetime_is_over(self, seconds: float, open_sessions: int) -> None:
        engine = retuned(session_ttl_s=seconds)
        assert engine.open_session("s")
        engine.now += 1e6
        engine.turn()
        assert engine.core.stats().num_sessions == open_sessions

    def test_new_sessions_are_refused_and_open_sessions_stay_when_max_sessions_is_0(self) -> None:
        engine = make()
        assert engine.open_session("s")
        engine.control.retune({"max_sessions": 0})
        assert not engine.open_session("t")
        engine.submit(0, [1] * 4, session=SessionTurn("s"), max_new_tokens=2)
        engine.drain()
        assert engine.finishes[0].error is ErrorCode.NONE

    @pytest.mark.parametrize(("every", "is_retracted"), [(0, False), (1, True), (MOST, False)])
    def test_retract_interval_retracts_requests_unless_the_interval_is_0(self, every: int, is_retracted: bool) -> None:
        engine = retuned(retract_interval=every)
        for handle in range(3):
            engine.submit(handle, [handle] * 4, max_new_tokens=9, ignore_eos=True)
        engine.drain()
        assert (engine.core.stats().retractions_total > 0) == is_retracted
