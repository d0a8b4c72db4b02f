"""A request that stops on one engine after various numbers of tokens gets the rest of its output on a second engine.

The engines run the demo model on the CPU in float32, with its tokenizer and grammars.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec, Matcher
from rootstock_llm.services.worker.core.contracts.messages import Finish, FinishReason, Submit
from rootstock_llm.services.worker.core.contracts.plan import DryParams, SamplingParams
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.exec.contracts.protocol import Run
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from rootstock_llm.services.worker.loop.text_rules import ModelText
from tests.core.deployed_config import deployed_config
from tests.exec.host_executors import build_host_executor
from tests.grammar import model

VOCAB, CONTEXT, PAGE, OUTPUTS = 1280, 512, 4, 40
TEXT = "The stars were bright over the quiet harbour, and nobody in the little town knew how the old lantern came to be there"
PROMPT = f"<|im_start|>user\nRepeat: {TEXT}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Book:
    """A grammar book that compiles a grammar when it is requested."""

    jump: bool

    def open(self, spec: GrammarSpec, tenant: bytes = b"") -> Matcher:
        return model.matcher(model.compiled(spec), self.jump)


@dataclass
class Engine:
    """A worker's scheduler core with its executor. The test runs the iterations of the scheduler loop."""

    executor: DeviceExecutor
    jump: bool = True
    prev: Run | None = None
    rest: dict[int, list[int]] = field(default_factory=dict)  # by handle: tokens that this engine has output
    logprobs: dict[int, list[float]] = field(default_factory=dict)  # by handle: log probabilities of the tokens in `rest`
    finishes: dict[int, Finish] = field(default_factory=dict)  # by handle

    def __post_init__(self) -> None:
        config = deployed_config(
            400, PAGE, CONTEXT, VOCAB, eos_token_ids=model.EOS, max_running_requests=8, chunked_prefill_size=16
        )
        self.core = Scheduler(config, ModelText(model.tokenizer()), Book(self.jump))

    def run(self, wishes: Sequence[tuple[Sequence[int], SamplingParams]]) -> None:
        """Runs requests with the same prompt until all have ended.

        Args:
            wishes: (output of an earlier engine, sampling parameters) of each request.
        """
        (prompt,) = model.tokenizer().encode_batch([PROMPT], True)
        ids = np.array(prompt, dtype=np.int32)
        for handle, (output, params) in enumerate(wishes):
            self.rest[handle], self.logprobs[handle] = [], []
            self.core.submit(Submit(0, handle, f"r{handle}", ids, params, output_ids=tuple(output)), 0.0)
        while not self.core.idle or self.prev is not None:
            self._turn()
        self._take()

    def _turn(self) -> None:
        plan = self.core.plan(0.0)
        run = self.executor.forward(plan) if plan is not None else None
        if self.prev is not None:
            self.core.commit(self.executor.wait(self.prev), 0.0)
        if run is not None:
            self.executor.sample(run, {row: matcher.mask() for row, matcher in self.core.matchers()})
        self.prev = run
        self._take()

    def _take(self) -> None:
        outputs = self.core.take_output()
        for peer in outputs:
            tokens = iter(peer.tokens)
            for handle, count in zip(peer.handles, peer.counts, strict=True):
                self.rest[handle] += [next(tokens) for _ in range(count)]
            for handle, rows in peer.logprobs:
                self.logprobs[handle] += [row.sampled for row in rows]
            self.finishes.update({finish.handle: finish for finish in peer.finishes})


@pytest.fixture(scope="module")
def executors() -> Iterator[list[DeviceExecutor]]:
    made = [
        build_host_executor(str(model.DEMO), "float32", PAGE, 8, 400, 0.5, CONTEXT, 1, lambda _: None, check_relay=True)[0]
        for _ in range(2)
    ]
    yield made
    for executor in made:
        executor.close()


