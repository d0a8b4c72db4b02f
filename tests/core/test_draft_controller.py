"""The chosen number of draft tokens, for simulated costs of steps and simulated acceptance of draft tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, ForwardMode
from rootstock_llm.services.worker.core.planning.draft_controller import (
    CROWDED,
    FORGET_AFTER,
    MISSES,
    MOST_LIMITED,
    MOST_PAUSE,
    PROBE_EVERY,
    PROBE_EVERY_FUTILE,
    DraftController,
)
from tests.core.plans import decode_plan

Cost = Callable[[int, int], float]  # seconds of a step, by its rows and the draft tokens of each row


def bound_by_weights(rows: int, guesses: int) -> float:
    return 1.0 + 0.01 * rows * (1 + guesses)


def bound_by_tokens(rows: int, guesses: int) -> float:
    return 0.05 + 1.0 * rows * (1 + 1.1 * guesses)


def costly_drafts(rows: int, guesses: int) -> float:
    """Returns the seconds of a step. Each draft token per row adds a third of the time of a step without draft tokens."""
    return 1.0 + 0.01 * rows * (1 + guesses) + 0.33 * guesses


class World:
    """Rows with a simulated drafter, whose draft tokens are accepted with a given probability.

    A row with a negative probability gets no draft tokens from the drafter.
    """

    def __init__(
        self, chances: list[float], cost: Cost, most: int = 7, seed: int = 3, asking: float = 1.0, by_model: bool = False
    ) -> None:
        """Admits one request per row.

        Args:
            chances: probability of acceptance, by row.
            cost: seconds of a step.
            most: largest number of draft tokens of a row.
            seed: seed of the random draws.
            asking: factor on the seconds of a step for which the drafter ran but proposed nothing.
            by_model: whether the drafter is a draft model, so that drafting can be limited to a few requests.
        """
        self.chances, self._cost, self._rng, self._asking = chances, cost, random.Random(seed), asking
        self.controller = DraftController(len(chances), most, by_model=by_model)
        self.slots, self._most = np.arange(len(chances)), np.full(len(chances), most)
        self._flight: tuple[BatchPlan, np.ndarray, np.ndarray, float] | None = None
        self.tokens = self.seconds = 0.0
        self.admit(self._most.tolist())

    def admit(self, most: list[int]) -> None:
        """Begins another request in each slot. `most` has the largest number of draft tokens of each request."""
        self._most = np.array(most)
        for slot in self.slots.tolist():
            self.controller.begin(slot)

    def step(self) -> np.ndarray:
        """Plans a step, then commits the step before it. Returns the planned draft tokens of each row."""
        drafts = self.controller.choose(self.slots, self._most)
        right = np.array([self._right(chance, int(count)) for chance, count in zip(self.chances, drafts, strict=True)])
        drafted = np.where(np.array(self.chances) < 0, 0, drafts)
        asked = drafts.any() and not drafted.any()
        seconds = self._cost(len(self.slots), int(drafted.max())) * (self._asking if asked else 1.0)
        self.tokens, self.seconds = self.tokens + len(self.slots) + right.sum(), self.seconds + seconds
        if self._flight is not None:
            plan, guessed, accepted, took = self._flight
            rows = np.flatnonzero(plan.drafts)
            self.controller.learn(plan, self.slots[rows], guessed[rows], accepted[rows], took)
        self._flight = (replace(decode_plan(len(self.slots)), drafts=drafts.astype(np.int32)), drafted, right, seconds)
        return drafts

    def steps(self, count: int) -> np.ndarray:
        """Runs `count` steps and returns their planned draft tokens as int64[count, rows]."""
        return np.array([self.step() for _ in range(count)])

    def rate(self, count: int) -> float:
        """Returns the tokens per second of the next `count` steps."""
        tokens, seconds = self.tokens, self.seconds
        self.steps(count)
        return (self.tokens - tokens) / (self.seconds - seconds)

    def _right(self, chance: float, most: int) -> int:
        for place in range(most):
            if self._rng.random() >= chance:
                return place
        return most


def plain_rate(rows: int, cost: Cost) -> float:
    return rows / cost(rows, 0)


@pytest.mark.parametrize(
    ("chance", "cost", "lowest", "highest"),
    [
        (1.0, bound_by_weights, 7, 7),
        (0.9, bound_by_weights, 4, 7),
        (0.5, costly_drafts, 0, 2),
        (0.9, costly_drafts, 1, 4),
        (1.0, bound_by_tokens, 0, 0),
    ],
    ids=["cheap and right", "cheap and mostly right", "dear and half right", "dear and mostly right", "bound by tokens"],
)
def test_draft_controller_chooses_the_fastest_number_of_draft_tokens(
    chance: float, cost: Cost, lowest: int, highest: int
) -> None:
    world = World([chance], cost)
    world.steps(200)
    assert lowest <= np.median(world.steps(200)) <= highest


@pytest.mark.by_day(one_in=3)
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_draft_controller_is_as_fast_as_plain_decoding_when_all_drafts_are_rejected(rows: int) -> None:
    for cost in (bound_by_weights, bound_by_tokens, costly_drafts):
        world = World([0.0] * rows, cost)
        world.steps(300)
        assert world.rate(2000) >= 0.97 * plain_rate(rows, cost)


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_draft_controller_is_as_fast_as_plain_decoding_when_most_drafts_are_accepted(rows: int) -> None:
    for cost in (bound_by_weights, bound_by_tokens, costly_drafts):
        world = World([0.8] * rows, cost)
        world.steps(300)
        assert world.rate(2000) >= 0.98 * plain_rate(rows, cost)


@pytest.mark.parametrize("cost", [bound_by_weights, costly_drafts])
def test_draft_controller_resumes_drafting_within_100_steps_when_drafts_become_correct(cost: Cost) -> None:
    world = World([0.0], cost)
    world.steps(500)
    world.chances = [1.0]
    begun = np.flatnonzero(world.steps(100)[:, 0] >= 2)
    assert len(begun) and (world.steps(50)[:, 0] >= 2).mean() > 0.9


def test_draft_controller_pauses_only_rows_with_rejected_drafts() -> None:
    world = World([1.0, 0.0], bound_by_weights)
    world.steps(200)
    found = world.steps(200)
    assert (found[:, 0] >= 4).mean() > 0.9
    assert (found[:, 1] > 0).sum() <= 200 // (MOST_PAUSE // 2)


def test_draft_controller_resets_a_slot_for_another_request() -> None:
    world = World([0.0], bound_by_weights)
    world.steps(500)
    world.controller.begin(0)
    assert world.step()[0] > 0


def test_draft_controller_drafts_rarely_when_drafting_is_always_too_expensive() -> None:
    world = World([1.0] * 16, bound_by_tokens)
    world.steps(200)
    assert (world.steps(1000).max(1) > 0).sum() <= 1000 // PROBE_EVERY // 2


def test_draft_controller_rarely_calls_a_slow_drafter_that_proposes_nothing() -> None:
    """An n-gram drafter proposes nothing for a text without repetition. Drafting must begin soon after a repetition."""
    world = World([-1.0, -1.0], lambda rows, guesses: 1.3 if guesses else 1.0, asking=1.3)
    world.steps(100)
    assert (world.steps(1000).max(axis=1) > 0).mean() <= 2 / PROBE_EVERY
    world.chances = [0.9, 0.9]
    assert world.steps(2 * PROBE_EVERY)[-1].min() >= 2


@pytest.mark.parametrize("cost", [bound_by_weights, costly_drafts])
def test_draft_controller_always_calls_a_drafter_whose_empty_proposals_take_no_time(cost: Cost) -> None:
    """The cost of a step in which the drafter proposes nothing must not count as the cost of draft tokens."""
    world = World([0.9], cost)
    for _ in range(20):
        world.chances = [0.9]
        world.steps(20)
        world.chances = [-1.0]
        world.steps(100)
    assert (world.steps(100) > 0).all()
    world.chances = [0.9]
    assert (world.steps(10)[1:] > 0).all()


def test_draft_controller_drafts_for_a_new_request_after_empty_proposals_for_an_earlier_one() -> None:
    """A drafter that uses predictions proposes nothing before the output begins. Results of earlier requests must not count."""
    world = World([-1.0], costly_drafts, asking=1.05)
    world.steps(500)
    world.controller.begin(0)
    assert (world.steps(5) > 0).all()
    world.chances = [1.0]
    assert (world.steps(40)[20:] >= 4).all()


def rejected_world(cost: Cost, by_model: bool = True, rows: int = MOST_LIMITED + 1, most: int = 7) -> World:
    """Returns a world after many requests whose draft tokens were all rejected. If `by_model`, drafting is limited."""
    world = World([0.0] * rows, cost, most, by_model=by_model)
    for _ in range(20):
        world.steps(100)
        for slot in world.slots.tolist():
            world.controller.begin(slot)
    assert world.controller.is_limited is by_model
    return world


def test_draft_controller_limits_a_draft_model_when_drafts_are_rejected() -> None:
    """A drafter without a model is not limited, because it takes no time in steps without draft tokens."""
    for by_model in (False, True):
        world = rejected_world(bound_by_weights, by_model)
        world.chances = [1.0] * len(world.chances)
        world.steps(100)
        assert not world.controller.is_limited, "several accepted draft tokens in a row end the limit"


def test_draft_controller_admits_another_request_at_the_limit_only_after_repeated_misses() -> None:
    world = rejected_world(bound_by_weights)
    drafting = world.slots.tolist()
    assert not world.controller.may_add_request(drafting[:MOST_LIMITED])
    assert world.controller.may_add_request(drafting[1:MOST_LIMITED]) and world.controller.may_add_request([])
    world.steps(5 * PROBE_EVERY_FUTILE)
    assert world.controller.may_add_request(drafting), "after repeated misses, the limited requests make way for another request"
    assert not world.controller.may_add_request([*drafting, 0]), "the limit stays at its number of requests"


def test_draft_controller_keeps_the_limit_when_few_drafts_are_accepted() -> None:
    for chance, steps, few in ((0.05, 4000, True), (0.7, 300, False)):
        world = rejected_world(costly_drafts)
        world.chances = [chance] * len(world.chances)
        world.steps(steps)
        assert world.controller.is_limited is few


def test_draft_controller_sets_no_limit_when_short_outputs_are_mostly_accepted() -> None:
    """Such outputs are too short for three accepted draft tokens in a row."""
    world = World([0.7, 0.7], bound_by_weights, most=1, by_model=True)
    for _ in range(500):
        world.steps(3)
        for slot in world.slots.tolist():
            world.controller.begin(slot)
        assert not world.controller.is_limited


@pytest.mark.parametrize(("rows", "most"), [(3, 7), (8, 1), (8, 2)])
def test_draft_controller_lifts_the_limit_when_drafts_are_accepted_again(rows: int, most: int) -> None:
    """Drafting for all requests would save time. Drafting only for the few requests that the limit permits would save none."""
    for cost in (bound_by_weights, costly_drafts):
        world = rejected_world(cost, rows=rows, most=most)
        world.admit([most] * MOST_LIMITED + [0] * (rows - MOST_LIMITED))
        assert (world.steps(4 * PROBE_EVERY_FUTILE).max(axis=1) > 0).sum() <= 8, (
            "at most eight steps draft, three of them to measure the cost of a draft token again"
        )
        world.chances = [1.0] * rows
        world.steps(100)
        assert not world.controller.is_limited
        world.admit([most] * rows)
        assert (world.steps(100)[50:].min(axis=1) >= min(most, 2)).mean() > 0.9


def test_draft_controller_limits_a_draft_model_when_steps_keep_many_rows() -> None:
    controller, slots, most = DraftController(16, 3, by_model=True), np.arange(16), np.full(2, 3)
    for _ in range(CROWDED):
        assert not controller.is_limited
        assert not controller.crowded(slots).any()
    assert controller.is_limited
    controller.choose(slots[:2], most)
    assert not controller.is_limited, "a step that is not crowded ends the limit"
    for _ in range(CROWDED):
        controller.crowded(slots)
    controller.rest()
    assert not controller.is_limited, "an idle worker ends the limit"


def test_draft_controller_counts_down_pauses_in_steps_with_many_rows() -> None:
    world = World([0.0, 0.0], bound_by_weights)
    world.controller._pauses[:] = 3, MOST_PAUSE
    for _ in range(MOST_PAUSE):
        world.controller.crowded(world.slots)
    assert not world.controller._pauses.any()


def test_draft_controller_pauses_no_request_while_drafting_is_limited() -> None:
    world = World([0.0, 0.0], bound_by_weights, by_model=True)
    while not world.controller.is_limited:
        world.steps(40)
        world.controller.begin(1)
    assert world.controller._misses[0] > MISSES and not world.controller._pauses.any()
    world.steps(5 * PROBE_EVERY_FUTILE)
    assert not world.controller._pauses.any()


def test_draft_controller_sets_no_limit_when_adaptive_drafting_is_off() -> None:
    controller, slots = DraftController(16, 3, adaptive=False, by_model=True), np.arange(16)
    for _ in range(CROWDED):
        controller.crowded(slots)
    assert not controller.is_limited


def test_draft_controller_scales_draft_costs_when_all_steps_become_slower() -> None:
    """After a slowdown of the machine or with longer contexts, the costs of draft tokens that were learned before are too low."""
    factor = 1.0

    def cost(rows: int, guesses: int) -> float:
        return factor * costly_drafts(rows, guesses)

    for chance in (0.0, -1.0):  # rejected drafts, or no drafts
        world = World([chance], cost, asking=1.3)
        world.steps(300)
        for _ in range(5):
            factor *= 1.5
            assert (world.steps(200).max(axis=1) > 0).sum() <= 1 + 200 // PROBE_EVERY


def test_draft_controller_does_not_scale_costs_measured_after_a_slowdown() -> None:
    factor = 1.0
    world = World([0.0], lambda rows, guesses: factor * bound_by_weights(rows, guesses))
    world.steps(200)
    world.chances = [1.0]
    world.steps(200)
    factor = 2.0
    world.steps(200)
    world.chances = [0.0]
    world.steps(300)
    assert world.controller._seconds[1, -1] < 1.2 * factor * bound_by_weights(1, 7)


def test_draft_controller_respects_the_limit_of_each_row() -> None:
    controller = DraftController(4, 3)
    most = np.array([0, 1, 3, 2])
    for _ in range(50):
        found = controller.choose(np.arange(4), most)
        assert (found <= most).all() and found.min() >= 0


def test_draft_controller_ignores_mixed_and_untimed_steps() -> None:
    controller = DraftController(1, 3)
    none = np.empty(0, dtype=np.int64)
    controller.learn(replace(decode_plan(1), mode=ForwardMode.MIXED, num_extend=1), none, none, none, 5.0)
    controller.learn(decode_plan(1), none, none, none, 0.0)
    assert not controller._seen.any()


def test_draft_controller_keeps_the_number_of_draft_tokens_after_one_slow_step() -> None:
    world = World([1.0], bound_by_weights)
    world.steps(100)
    one = np.ones(1, dtype=np.int64)
    slow = replace(decode_plan(1), drafts=np.full(1, 7, dtype=np.int32))
    world.controller.learn(slow, world.slots, 7 * one, 7 * one, 1000.0)
    assert world.step()[0] == 7


def test_draft_controller_retries_a_number_of_draft_tokens_whose_first_steps_were_slow() -> None:
    """Seven draft tokens seem costly after two slow steps. The controller must try seven again."""
    world = World([1.0], bound_by_weights)
    slow = replace(decode_plan(1), drafts=np.full(1, 7, dtype=np.int32))
    for _ in range(2):
        world.controller.learn(slow, world.slots[:0], world.slots[:0], world.slots[:0], 50.0)
    world.steps(2 * FORGET_AFTER)
    assert (world.steps(100)[:, 0] == 7).mean() > 0.9


def test_draft_controller_counts_drafts_refused_by_a_grammar_as_rejected() -> None:
    controller = DraftController(1, 7)
    slots, most = np.zeros(1, dtype=np.int64), np.full(1, 7)
    guessed = 0
    for _ in range(500):
        drafts = controller.choose(slots, most)
        guessed += int(drafts[0] > 0)
        plan, rows = replace(decode_plan(1), drafts=drafts.astype(np.int32)), np.flatnonzero(drafts)
        controller.learn(plan, slots[rows], drafts[rows], np.zeros(len(rows), dtype=np.int64), 1.0)
    assert guessed <= 30
