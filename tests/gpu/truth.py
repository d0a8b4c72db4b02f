"""Outputs and log probabilities of transformers' models on the same device, with which tests compare ours."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LENGTHS = (1, 2, 3, 5, 8, 16, 17, 33, 80, 130)


def prompts_of(vocab: int, lengths: Sequence[int] = LENGTHS, seed: int = 11) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(6, vocab) for _ in range(length)] for length in lengths]


def generated(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Returns the greedy output of transformers for a single prompt."""
    ids = torch.tensor([list(prompt)], device=model.device)
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
    return out[0, len(prompt) :].tolist()


def logprobs_of(model: Any, ids: Sequence[int]) -> Tensor:
    """Returns log probabilities, float32[len(ids) - 1, V]. Row i has those of the token after ids[: i + 1]."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(ids)], device=model.device)).logits[0, :-1]
    return logits.float().log_softmax(dim=-1)


def own_logprobs(model: Any, ids: Sequence[int]) -> Tensor:
    """Returns the log probability of each token after the first, float32[len(ids) - 1]."""
    following = torch.tensor(list(ids[1:]), device=model.device)
    return logprobs_of(model, ids).gather(1, following[:, None]).squeeze(1)
