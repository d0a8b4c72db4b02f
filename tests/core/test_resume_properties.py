"""Random runs on workers that are lost repeatedly. Each request must get the output of an uninterrupted run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.config import SchedulePolicy, SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import Finish, FinishReason
from tests.core.harness import Engine
from tests.core.test_scheduler_properties import CONTEXT, check_run, config_of, random_params, random_prompt

Wish = dict[str, Any]

configs = st.builds(
    config_of,
    page_size=st.sampled_from([1, 4, 16]),
    pool_tokens=st.sampled_from([192, 640]),
    slots=st.integers(1, 6),
    chunk=st.sampled_from([0, 16, 32]),
    enable_mixed_chunk=st.booleans(),
    enable_radix_cache=st.booleans(),
    retract_interval=st.sampled_from([0, 0, 3]),
    schedule_conservativeness=st.sampled_from([0.3, 1.0]),
    schedule_policy=st.sampled_from(SchedulePolicy),
    enable_priority_scheduling=st.booleans(),
)


@dataclass
class FrontEnd:
    """A gateway that moves its requests to another worker when a worker is lost."""

    wishes: list[Wish]
    outputs: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)

    def submit_open(self, engine: Engine) -> None:
        for handle, wish in enumerate(self.wishes):
            if handle not in self.finishes:
                engine.submit(handle, output=self.outputs.get(handle, []), **wish)

    def take(self, engine: Engine) -> None:
        for handle in engine.submitted:
            self.outputs.setdefault(handle, []).extend(engine.outputs.get(handle, []))
            self.logprobs.setdefault(handle, []).extend(engine.logprobs.get(handle, []))
        self.finishes.update(engine.finishes)

    def cut(self, rng: random.Random) -> None:
        """Drops a random number of the last tokens of some open requests, as if the worker had lost these tokens."""
        for handle, output in self.outputs.items():
            if handle not in self.finishes and rng.random() < 0.3:
                kept = rng.randrange(len(output) + 1)
                del output[kept:]
                del self.logprobs[handle][kept:]


def wishes_of(rng: random.Random) -> list[Wish]:
    wishes = []
    for _ in range(rng.randrange(2, 9)):
        prompt = random_prompt(rng)
        params = random_params(rng, len(prompt))
        if "embedding" not in params and params["max_new_tokens"]:  # other requests have no output
            wishes.append({"prompt": prompt, "stream": rng.random() < 0.8, "priority": rng.randrange(3), **params})
            wishes[-1]["payer"] = (rng.choice((b"", b"a")), rng.randrange(2), 1.0)
    return wishes


def undisturbed(config: SchedulerConfig, wishes: list[Wish]) -> Engine:
    roomy = replace(config, num_pages=8 * CONTEXT // config.page_size + 8, max_running_requests=8, retract_interval=0)
    engine = Engine(roomy, checked=False)
    for handle, wish in enumerate(wishes):
        engine.submit(handle, **wish)
    engine.drain()
    return engine


def what_counts(finish: Finish) -> tuple[object, ...]:
    return finish.reason, finish.matched_stop, finish.matched_token, finish.prompt_tokens, finish.completion_tokens


@settings(max_examples=40, deadline=None)
@given(config=configs, seed=st.integers(0, 2**32), overlap=st.booleans())
def test_requests_that_move_between_workers_get_the_same_output(config: SchedulerConfig, seed: int, overlap: bool) -> None:
    rng = random.Random(seed)
    wishes = wishes_of(rng)
    want = undisturbed(config, wishes)
    front = FrontEnd(wishes)
    for _ in range(4):
        engine = Engine(config, overlap)
        front.submit_open(engine)
        for _ in range(rng.randrange(30)):
            if rng.random() < 0.5:
                engine.compile()
            engine.turn()
        front.take(engine)
        front.cut(rng)
    engine = Engine(config, overlap)
    front.submit_open(engine)
    engine.drain()
    check_run(engine)
    front.take(engine)
    for handle in range(len(wishes)):
        finish = front.finishes[handle]
        assert finish.reason is not FinishReason.ABORT, finish
        assert front.outputs[handle] == want.outputs[handle], wishes[handle]
        assert what_counts(finish) == what_counts(want.finishes[handle]), wishes[handle]
        assert front.logprobs[handle] == want.logprobs.get(handle, [])
        assert finish.cached_tokens <= finish.prompt_tokens
