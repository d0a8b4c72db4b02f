"""Rules for the expert distribution record: the counted rows of each sparse layer and expert."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.experts import ExpertDistribution, ExpertShape
from rootstock_llm.services.worker.exec.fake import fake_experts
from tests.all_pairs import each_value
from tests.core.harness import Engine
from tests.core.test_scheduler_basic import make

PROMPT = list(range(100, 150))
SHAPE = ExpertShape((1, 2, 5), 8, 2)


def sparse(overlap: bool = True, **changes: Any) -> Engine:
    """Returns an engine whose fake model has experts."""
    return make(overlap, experts=SHAPE, **changes)


def recorded(engine: Engine) -> ExpertDistribution:
    found = engine.control.expert_distribution()
    assert found is not None
    return found


def counts_of(engine: Engine, handle: int, first: int = 0) -> np.ndarray[Any, Any]:
    """Returns the counts of the tokens that a complete request has computed from position `first` on."""
    tokens = np.array([*engine.submitted[handle].prompt_ids, *engine.outputs[handle][:-1]], dtype=np.int32)
    routed = fake_experts(tokens[first:], first, SHAPE)
    return np.array([np.bincount(routed[:, layer].ravel(), minlength=SHAPE.num_experts) for layer in range(len(SHAPE.layers))])


class TestRecord:
    @pytest.mark.by_day(one_in=2, seed=3)
    @each_value(overlap=[True, False], chunk=[0, 4, 16], drafts=[0, 3])
    def test_record_counts_the_experts_of_every_computed_token_once(self, overlap: bool, chunk: int, drafts: int) -> None:
        engine = sparse(overlap, chunked_prefill_size=chunk, max_drafts=drafts, enable_mixed_chunk=True)
        engine.control.start_expert_record()
        engine.submit(0, PROMPT, max_new_tokens=20, ignore_eos=True)
        engine.submit(1, [7] * 9, max_new_tokens=13, ignore_eos=True)
        engine.drain()
        found = recorded(engine)
        assert found.rows.tolist() == (counts_of(engine, 0) + counts_of(engine, 1)).tolist()
        assert found.num_tokens == 50 + 19 + 9 + 12
        assert found.rows.sum() == found.num_tokens * SHAPE.ids_per_token
        assert bool(drafts) == (engine.core.stats().drafted_tokens_total > engine.core.stats().accepted_tokens_total)

    def test_record_does_not_count_tokens_with_a_prefix_hit(self) -> None:
        engine = sparse()
        engine.submit(9, PROMPT, max_new_tokens=1)
        engine.drain()
        engine.control.start_expert_record()
        engine.submit(0, PROMPT, max_new_tokens=4, ignore_eos=True)
        engine.drain()
        assert engine.finishes[0].cached_tokens == 48
        assert recorded(engine).rows.tolist() == counts_of(engine, 0, first=48).tolist()

    def test_record_has_only_the_steps_between_start_and_stop(self) -> None:
        engine = sparse(overlap=False)
        engine.submit(0, PROMPT[:4], max_new_tokens=30, ignore_eos=True)
        for _ in range(5):
            engine.turn()
        assert engine.control.expert_distribution() is None
        assert not any(plan.counts_experts for plan in engine.plans), "steps without a record count no experts"
        engine.control.start_expert_record()
        for _ in range(7):
            engine.turn()
        engine.control.stop_expert_record()
        engine.drain()
        found = recorded(engine)
        assert found.num_tokens == 7 and not found.is_running
        assert [plan.counts_experts for plan in engine.plans].count(True) == 7

    def test_record_has_the_step_that_was_in_flight_when_it_ended(self) -> None:
        engine = sparse()
        engine.control.start_expert_record()
        engine.submit(0, PROMPT[:4], max_new_tokens=1)
        engine.turn()
        engine.control.stop_expert_record()
        assert recorded(engine).num_tokens == 0
        engine.drain()
        assert recorded(engine).num_tokens == 4

    def test_second_record_begins_with_counts_of_zero(self) -> None:
        engine = sparse()
        engine.control.start_expert_record()
        engine.submit(0, PROMPT, max_new_tokens=4, ignore_eos=True)
        engine.drain()
        before = recorded(engine)
        engine.control.stop_expert_record()
        engine.control.start_expert_record()
        assert recorded(engine).num_tokens == 0 == recorded(engine).rows.sum()
        assert before.num_tokens == 53, "a distribution is a copy"

    def test_balancedness_is_the_mean_share_of_the_largest_count(self) -> None:
        engine = sparse()
        assert engine.core.stats().expert_balancedness == 0.0
        engine.control.start_expert_record()
        engine.submit(0, PROMPT[:3], max_new_tokens=1)
        engine.drain()
        rows = counts_of(engine, 0)
        wanted = sum(layer.sum() / SHAPE.num_experts / layer.max() for layer in rows) / len(SHAPE.layers)
        assert engine.core.stats().expert_balancedness == pytest.approx(wanted)
        assert 0 < wanted < 1
