"""All features together on the real executor with a small KV pool: each output equals that of transformers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rootstock_llm.services.worker.core.contracts.config import EvictionPolicy, SchedulePolicy
from rootstock_llm.services.worker.core.contracts.messages import Finish, FinishReason, SessionTurn, Submit, TraceKind
from rootstock_llm.services.worker.core.contracts.plan import EmbeddingParams, SamplingParams
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.core.invariants import violations
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.exec.contracts.protocol import Executor, Run
from tests.all_pairs import each_value
from tests.core.deployed_config import deployed_config
from tests.core.fake_grammar import PositionMatcher, SlowBook, spec
from tests.core.harness import LetterDecoder
from tests.exec.host_executors import build_host_executor
from tests.exec.tiny_models import MODELS

VOCAB = 257
OUTPUTS = 24
GRAMMAR_LENGTH = 20


class Reference:
    """Computes requests with transformers, one at a time, in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = MODELS["qwen3"].build(folder).eval()

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Returns float32[n, V]; row i has the log probabilities of the token after ids[: i + 1]."""
        return self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    def answer(self, prompt: list[int], count: int, grammar_seed: int | None = None) -> list[int]:
        out: list[int] = []
        matcher = None if grammar_seed is None else PositionMatcher(grammar_seed, GRAMMAR_LENGTH, VOCAB)
        while len(out) < count and not (matcher and matcher.terminated):
            row = self.logprobs(prompt + out)[-1]
            if matcher is not None:
                allowed = torch.from_numpy(matcher.allowed(len(out)))
                token = int(allowed[row[allowed].argmax()])
                assert matcher.accept(token)
            else:
                token = int(row.argmax())
            out.append(token)
        return out

    @torch.inference_mode()
    def vector(self, prompt: list[int]) -> np.ndarray[Any, Any]:
        state = self.model.model(torch.tensor([prompt])).last_hidden_state[0, -1].float()
        return torch.nn.functional.normalize(state, dim=-1).numpy()


@dataclass
class Served:
    core: Scheduler
    book: SlowBook
    executor: Executor
    overlap: bool
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)
    sampled: dict[int, list[float]] = field(default_factory=dict)
    prompt_values: dict[int, list[float]] = field(default_factory=dict)

    def submit(
        self, handle: int, prompt: list[int], priority: int = 0, session: SessionTurn | None = None, **params: Any
    ) -> None:
        values = {"max_new_tokens": OUTPUTS, "temperature": 0.0, "ignore_eos": True, **params}
        ids = np.array(prompt, dtype=np.int32)
        message = Submit(0, handle, f"r{handle}", ids, SamplingParams(**values), priority=priority, session=session)
        self.core.submit(message, 0.0)

    def drain(self, turns: int = 1_000_000) -> None:
        """Runs at most `turns` iterations of the scheduler loop, and ends when all requests have ended.

        Marks the pending grammars as compiled before each iteration.
        """
        prev: Run | None = None
        while turns > 0 and not self.core.idle:
            turns -= 1
            for grammar in list(self.book.pending):
                del self.book.pending[grammar]
                self.book.ready.add(grammar)
                self.core.grammar_ready(grammar)
            prev = self._turn(prev)
        self._commit(prev)

    def _turn(self, prev: Run | None) -> Run | None:
        if not self.overlap:
            self._commit(prev)
            prev = None
        plan = self.core.plan(0.0)
        run = self.executor.forward(plan) if plan is not None else None
        self._commit(prev)
        if run is not None:
            self.executor.sample(run, {row: matcher.mask() for row, matcher in self.core.matchers()})
        assert not violations(self.core.queues, self.core.memory, self.core.sessions, self.core.tiers)
        return run

    def _commit(self, run: Run | None) -> None:
        if run is not None:
            self.core.commit(self.executor.wait(run), 0.0)
        outputs = self.core.take_output()
        for peer in outputs:
            tokens = iter(peer.tokens)
            for handle, count in zip(peer.handles, peer.counts, strict=True):
                self.outputs.setdefault(handle, []).extend(next(tokens) for _ in range(count))
            for handle, rows in peer.logprobs:
                self.sampled.setdefault(handle, []).extend(row.sampled for row in rows)
            for handle, values in peer.prompt_logprobs:
                self.prompt_values.setdefault(handle, []).extend(values.values.tolist())
            self.finishes.update({finish.handle: finish for finish in peer.finishes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    torch.set_num_threads(1)
    return Reference(folder)


def serve(folder: Path, overlap: bool, **changes: Any) -> Served:
    values: dict[str, Any] = {
        "num_pages": 60,
        "page_size": 4,
        "context_len": 160,
        "vocab_size": VOCAB,
        "max_running_requests": 4,
        "chunked_prefill_size": 16,
        "enable_mixed_chunk": True,
        "enable_priority_scheduling": True,
        "max_extend_steps": 0,
        "retract_interval": 7,
        "schedule_conservativeness": 0.1,
        "max_prompt_logprob_tokens": 16,
        "eviction_policy": EvictionPolicy.PRIORITY,
        **changes,
    }
    config = deployed_config(**values)
    executor, _ = build_host_executor(
        model_path=str(folder),
        dtype="float32",
        page_size=config.page_size,
        max_slots=config.max_running_requests,
        num_pages=config.num_pages,
        mem_fraction_static=0.5,
        context_len=config.context_len,
        num_threads=1,
        progress=lambda _: None,
        check_relay=True,
    )
    book = SlowBook(VOCAB)
    return Served(Scheduler(config, LetterDecoder(), book), book, executor, overlap)


@pytest.mark.by_day(one_in=3)
@each_value(
    policy=[SchedulePolicy.LPM, SchedulePolicy.DFS_WEIGHT, SchedulePolicy.RANDOM],
    overlap={"overlap": True, "no-overlap": False},
)
def test_answers_equal_transformers_with_all_features(
    folder: Path, reference: Reference, policy: SchedulePolicy, overlap: bool
) -> None:
    rng = random.Random(5)
    stem = [rng.randrange(6, VOCAB) for _ in range(24)]
    prompts = [stem[: rng.randrange(1, 25)] + [rng.randrange(6, VOCAB) for _ in range(rng.randrange(1, 30))] for _ in range(28)]
    served = serve(folder, overlap, schedule_policy=policy)
    for handle, prompt in enumerate(prompts):
        wishes: list[dict[str, Any]] = [
            {},
            {"grammar": spec(handle % 3, GRAMMAR_LENGTH)},
            {"top_logprobs": 2, "prompt_logprobs_from": 0},
            {"embedding": EmbeddingParams(), "max_new_tokens": 1},
        ]
        served.submit(handle, prompt, priority=handle // 7, **wishes[handle % 4])
        if handle % 7 == 6:
            served.drain(turns=8)  # requests run before the next ones, which have a higher priority, arrive
    served.drain()
    for handle, prompt in enumerate(prompts):
        check(served, reference, handle, prompt)
    stats = served.core.stats()
    assert stats.retractions_total > 3 and stats.preemptions_total > 0 and stats.evicted_pages_total > 0
    jumps = [
        event
        for handle in range(28)
        for event in SchedulerControl(served.core).trace(f"r{handle}")
        if event.kind is TraceKind.JUMPED
    ]
    assert jumps, "grammars must have added forced tokens"


def check(served: Served, reference: Reference, handle: int, prompt: list[int]) -> None:
    if handle % 4 == 3:
        assert served.finishes[handle].reason is FinishReason.EMBEDDED
        assert served.finishes[handle].embedding is not None
        np.testing.assert_allclose(served.finishes[handle].embedding, reference.vector(prompt), atol=1e-5)
        return
    seed = handle % 3 if handle % 4 == 1 else None
    want = reference.answer(prompt, OUTPUTS, seed)
    assert served.outputs[handle] == want, served.finishes[handle]
    if handle % 4 == 2:
        values = reference.logprobs(prompt + want)
        exact = [float(values[at - 1, token]) for at, token in enumerate(prompt + want) if at]
        np.testing.assert_allclose(served.prompt_values.get(handle, []) + served.sampled[handle], exact, atol=1e-4)


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_session_turn_continues_the_previous_turn(folder: Path, reference: Reference, overlap: bool) -> None:
    served = serve(folder, overlap, num_pages=200)
    assert not served.core.open_session("s", 0, 0.0, 0.0)
    context: list[int] = []
    for turn, added in enumerate([[10, 11, 12, 13, 14], [20, 21], [30, 31, 32]]):
        served.submit(turn, added, session=SessionTurn("s"))
        served.drain()
        context += added
        assert served.outputs[turn] == reference.answer(context, OUTPUTS)
        context += served.outputs[turn]
    assert served.finishes[2].cached_tokens >= 48, "the KV of earlier turns must be cached"
    branch = [10, 11, 12, 13, 14, *served.outputs[0], 40]
    served.submit(3, [40], session=SessionTurn("s", parent="r0"))
    served.drain()
    assert served.outputs[3] == reference.answer(branch, OUTPUTS)


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_seed_gives_equal_tokens_in_a_batch_of_sixteen_with_and_without_cached_pages(folder: Path, overlap: bool) -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(6, VOCAB) for _ in range(37)]
    drawn = {"temperature": 1.0, "seed": 1234, "max_new_tokens": 40}
    alone = serve(folder, overlap, num_pages=600, max_running_requests=16, retract_interval=0)
    alone.submit(0, prompt, **drawn)
    alone.drain()
    crowd = serve(folder, overlap, num_pages=600, max_running_requests=16)
    for round_ in range(2):
        for handle in range(16):
            first = 16 * round_
            mine = handle == 9
            other = [rng.randrange(6, VOCAB) for _ in range(rng.randrange(3, 60))]
            crowd.submit(first + handle, prompt if mine else other, **({**drawn} if mine else {**drawn, "seed": handle}))
        crowd.drain()
    assert alone.outputs[0] == crowd.outputs[9] == crowd.outputs[25]
    assert crowd.finishes[9].cached_tokens == 0 and crowd.finishes[25].cached_tokens == 36