def params_of(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": OUTPUTS, "temperature": 0.0, "ignore_eos": True, **values})


DRAWN = {"temperature": 1.0, "seed": 77}
SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"const": "naive world"}, "age": {"type": "integer"}, "mood": {"enum": ["calm", "cheerful"]}},
    "required": ["first_name", "age", "mood"],
}
JSON = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
WISHES = {
    "greedy": params_of(),
    "drawn": params_of(**DRAWN, top_p=0.95, top_k=200, min_p=0.001),
    "penalties": params_of(**DRAWN, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.2),
    "dry": params_of(dry=DryParams(2.0, 1.75, 1), temperature=0.7, seed=3),
    "bias and bans": params_of(**DRAWN, logit_bias=((100, 3.0),), banned_token_ids=tuple(range(20, 60))),
    "min new tokens": params_of(**DRAWN, ignore_eos=False, min_new_tokens=25, logit_bias=((2, 9.0),)),
    "logprobs": params_of(**DRAWN, top_logprobs=2, prompt_logprobs_from=0),
    "grammar": params_of(**DRAWN, max_new_tokens=120, grammar=JSON),
    "grammar with penalties": params_of(**DRAWN, max_new_tokens=120, grammar=JSON, repetition_penalty=1.1),
}


def cuts_of(length: int) -> list[int]:
    return sorted({1, 2, length // 3, length // 2, length - 1, length} - {0})


def check_cuts(executors: list[DeviceExecutor], params: SamplingParams, jump: bool = True) -> list[int]:
    """Runs the request on the first engine, then resumes it on the second one after various numbers of tokens.

    Each resumed request must get the rest of the output. Returns the whole output.
    """
    whole = Engine(executors[0], jump)
    whole.run([((), params)])
    output, finish = whole.rest[0], whole.finishes[0]
    assert finish.reason is not FinishReason.ABORT, finish
    cuts = cuts_of(len(output))
    second = Engine(executors[1], jump)
    second.run([(output[:cut], params) for cut in cuts])
    for handle, cut in enumerate(cuts):
        assert second.rest[handle] == output[cut:], f"resumed after {cut} of {len(output)} tokens"
        np.testing.assert_allclose(second.logprobs[handle], whole.logprobs[0][cut:], atol=1e-4)
        ended = second.finishes[handle]
        assert (ended.reason, ended.matched_token, ended.matched_stop) == (
            finish.reason,
            finish.matched_token,
            finish.matched_stop,
        )
        assert (ended.prompt_tokens, ended.completion_tokens) == (finish.prompt_tokens, finish.completion_tokens)
        assert ended.cached_tokens <= ended.prompt_tokens
    return output


@pytest.mark.by_day(one_in=2, seed=70)
@pytest.mark.parametrize("wish", WISHES)
def test_resumed_request_gets_the_rest_of_the_output(executors: list[DeviceExecutor], wish: str) -> None:
    output = check_cuts(executors, WISHES[wish])
    assert len(set(output)) > 8, "the output must be varied, or the comparison finds no errors"


def test_resumed_request_follows_the_grammar_without_forced_tokens(executors: list[DeviceExecutor]) -> None:
    text = model.tokenizer().decode(check_cuts(executors, WISHES["grammar"], jump=False), True)
    assert json.loads(text)["first_name"] == "naive world"


def test_each_set_of_parameters_gives_another_output(executors: list[DeviceExecutor]) -> None:
    """These four cases must have different outputs. Otherwise, the comparisons above would not test their parameters."""
    engine = Engine(executors[0])
    engine.run([((), WISHES[wish]) for wish in ("greedy", "drawn", "penalties", "dry")])
    assert len({tuple(engine.rest[handle]) for handle in range(4)}) == 4


@pytest.mark.parametrize("rule", ["stop", "stop_regex"])
def test_stop_string_matches_when_the_request_is_resumed_within_the_string(executors: list[DeviceExecutor], rule: str) -> None:
    whole = Engine(executors[0])
    whole.run([((), WISHES["drawn"])])
    tokens = whole.rest[0]
    text = model.tokenizer().decode(tokens[14:19], True).strip()
    assert text.isprintable() and len(text) > 6
    pattern = "".join(f"[{char}]" if char.isalnum() or char == " " else "." for char in text)
    wanted = params_of(**DRAWN, top_p=0.95, top_k=200, min_p=0.001, **{rule: (text if rule == "stop" else pattern,)})
    stopped = Engine(executors[0])
    stopped.run([((), wanted)])
    output = stopped.rest[0]
    assert stopped.finishes[0].reason in (FinishReason.MATCHED_STRING, FinishReason.MATCHED_REGEX) and len(output) == 19
    second = Engine(executors[1])
    second.run([(output[:cut], wanted) for cut in range(13, 20)])
    for handle, cut in enumerate(range(13, 20)):
        assert second.rest[handle] == output[cut:], cut
        assert second.finishes[handle].matched_stop == stopped.finishes[0].matched_stop
