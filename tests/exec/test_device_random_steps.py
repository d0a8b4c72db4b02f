"""The executor with random requests: lengths, pages and finishes equal those of the fake executor.

Tokens equal those of transformers, which computes each request separately. A CPU runs few steps, a GPU runs 2,000.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rootstock_llm.services.worker.core.contracts.plan import ForwardMode
from rootstock_llm.services.worker.exec.contracts.protocol import Executor
from tests.exec.device_executors import executor_of
from tests.exec.random_steps import CONTEXT, MAX_SLOTS, POOL_TOKENS, VOCAB, Recorder, Repeater, Turned, drive, random_config
from tests.exec.tiny_models import MODELS
from tests.night import NIGHTLY

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
STEPS = 2000 if DEVICE != "cpu" else 300
TURNS = 60  # iterations of the scheduler loop in one random run; then all requests run to their ends
KERNELS = ["auto"] if DEVICE != "cpu" else ["cpp", "torch"] if NIGHTLY else ["cpp"]
PAGE_SIZES = (4, 1, 16)
NEAR = 2e-3  # difference of two logits below which rounding may exchange the tokens
COLUMNS = (
    *("mode", "num_extend", "slots", "starts", "num_tokens", "input_ids", "sample", "mask_rows"),
    *("prompt_logprob_rows", "prompt_logprob_offsets", "prompt_logprob_nexts"),
    *("table_slots", "table_firsts", "table_counts", "table_pages"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """Returns transformers' model of the same checkpoint."""
    return MODELS["qwen3"].build(folder).to(DEVICE)


@pytest.fixture(scope="module", params=KERNELS)
def executors(request: pytest.FixtureRequest, folder: Path, model: Any) -> Any:
    made: dict[int, Executor] = {}

    def of(page_size: int) -> Executor:
        if page_size not in made:
            sizes = {"max_slots": MAX_SLOTS, "num_pages": POOL_TOKENS // page_size, "context_len": CONTEXT}
            chosen = {"kernels": request.param, "attention_backend": "torch" if request.param == "torch" else "auto"}
            made[page_size] = executor_of(folder, DEVICE, page_size, **sizes, **chosen)
        return made[page_size]

    yield of
    for executor in made.values():
        executor.close()


def test_executor_equals_the_fake_executor_under_random_traffic(executors: Callable[[int], Executor], model: Any) -> None:
    seen: Counter[str] = Counter()
    seed = 0
    while seen["steps"] < STEPS:
        rng = random.Random(seed)
        config, overlap = random_config(rng, PAGE_SIZES[seed % len(PAGE_SIZES)]), seed % 2 == 0
        recorder = Recorder(executors(config.page_size))
        ours = drive(Turned(config, overlap, recorder), seed, TURNS)
        fake = drive(Turned(config, overlap, Repeater(config, recorder.results)), seed, TURNS)
        assert_alike(ours, fake, seed)
        seen["checked tokens"] += sum(check_tokens(ours, handle, model, seed) for handle in plain_requests(ours))
        count(ours, seen)
        seed += 1
    missing = [what for what in COVERED if not seen[what]]
    assert not missing, f"the random requests never caused: {missing}"


COVERED = (
    "extend",
    "mixed",
    "decode",
    "retractions",
    "evictions",
    "aborts",
    "masks",
    "prompt logprobs",
    "chunks",
    "checked tokens",
)


def count(engine: Turned, seen: Counter[str]) -> None:
    """Adds to `seen` how often each feature of COVERED occurred in the engine's run."""
    stats = engine.core.stats()
    seen["retractions"] += stats.retractions_total
    seen["evictions"] += stats.evicted_pages_total
    seen["aborts"] += stats.aborts_total
    seen["steps"] += len(engine.plans)
    for plan in engine.plans:
        seen[ForwardMode(plan.mode).name.lower()] += 1
        seen["masks"] += len(plan.mask_rows)
        seen["prompt logprobs"] += len(plan.prompt_logprob_rows)
        seen["chunks"] += int((~plan.sample).sum())


def assert_alike(ours: Turned, fake: Turned, seed: int) -> None:
    for mine, other in zip(ours.plans, fake.plans, strict=False):
        for column in COLUMNS:
            assert np.array_equal(getattr(mine, column), getattr(other, column)), (seed, mine.step_id, column)
        assert repr(mine.admitted) == repr(other.admitted), (seed, mine.step_id)
    assert len(ours.plans) == len(fake.plans), seed
    assert ours.stats == fake.stats, f"seed {seed}: the core's statistics must be equal"
    assert ours.outputs == fake.outputs, seed
    assert repr(ours.finishes) == repr(fake.finishes), seed
    assert set(ours.finishes) == set(ours.submitted), f"seed {seed}: each request must end exactly once"


def plain_requests(engine: Turned) -> list[int]:
    """Returns the greedy requests whose logits are not edited."""
    found = []
    for handle, message in engine.submitted.items():
        params = message.params
        edited = params.grammar or params.logit_bias or params.banned_token_ids or params.allowed_token_ids or params.dry
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if not edited and penalties == (1.0, 0.0, 0.0) and params.temperature == 0.0 and not params.min_new_tokens:
            found.append(handle)
    return [handle for handle in found if engine.submitted[handle].params.embedding is None]


def check_tokens(engine: Turned, handle: int, model: Any, seed: int) -> int:
    """Checks that each output token is the most likely one in transformers' model. Returns the number of tokens."""
    output = engine.outputs.get(handle, [])
    if not output:
        return 0
    prompt = engine.submitted[handle].prompt_ids.tolist()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]], device=DEVICE)).logits[0, len(prompt) - 1 :].float()
    lacking = logits.amax(dim=1) - logits[torch.arange(len(output)), torch.tensor(output, device=DEVICE)]
    assert logits.shape == (len(output), VOCAB)
    assert float(lacking.max()) < NEAR, f"seed {seed}, request {handle}: token {int(lacking.argmax())} is not the most likely"
    return len(output)
