"""One request among what may be done to it: mates, chunks, cached prefixes, retraction, other pages, another worker before."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.worker.core.contracts.config import SchedulerConfig
from services.worker.core.contracts.messages import FinishReason, PeerOutput, Submit
from services.worker.core.contracts.plan import PromptLogprobs, RowLogprobs
from services.worker.core.contracts.sampling import SamplingParams
from services.worker.core.scheduler import Scheduler
from services.worker.exec.contracts.protocol import Executor, Run
from tests.core.deployed_config import deployed_config

PAGE_SIZE = 4
VOCAB_SIZE = 257
CONTEXT_LEN = 256
MAX_SLOTS = 16
NUM_PAGES = 512
FEW_PAGES = 160  # fewer than all mates want
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    {"temperature": 1.3, "seed": 1 << 63, "min_p": 0.02, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
)


class NoText:
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


@dataclass(frozen=True)
class Asked:
    """prompt: ids. kept: output of a worker before this one."""

    prompt: tuple[int, ...]
    params: SamplingParams
    kept: tuple[int, ...] = ()


@dataclass
class Answer:
    """tokens: those sampled here. logprobs: of each of them. scored: of the prompt, from where they are wanted."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    scored: list[PromptLogprobs] = field(default_factory=list)
    ended: bool = False

    def bits(self) -> tuple[object, ...]:
        """Equal where ids and log probabilities are, to the last bit."""
        return tuple(
            (token, row.sampled.hex(), row.top_ids, tuple(value.hex() for value in row.top))
            for token, row in zip(self.tokens, self.logprobs, strict=True)
        )


@dataclass(frozen=True)
class Context:
    """before: run to their ends first. arrivals: (turn, request), the one that it is about being `target` and coming at turn
    `at`."""

    config: SchedulerConfig
    overlap: bool
    before: tuple[Asked, ...]
    arrivals: tuple[tuple[int, Asked], ...]
    target: Asked
    at: int


class Turned:
    """A scheduler over an executor, turned by hand; the executor may have served others before."""

    def __init__(self, config: SchedulerConfig, executor: Executor, overlap: bool) -> None:
        self._core = Scheduler(config, NoText())
        self._executor, self._overlap = executor, overlap
        self._answers: dict[int, Answer] = {}
        self._run: Run | None = None

    def submit(self, asked: Asked) -> Answer:
        handle = len(self._answers)
        answer = self._answers[handle] = Answer()
        prompt = np.array(asked.prompt, dtype=np.int32)
        self._core.submit(Submit(0, handle, f"r{handle}", prompt, asked.params, output_ids=asked.kept), 0.0)
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
            self._executor.sample(run, {})

    def finish(self) -> None:
        while not self.idle:
            self.turn()

    def _commit(self, following: Run | None) -> None:
        run, self._run = self._run, following
        if run is not None:
            self._core.commit(self._executor.wait(run), 0.0)
        output = self._core.take_output()
        for peer in output.peers if output is not None else ():
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
            self._answers[finish.handle].ended = True


def config_of(**given: Any) -> SchedulerConfig:
    values = {"max_running_requests": MAX_SLOTS, "chunked_prefill_size": 0, **given}
    return deployed_config(
        **{"num_pages": NUM_PAGES, "page_size": PAGE_SIZE, "context_len": CONTEXT_LEN, "vocab_size": VOCAB_SIZE, **values}
    )


def ids_of(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(6, VOCAB_SIZE) for _ in range(count))


def targets(rng: random.Random, prompt_tokens: int, new_tokens: int) -> Iterator[Asked]:
    """One prompt, in each way of sampling."""
    prompt = ids_of(rng, prompt_tokens)
    for kind in KINDS:
        yield Asked(prompt, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, top_logprobs=3, **kind))


def alone(executor: Executor, asked: Asked) -> Answer:
    turned = Turned(config_of(enable_radix_cache=False), executor, overlap=False)
    answer = turned.submit(asked)
    turned.finish()
    return answer


def random_context(seed: int, target: Asked, output: Sequence[int]) -> Context:
    """output: what the target says alone; another worker has said part of it, perhaps."""
    rng = random.Random(seed)
    config = config_of(
        num_pages=rng.choice((FEW_PAGES, NUM_PAGES)),
        chunked_prefill_size=rng.choice((0, 0, PAGE_SIZE, 2 * PAGE_SIZE, 5 * PAGE_SIZE, 64, 128)),
        enable_mixed_chunk=rng.random() < 0.5,
        enable_radix_cache=rng.random() < 0.8,
        retract_interval=rng.choice((0, 0, 3, 7, 11)),
        schedule_conservativeness=rng.choice((0.1, 1.0)),
    )
    text = target.prompt + tuple(output)
    before = [_mate(rng) for _ in range(rng.randrange(4))]
    if rng.random() < 0.7:  # a hit of any number of pages, prompt or output
        cached = text[: rng.randint(1, len(text))] + ids_of(rng, rng.randrange(6))
        before.insert(
            rng.randint(0, len(before)), Asked(cached, SamplingParams(max_new_tokens=rng.randint(1, 6), temperature=0.0))
        )
    arrivals = [(rng.randrange(40), _mate(rng)) for _ in range(rng.randrange(14))]
    kept = tuple(output[: rng.randrange(len(output))]) if rng.random() < 0.4 else ()
    return Context(
        config, rng.random() < 0.7, tuple(before), tuple(arrivals), Asked(target.prompt, target.params, kept), rng.randrange(30)
    )


def _mate(rng: random.Random) -> Asked:
    kind = rng.choice(KINDS)
    params = SamplingParams(max_new_tokens=rng.randint(1, 40), top_logprobs=rng.choice((-1, -1, 0, 5)), **kind)
    return Asked(ids_of(rng, rng.choice((1, 3, 17, 40, 100))), params)


def answer_in(context: Context, executor: Executor) -> Answer:
    """Of the target. All others run to their ends too."""
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
