"""Sampling parameters as the scheduler and the executor see them. Plain data; nobody mutates it."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_STREAM_INTERVAL = 1
FORCE_STREAM_INTERVAL = 50  # tokens between messages of a request that does not stream (reference 2 §21)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling and stopping rules, every default resolved.

    temperature: 0 means greedy. top_k: -1 means the whole vocabulary. max_new_tokens: >= 1, already clipped to the
    context. logit_bias: (token id, added to the logit) pairs. seed: 64 bits; with the absolute token position it
    fixes each draw, so a request samples the same tokens whatever shares its batch. top_logprobs: -1 means none wanted,
    0 the sampled token's alone.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    top_logprobs: int = -1
    stream_interval: int = DEFAULT_STREAM_INTERVAL
    skip_special_tokens: bool = True
