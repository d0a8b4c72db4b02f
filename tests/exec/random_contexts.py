"""Runs a request in random contexts, which deterministic results must not depend on.

A context has other requests, chunk sizes, cached prefixes, retractions, other page numbers, and output of an earlier worker.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rootstock_llm.services.worker.core.contracts.cache_groups import CacheGroup
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import NOTHING_VERIFIED, FinishReason, PeerOutput, Submit, Verified
from rootstock_llm.services.worker.core.contracts.plan import DryParams, PromptLogprobs, RowLogprobs, SamplingParams
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.exec.contracts.protocol import Executor, Run
from tests.core.deployed_config import deployed_config
from tests.core.fake_grammar import ReadyBook, masks_behind

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    {
        "temperature": 1.3,
        "seed": 1 << 63,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "dry": DryParams(0.8),
    },
)


@dataclass(frozen=True)
class World:
    """The sizes of a worker, and the limits of random contexts."""

    page_size: int = 4
    vocab_size: int = 257
    context_len: int = 256
    max_slots: int = 16
    num_pages: int = 512
    few_pages: int = 160  # size of a small KV pool, which has fewer pages than all requests need
    mates: int = 14  # largest number of other requests
    turns: int = 40  # number of iterations of the scheduler loop in which requests arrive
    mate_prompts: tuple[int, ...] = (1, 3, 17, 40, 100)  # possible numbers of prompt tokens of other requests
    mate_tokens: int = 40  # largest number of output tokens of other requests
    chunks: tuple[int, ...] = (0, 0, 4, 8, 20, 64, 128)  # possible chunk sizes in tokens; 0: no chunks
    max_drafts: int = 0  # largest number of draft tokens per row; 0: no drafting
    adapts_drafts: bool = True  # whether the controller chooses the number of draft tokens
    drafts_by_model: bool = False  # whether a draft model drafts instead of n-grams
    groups: tuple[CacheGroup, ...] = ()  # cache groups of the model

    def config(self, **given: Any) -> SchedulerConfig:
        sizes = {"page_size": self.page_size, "context_len": self.context_len, "vocab_size": self.vocab_size}
        plain = {"num_pages": self.num_pages, "max_running_requests": self.max_slots, "chunked_prefill_size": 0}
        drafts = {
            "max_drafts": self.max_drafts,
            "speculative_adaptive": self.adapts_drafts,
            "drafts_by_model": self.drafts_by_model,
        }
        groups = {"groups": self.groups, "state_interval": self.page_size}
        return deployed_config(**{**sizes, **plain, **drafts, **groups, **given})

    def ids(self, rng: random.Random, count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(6, self.vocab_size) for _ in range(count))

    def mate(self, rng: random.Random) -> Asked:
        params = SamplingParams(
            max_new_tokens=rng.randint(1, self.mate_tokens), top_logprobs=rng.choice((-1, -1, 0, 5)), **rng.choice(KINDS)
        )
        return Asked(self.ids(rng, rng.choice(self.mate_prompts)), params)


class NoText:
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


@dataclass(frozen=True)
class Asked:
    """A request."""

    prompt: tuple[int, ...]  # token ids
    params: SamplingParams
    resumed: tuple[int, ...] = ()  # token ids that an earlier worker has output, which this worker continues
    prediction: tuple[int, ...] = ()  # token ids that the client expects as output


@dataclass
class Answer:
    """The results of a request, collected while it runs."""

    tokens: list[int] = field(default_factory=list)  # tokens sampled by this worker
    logprobs: list[RowLogprobs] = field(default_factory=list)  # log probabilities of the output tokens
    scored: list[PromptLogprobs] = field(default_factory=list)  # requested log probabilities of prompt tokens
    verified: Verified = NOTHING_VERIFIED  # counts of drafted and accepted tokens
    ended: bool = False

    def bits(self) -> tuple[object, ...]:
        """Returns a value that is equal for two results exactly if their ids and log probabilities are bitwise equal."""
        return tuple(
            (token, row.sampled.hex(), row.top_ids, tuple(value.hex() for value in row.top))
            for token, row in zip(self.tokens, self.logprobs, strict=True)
        )


@dataclass(frozen=True)
class Context:
    """A run: configuration, tested request and other requests."""

    config: SchedulerConfig
    overlap: bool  # whether the scheduler loop overlaps host and device work
    before: tuple[Asked, ...]  # requests that end before any other request arrives
    arrivals: tuple[tuple[int, Asked], ...]  # (iteration of the scheduler loop, other request that arrives in it)
    target: Asked  # the tested request
    at: int  # iteration of the scheduler loop in which the tested request arrives


class Turned:
    """A new scheduler on an executor that may have served other schedulers before.

    The test runs each iteration of the scheduler loop.
    For the draft tokens of a row, only a random number of grammar masks is used, as if the step had no time to fill more.
    """

    def __init__(self, config: SchedulerConfig, executor: Executor, overlap: bool) -> None:
        self._core = Scheduler(config, NoText(), ReadyBook(config.vocab_size))
        self._executor, self._overlap = executor, overlap
        self._answers: dict[int, Answer] = {}
        self._run: Run | None = None
        self._time = random.Random(3)

    def submit(self, asked: Asked) -> Answer:
        handle = len(self._answers)
        answer = self._answers[handle] = Answer()
        prompt, prediction = (np.array(ids, dtype=np.int32) for ids in (asked.prompt, asked.prediction))
        more: dict[str, Any] = {"output_ids": asked.resumed, "prediction": prediction}
        self._core.submit(Submit(0, handle, f"r{handle}", prompt, asked.params, **more), 0.0)
        return answer

    @property
    def idle(self) -> bool:
        return self._run is None and self._core.idle

    def turn(self) -> None:
        if not self._overlap:
            self._commit(None)
        plan = self._core.plan(0.0)
        run = self._executor.forward(plan) if plan is not None else None
        self._commit(run)
        if run is not None:
            matchers = self._core.matchers()
            behind = masks_behind(matchers, self._executor.draft_tokens(run)) if len(run.plan.drafts) else {}
            filled = {row: masks[: self._time.randrange(1, 6)] for row, masks in behind.items()}
            self._executor.sample(run, {row: matcher.mask() for row, matcher in matchers}, filled)

    def wait(self) -> None:
        """Waits for the step in flight."""
        self._commit(None)

    def finish(self) -> None:
        while not self.idle:
            self.turn()

    def _commit(self, following: Run | None) -> None:
        run, self._run = self._run, following
        if run is not None:
            self._core.commit(self._executor.wait(run), 0.0)
        outputs = self._core.take_output()
        for peer in outputs:
            self._take(peer)

    def _take(self, peer: PeerOutput) -> None:
        tokens = iter(peer.tokens)
        for handle, count in zip(peer.handles, peer.counts, strict=True):
            self._answers[handle].tokens.extend(next(tokens) for _ in range(count))
        for handle, rows in peer.logprobs:
            self._answers[handle].logprobs.extend(rows)
        for handle, scored in peer.prompt_logprobs:
            self._answers[handle].scored.append(scored)
        for finish in peer.finishes:
            assert finish.reason is not FinishReason.ABORT, finish
            self._answers[finish.handle].ended, self._answers[finish.handle].verified = True, finish.verified


def targets(world: World, rng: random.Random, prompt_tokens: int, new_tokens: int) -> Iterator[Asked]:
    """Yields one request per kind of sampling, all with the same random prompt."""
    prompt = world.ids(rng, prompt_tokens)
    for kind in KINDS:
        yield Asked(prompt, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, top_logprobs=3, **kind))


def alone(world: World, executor: Executor, asked: Asked) -> Answer:
    turned = Turned(world.config(enable_radix_cache=False), executor, overlap=False)
    answer = turned.submit(asked)
    turned.finish()
    return answer


def random_context(world: World, seed: int, target: Asked, output: Sequence[int]) -> Context:
    """Returns a random context.

    Args:
        world: limits of the context.
        seed: seed of the random choices.
        target: the tested request.
        output: the target's output without other requests. The context may use a part of it as the output of an earlier worker.
    """
    rng = random.Random(seed)
    config = world.config(
        num_pages=rng.choice((world.few_pages, world.num_pages)),
        chunked_prefill_size=rng.choice(world.chunks),
        enable_mixed_chunk=rng.random() < 0.5,
        enable_radix_cache=rng.random() < 0.8,
        retract_interval=rng.choice((0, 0, 3, 7, 11)),
        schedule_conservativeness=rng.choice((0.1, 1.0)),
    )
    text = target.prompt + tuple(output)
    before = [world.mate(rng) for _ in range(rng.randrange(1 + world.mates // 4))]
    if rng.random() < 0.7:  # an earlier request caches any number of pages of the target's prompt and output
        cached = text[: rng.randint(1, len(text))] + world.ids(rng, rng.randrange(6))
        greedy = SamplingParams(max_new_tokens=rng.randint(1, 6), temperature=0.0)
        before.insert(rng.randint(0, len(before)), Asked(cached, greedy))
    arrivals = [(rng.randrange(world.turns), world.mate(rng)) for _ in range(rng.randrange(world.mates))]
    resumed = tuple(output[: rng.randrange(len(output))]) if rng.random() < 0.4 else ()
    continued, at = replace(target, resumed=resumed), rng.randrange(world.turns)
    return Context(config, rng.random() < 0.7, tuple(before), tuple(arrivals), continued, at)


def strings(world: World, executor: Executor, target: Asked, seeds: range) -> set[tuple[object, ...]]:
    """Returns the distinct results of the target, alone and in the contexts of these seeds, as values of Answer.bits."""
    reference = alone(world, executor, target)
    found = {reference.bits()}
    for seed in seeds:
        context = random_context(world, seed, target, reference.tokens)
        answer, num_resumed = answer_in(context, executor), len(context.target.resumed)
        assert len(answer.tokens) == target.params.max_new_tokens - num_resumed
        found.add(reference.bits()[:num_resumed] + answer.bits())
    return found


def answer_in(context: Context, executor: Executor) -> Answer:
    """Runs all requests of a context and returns the target's result."""
    turned = Turned(context.config, executor, context.overlap)
    for asked in context.before:
        turned.submit(asked)
    turned.finish()
    due = sorted([*context.arrivals, (context.at, context.target)], key=lambda arrival: arrival[0])
    answer: Answer | None = None
    for turn in range(due[-1][0] + 1):
        for asked in [asked for at, asked in due if at == turn]:
            answered = turned.submit(asked)
            answer = answered if asked is context.target else answer
        turned.turn()
    turned.finish()
    assert answer is not None and answer.ended
    return answer
