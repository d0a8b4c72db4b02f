"""Workloads of the comparison of engines, and the limits that all engines share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

KV_TOKENS = 32_768  # tokens for which each engine gets KV memory
TEXT_SHARE = 0.9  # ids are drawn from this first part of the vocabulary, because the last ids are special tokens
WARM_UP_TOKENS = 8  # most output tokens of the request before each workload


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one length. The prompts of a group begin with the same tokens."""

    groups: int
    prompts: int  # prompts per group
    shared_len: int  # tokens at the start of a prompt that its group shares; 0: no prefix is shared
    input_len: int  # tokens of a prompt, with the shared ones
    output_len: int  # tokens that each prompt gets
    in_flight: int  # requests at once; the next request starts when one ends

    @property
    def tokens(self) -> int:
        """Tokens that the rate counts: output tokens, and with a shared prefix also the tokens of all prompts."""
        return self.groups * self.prompts * (self.output_len + (self.input_len if self.shared_len else 0))

    def draw(self, vocab: int, seed: tuple[int, ...]) -> list[list[int]]:
        """Returns random prompts, which are equal for equal seeds. The prompts of different groups are mixed."""
        draws, ids = np.random.default_rng(seed), int(vocab * TEXT_SHARE)
        shared = draws.integers(0, ids, (self.groups, 1, self.shared_len)).repeat(self.prompts, axis=1)
        own = draws.integers(0, ids, (self.groups, self.prompts, self.input_len - self.shared_len))
        prompts = np.concatenate([shared, own], axis=2).reshape(-1, self.input_len)
        return [[int(token) for token in prompt] for prompt in draws.permutation(prompts)]


WORKLOADS = {
    "1": Workload(1, 4, 0, 256, 64, in_flight=1),
    "8": Workload(1, 32, 0, 256, 64, in_flight=8),
    "32": Workload(1, 64, 0, 256, 64, in_flight=32),
    "shared": Workload(4, 8, 1024, 1088, 32, in_flight=16),
}
SMOKE_WORKLOADS = {
    "1": Workload(1, 2, 0, 16, 4, in_flight=1),
    "8": Workload(1, 3, 0, 16, 4, in_flight=2),
    "32": Workload(1, 5, 0, 16, 4, in_flight=4),
    "shared": Workload(2, 2, 64, 80, 4, in_flight=2),
}


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts for an engine, and the number of requests in flight."""

    prompts: list[list[int]]
    output_len: int
    in_flight: int


def jobs(workload: Workload, model: Path, seed: tuple[int, ...]) -> tuple[Job, Job]:
    """Returns a warm-up job of one prompt, and the measured job. The two share no prompt."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    (warm_up, *_), prompts = workload.draw(vocab, (*seed, 1)), workload.draw(vocab, (*seed, 0))
    return Job([warm_up], min(WARM_UP_TOKENS, workload.output_len), 1), Job(prompts, workload.output_len, workload.in_flight)
