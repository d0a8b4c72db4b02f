"""Rules for draft tokens: the requests that get them, and their counts (docs/design/scheduler.md#rows-of-several-tokens)."""

from __future__ import annotations

import numpy as np
import pytest

from rootstock_llm.services.worker.core.planning.draft_controller import MOST_LIMITED
from tests.core.harness import Engine, small

PROMPT, NEW_TOKENS = list(range(100, 107)), 24


def guessing(overlap: bool, **changes: object) -> Engine:
    return small(overlap, max_drafts=3, speculative_adaptive=False, num_pages=40, **changes)


def sampled_runs(engine: Engine) -> int:
    return sum(int(plan.sample.sum()) for plan in engine.plans)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("retract_interval", [0, 3])
def test_draft_tokens_of_a_prediction_are_counted_once(overlap: bool, retract_interval: int) -> None:
    """A draft token counts once even if its request was retracted while the step with this token was in flight."""
    told = guessing(overlap)
    told.submit(0, PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    told.drain()
    said = told.outputs[0]
    for wrong in (range(0), range(8, 14), range(NEW_TOKENS)):
        engine = guessing(overlap, retract_interval=retract_interval)
        prediction = [(token + 1) % 1000 if place in wrong else token for place, token in enumerate(said)]
        engine.submit(0, PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True, prediction=prediction)
        engine.drain()
        engine.check_answer(0)
        verified = engine.finishes[0].verified
        assert engine.predicted == {0: verified} and not told.predicted
        assert verified.accepted == NEW_TOKENS - sampled_runs(engine), (
            "all tokens of a verification but the last are draft tokens"
        )
        assert verified.accepted >= verified.right_predicted
        assert (verified.right_predicted > 0) == (len(wrong) < NEW_TOKENS)
        assert (verified.predicted > verified.right_predicted) == (len(wrong) > 0)
        assert (engine.finishes[0].retractions > 0) == (retract_interval > 0)


def test_draft_tokens_after_the_end_of_the_output_are_not_counted() -> None:
    told = guessing(overlap=True)
    told.submit(0, PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    told.drain()
    said = told.outputs[0]
    engine = guessing(overlap=True)
    engine.submit(0, PROMPT, max_new_tokens=NEW_TOKENS, stop_token_ids=(said[9],), prediction=said)
    engine.drain()
    engine.check_answer(0)
    verified = engine.finishes[0].verified
    assert (verified.rows, verified.drafted, verified.accepted) == (3, 9, 6), (
        "the prompt gives 1 token, two steps give 4 each, and the last step gives the stop token"
    )
    assert (verified.predicted, verified.right_predicted) == (9, 6)


def test_request_without_speculation_gets_no_draft_tokens() -> None:
    engine = guessing(overlap=True)
    engine.submit(0, PROMPT, max_new_tokens=NEW_TOKENS, ignore_eos=True, speculative=False, prediction=PROMPT)
    engine.submit(1, PROMPT[1:], max_new_tokens=NEW_TOKENS, ignore_eos=True, prediction=PROMPT)
    engine.drain()
    admitted = [slot for plan in engine.plans for slot in plan.admitted]
    assert [(len(slot.history), len(slot.prediction)) for slot in admitted] == [(0, 0), (len(PROMPT) - 1, len(PROMPT))]
    without = [plan.drafts[plan.slots == admitted[0].slot] for plan in engine.plans if len(plan.drafts)]
    assert without and not np.concatenate(without).any()
    assert engine.finishes[0].verified.rows == 0 < engine.finishes[1].verified.rows
    engine.check_answer(0)
    engine.check_answer(1)


def always_wrong(engine: Engine) -> Engine:
    said = engine.executor._next_token
    engine.executor._draft = lambda context, number: np.full(number, said(context, 1000) + 1, dtype=np.int32) % 1000
    return engine


def test_draft_model_drafts_for_few_requests_when_drafts_are_rejected() -> None:
    """Requests without draft tokens cost the drafter no work. A drafter without a model drafts for all requests."""
    for by_model in (True, False):
        engine = always_wrong(small(True, max_drafts=3, num_pages=64, drafts_by_model=by_model))
        handles = range(80)
        for handle in handles:
            tokens = NEW_TOKENS - handle % 5  # unequal lengths, so that later requests begin in different steps
            engine.submit(handle, [*PROMPT, handle], max_new_tokens=tokens, ignore_eos=True, stream=False)
        engine.drain()
        for handle in handles:
            engine.check_answer(handle)
        admitted = [slot for plan in engine.plans for slot in plan.admitted]
        assert all(slot.drafted_for for slot in admitted[: engine.config.max_running_requests])
        late = admitted[len(admitted) // 2 :]
        few, drafting = len(late) * MOST_LIMITED // engine.config.max_running_requests, sum(slot.drafted_for for slot in late)
        assert few <= drafting <= few * 3 // 2 if by_model else drafting == len(late)
        assert all(len(slot.history) == (len(PROMPT) + 1 if slot.drafted_for else 0) for slot in admitted)
