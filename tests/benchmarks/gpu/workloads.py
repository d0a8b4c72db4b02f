"""Workloads of random token ids: prompts, and the number of output tokens of each."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NANO_TEMPERATURE = 0.6


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with the same temperature."""

    prompts: tuple[NDArray[np.int32], ...]
    new_tokens: tuple[int, ...]  # output tokens of each request
    temperature: float = 0.0  # 0: greedy

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.new_tokens, strict=True))

    @property
    def input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.new_tokens)


def fixed(count: int, prompt_len: int, new_tokens: int, vocab: int, seed: int) -> Workload:
    ids = np.random.default_rng(seed).integers(0, vocab, (count, prompt_len), dtype=np.int32)
    return Workload(tuple(ids), (new_tokens,) * count)


def nano(count: int, shortest: int, longest: int, vocab: int, seed: int = 0) -> Workload:
    """Returns requests of nano-vllm's benchmark, whose input and output lengths are uniform from `shortest` to `longest`.

    nano-vllm's values are count 256, shortest 100, longest 1024 and seed 0.
    """
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]
    new_tokens = tuple(rng.randint(shortest, longest) for _ in range(count))
    return Workload(tuple(np.array(prompt, dtype=np.int32) for prompt in prompts), new_tokens, NANO_TEMPERATURE)


def shared_prefix(
    count: int, prefix_len: int, suffix_len: int, new_tokens: int, vocab: int, seed: int, ending: int = 0
) -> Workload:
    """Returns prompts with a common prefix. `seed` determines the prefix; `seed` and `ending` determine the suffixes."""
    prefix = np.random.default_rng(seed).integers(0, vocab, prefix_len, dtype=np.int32)
    rng = np.random.default_rng((seed, ending))
    prompts = [np.concatenate([prefix, rng.integers(0, vocab, suffix_len, dtype=np.int32)]) for _ in range(count)]
    return Workload(tuple(prompts), (new_tokens,) * count)
