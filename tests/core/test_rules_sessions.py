"""Rules for sessions: turns that build on each other, with their KV cached between turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.config import EvictionPolicy
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason, SessionTurn, Submit
from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from rootstock_llm.services.worker.core.contracts.transfers import Tier
from tests.all_pairs import each_value
from tests.core.harness import Engine, slow
from tests.core.test_scheduler_basic import make


def opened(overlap: bool = True, capacity: int = 0, ttl_s: float = 0.0, **changes: Any) -> Engine:
    engine = make(overlap, **changes)
    assert engine.open_session("s", capacity, ttl_s)
    return engine


def say(engine: Engine, handle: int, prompt: list[int], **turn: Any) -> list[int]:
    """Runs one turn of session `s` to its end. Returns the prompt with the context of earlier turns."""
    engine.submit(handle, prompt, session=SessionTurn("s", **turn), max_new_tokens=6, ignore_eos=True)
    whole = engine.core.queues.by_key.get((0, handle))
    tokens = whole.prompt_ids.tolist() if whole is not None else []
    engine.drain()
    engine.check_answer(handle)
    return tokens


def say_until(engine: Engine, handle: int, name: str, prompt: list[int], **turn: Any) -> None:
    """Runs one turn of session `s` with the request id `name` to its end, while other requests continue."""
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    message = Submit(0, handle, name, np.array(prompt, dtype=np.int32), params, True, session=SessionTurn("s", **turn))
    engine.submitted[handle] = message
    engine.core.submit(message, engine.now)
    while handle not in engine.finishes:
        engine.turn()


def refused(engine: Engine, handle: int) -> str:
    finish = engine.finishes[handle]
    assert finish.error is ErrorCode.INVALID_ARGUMENT
    return finish.message


WITH_AND_WITHOUT_OVERLAP = pytest.mark.parametrize("overlap", [True, False])


class TestTurns:
    @pytest.mark.by_day(one_in=2)
    @WITH_AND_WITHOUT_OVERLAP
    def test_turn_appends_to_the_latest_turn(self, overlap: bool) -> None:
        engine = opened(overlap)
        first = say(engine, 0, [1] * 9)
        second = say(engine, 1, [2, 3])
        third = say(engine, 2, [4])
        assert first == [1] * 9
        assert second == [*first, *engine.outputs[0], 2, 3]
        assert third == [*second, *engine.outputs[1], 4]

    @pytest.mark.by_day(one_in=2, seed=2)
    @WITH_AND_WITHOUT_OVERLAP
    def test_turn_finds_the_pages_of_earlier_turns_in_the_cache(self, overlap: bool) -> None:
        engine = opened(overlap)
        first = say(engine, 0, [1] * 9)
        say(engine, 1, [2, 3])
        computed = len(first) + 6 - 1
        assert engine.finishes[1].cached_tokens == computed // 4 * 4

    def test_turn_branches_from_an_earlier_turn(self) -> None:
        engine = opened(True)
        first = say(engine, 0, [1] * 9)
        say(engine, 1, [2, 3])
        branch = say(engine, 2, [5, 6], parent="r0")
        assert branch == [*first, *engine.outputs[0], 5, 6]
        assert say(engine, 3, [7], parent="r1")[-2:] == [engine.outputs[1][-1], 7]

    @each_value(offset=[0, 9, 99], overlap=[True, False])
    def test_offset_limits_the_tokens_that_a_turn_keeps_of_the_parent_turn(self, overlap: bool, offset: int) -> None:
        engine = opened(overlap)
        first = say(engine, 0, [1] * 9)
        context = [*first, *engine.outputs[0]]
        assert say(engine, 1, [5], offset=offset) == [*context[:offset], 5]

    def test_turn_continues_only_the_parents_prompt_when_the_previous_output_is_dropped(self) -> None:
        engine = opened(False)
        say(engine, 0, [1] * 9)
        engine.submit(1, [5], session=SessionTurn("s", drop_previous_output=True), max_new_tokens=6, ignore_eos=True)
        assert engine.core.queues.by_key[0, 1].prompt_ids.tolist() == [1] * 9 + [5]

    def test_turn_with_replace_removes_all_turns_after_the_parent(self) -> None:
        engine = opened(True)
        for handle in range(3):
            say(engine, handle, [handle + 1] * 5)
        say(engine, 3, [9], parent="r0", replace=True)
        assert engine.core.stats().session_tokens == len(engine.contexts["s", "r3"]), (
            "the session has the tokens of r0 and of r3 only"
        )
        engine.submit(4, [1], session=SessionTurn("s", "r2"), max_new_tokens=6)
        engine.drain()
        assert "r2" in refused(engine, 4)
        say(engine, 5, [1], parent="r0")

    @pytest.mark.by_day(one_in=2)
    @WITH_AND_WITHOUT_OVERLAP
    def test_turn_is_correct_under_retraction(self, overlap: bool) -> None:
        engine = opened(overlap, retract_interval=2)
        for handle in range(4):
            say(engine, handle, [handle + 1] * 5)
        assert engine.core.stats().retractions_total > 4


class TestRefusals:
    @pytest.mark.parametrize(
        ("turn", "word"),
        [
            (SessionTurn("t"), "not open"),
            (SessionTurn("s", "r7"), "not exist"),
            (SessionTurn("s", "r1"), "still running"),
        ],
        ids=["no such session", "no such turn", "an unfinished turn"],
    )
    def test_turn_is_refused_when_the_session_or_the_parent_turn_is_missing(self, turn: SessionTurn, word: str) -> None:
        engine = opened()
        say(engine, 0, [1] * 5)
        engine.submit(1, [2] * 5, session=SessionTurn("s"), max_new_tokens=30, ignore_eos=True)
        engine.turn()
        engine.submit(2, [3], session=turn, max_new_tokens=3)
        engine.drain()
        assert word in refused(engine, 2)
        assert engine.finishes[1].reason is FinishReason.LENGTH

    def test_turn_with_an_empty_prompt_is_refused(self) -> None:
        engine = opened()
        engine.submit(0, [], session=SessionTurn("s"), max_new_tokens=3)
        engine.drain()
        assert "empty" in refused(engine, 0)

    @pytest.mark.parametrize(("length", "outputs"), [(19, 6), (20, 5), (24, 1), (25, 0)])
    def test_session_capacity_limits_the_tokens_of_all_turns(self, length: int, outputs: int) -> None:
        engine = opened(capacity=40)
        say(engine, 0, [1] * 9)  # 15 tokens with its output
        engine.submit(1, [2] * length, session=SessionTurn("s"), max_new_tokens=6, ignore_eos=True)
        engine.drain()
        if outputs:
            assert (engine.finishes[1].reason, engine.finishes[1].completion_tokens) == (FinishReason.LENGTH, outputs)
        else:
            assert "40 tokens" in refused(engine, 1)

    def test_session_capacity_is_reserved_for_running_turns(self) -> None:
        engine = opened(capacity=40)
        say(engine, 0, [1] * 9)
        engine.submit(1, [2] * 4, session=SessionTurn("s", "r0"), max_new_tokens=15, ignore_eos=True)
        engine.submit(2, [3] * 6, session=SessionTurn("s", "r0"), max_new_tokens=9, ignore_eos=True)
        engine.drain()
        assert engine.finishes[1].completion_tokens == 15
        assert "40 tokens" in refused(engine, 2)
        assert engine.core.stats().session_tokens == 34

    def test_session_capacity_counts_each_token_once(self) -> None:
        engine = opened(capacity=90)
        for handle in range(8):
            say(engine, handle, [handle + 1] * 5)
        assert engine.core.stats().session_tokens == 88

    def test_reopened_session_stores_no_turn_of_the_old_session(self) -> None:
        engine = opened()
        engine.submit(0, [1] * 5, session=SessionTurn("s"), max_new_tokens=20, ignore_eos=True)
        engine.turn()
        assert engine.core.close_session("s") and engine.open_session("s")
        engine.drain()
        assert engine.core.stats().session_tokens == 0

    def test_sessions_are_limited_by_max_sessions(self) -> None:
        engine = opened(max_sessions=2)
        assert engine.open_session("t") and not engine.open_session("u")
        assert engine.core.close_session("s") and engine.open_session("u")

    def test_second_session_with_the_same_name_is_refused(self) -> None:
        engine = opened()
        assert "already open" in engine.core.open_session("s", 0, 0.0, 0.0)
        assert not engine.core.close_session("t")


class TestLifetime:
    @pytest.mark.parametrize(("after", "is_open"), [(0.9, True), (1.1, False)])
    def test_session_expires_after_the_last_turn(self, after: float, is_open: bool) -> None:
        engine = opened(ttl_s=1.0)
        engine.now += 0.5
        say(engine, 0, [1] * 9)
        engine.now += after
        engine.turn()
        assert engine.core.stats().num_sessions == is_open

    def test_session_with_a_running_turn_does_not_expire(self) -> None:
        engine = opened(ttl_s=0.2)
        engine.submit(0, [1] * 9, session=SessionTurn("s"), max_new_tokens=60, ignore_eos=True)
        engine.drain()
        assert engine.now > 0.5 and engine.core.stats().num_sessions == 1

    def test_session_uses_the_configured_lifetime_by_default(self) -> None:
        engine = opened(session_ttl_s=1.0)
        engine.now += 1.5
        engine.turn()
        assert engine.core.stats().num_sessions == 0

    def test_closed_session_lets_a_running_turn_end_and_stores_no_turn(self) -> None:
        engine = opened()
        say(engine, 0, [1] * 9)
        engine.submit(1, [2] * 9, session=SessionTurn("s"), max_new_tokens=20, ignore_eos=True)
        engine.turn()
        assert engine.core.close_session("s")
        engine.check()
        engine.drain()
        assert engine.finishes[1].reason is FinishReason.LENGTH
        engine.check_answer(1)
        assert engine.core.stats().num_sessions == engine.core.stats().session_tokens == 0
        assert all(node.holds == 0 for node in engine.core.memory.tree.nodes())

    def test_reopened_session_starts_empty(self) -> None:
        engine = opened()
        engine.submit(0, [1] * 9, session=SessionTurn("s"), max_new_tokens=20, ignore_eos=True)
        engine.turn()
        engine.core.close_session("s")
        assert engine.open_session("s")
        engine.drain()
        assert say(engine, 1, [5]) == [5]

    @pytest.mark.parametrize(("capacity", "kept"), [(60, False), (100, True)], ids=["too little capacity", "enough capacity"])
    def test_turn_with_a_replaced_parent_is_stored_when_capacity_suffices(self, capacity: int, kept: bool) -> None:
        engine = opened(capacity=capacity)
        say(engine, 0, [1] * 20)
        say(engine, 1, [2, 3])
        engine.submit(2, [4], session=SessionTurn("s", parent="r1"), max_new_tokens=12, ignore_eos=True)
        engine.submit(3, [5], session=SessionTurn("s", parent="r0", replace=True), max_new_tokens=2, ignore_eos=True)
        engine.drain()
        assert [engine.finishes[handle].reason for handle in (2, 3)] == [FinishReason.LENGTH] * 2
        assert engine.core.stats().session_tokens == 26 + 3 + (47 if kept else 0)
        engine.submit(4, [6], session=SessionTurn("s", parent="r2"), max_new_tokens=1, ignore_eos=True)
        engine.drain()
        assert kept == (engine.finishes[4].reason is FinishReason.LENGTH)
        if not kept:
            assert refused(engine, 4) == "turn r2 of the session does not exist"

    def test_turn_keeps_the_tokens_of_a_replaced_parent_when_the_parents_name_is_reused(self) -> None:
        engine = opened()
        say(engine, 0, [1] * 20)
        parent = say(engine, 1, [2, 3] * 10)
        engine.submit(2, [4], session=SessionTurn("s", parent="r1"), max_new_tokens=40, ignore_eos=True)
        say_until(engine, 3, "x", [5], parent="r0", replace=True)
        say_until(engine, 4, "r1", [6], parent="r0")
        engine.drain()
        engine.submit(5, [7], session=SessionTurn("s", parent="r2"), max_new_tokens=1, ignore_eos=True)
        whole = engine.core.queues.by_key[0, 5].prompt_ids.tolist()
        engine.drain()
        assert whole == [*parent, *engine.outputs[1], 4, *engine.outputs[2], 7]

    @pytest.mark.by_day(one_in=2, seed=5)
    @pytest.mark.parametrize("turns", [0, 1, 3, 4])
    def test_aborted_turn_leaves_the_session_unchanged(self, turns: int) -> None:
        engine = opened(chunked_prefill_size=4)
        first = say(engine, 0, [1] * 9)
        before = engine.core.stats().session_tokens
        engine.submit(1, [2] * 9, session=SessionTurn("s", replace=True), max_new_tokens=20, ignore_eos=True)
        for _ in range(turns):
            engine.turn()
        engine.abort(1)
        engine.drain()
        assert engine.core.stats().session_tokens == before
        assert say(engine, 2, [5]) == [*first, *engine.outputs[0], 5]


class TestMemory:
    @pytest.mark.by_day(one_in=2, seed=2)
    @pytest.mark.parametrize("policy", EvictionPolicy)
    def test_session_pages_are_evicted_last(self, policy: EvictionPolicy) -> None:
        engine = opened(eviction_policy=policy, num_pages=32)
        say(engine, 0, [1] * 16)
        held = np.array(engine.contexts["s", "r0"][:20], dtype=np.int32).tobytes()
        for handle in range(1, 12):
            engine.submit(handle, [handle + 50] * 40, max_new_tokens=4, ignore_eos=True)
            engine.drain()
        assert engine.core.stats().evicted_pages_total > 50
        assert engine.core.memory.tree.peek("", held)[1] == 5, "all whole pages of the turn are cached"

    def test_session_pages_are_evicted_normally_when_another_tier_has_copies(self) -> None:
        engine = slow(opened(num_pages=32, host_pages=400, page_bytes=64))
        say(engine, 0, [1] * 16)
        held = np.array(engine.contexts["s", "r0"][:20], dtype=np.int32).tobytes()
        for handle in range(1, 12):
            engine.submit(handle, [handle + 50] * 40, max_new_tokens=4, ignore_eos=True)
            engine.drain()
        assert engine.core.memory.tree.peek("", held)[1] == 0 and engine.core.stats().lost_pages_total == 0
        say(engine, 20, [5])
        assert engine.finishes[20].cached_from[Tier.HOST] == 20, "the turn's pages come back from the host"

    def test_open_session_does_not_delay_the_admission_of_other_requests(self) -> None:
        engine = opened(num_pages=16)
        say(engine, 0, [1] * 30)
        engine.submit(1, [2] * 50, max_new_tokens=8, ignore_eos=True)
        engine.drain()
        assert engine.finishes[1].reason is FinishReason.LENGTH
        assert say(engine, 2, [5])[-1] == 5, "the turn continues although its pages were evicted"

    def test_closed_session_releases_the_holds_on_cached_pages(self) -> None:
        engine = opened()
        say(engine, 0, [1] * 30)
        assert any(node.holds for node in engine.core.memory.tree.nodes())
        engine.core.close_session("s")
        engine.check()
        assert not any(node.holds for node in engine.core.memory.tree.nodes())
