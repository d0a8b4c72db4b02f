"""Compares log probabilities of outputs and prompts, of the actual and the most likely tokens, with transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.exec.device_executors import executor_of
from tests.exec.tiny_models import MODELS
from tests.gpu.served import Served, config_for, greedy
from tests.gpu.truth import logprobs_of, own_logprobs, prompts_of

VOCAB, NEW_TOKENS, TOP = 257, 12, 5
CHOSEN = (0, 9, 256)
NEAR = 1e-3


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("chunk", [16, 256])
def test_logprobs_equal_transformers(chunk: int, tmp_path: Path, device: str) -> None:
    model = MODELS["llama-untied"].build(tmp_path).to(device)
    prompts = prompts_of(VOCAB, (1, 2, 17, 40))
    asked = [
        (prompt, greedy(NEW_TOKENS, top_logprobs=TOP, logprob_token_ids=CHOSEN, prompt_logprobs_from=1)) for prompt in prompts
    ]
    executor = executor_of(tmp_path, device)
    answers = Served(config_for(VOCAB, chunked_prefill_size=chunk, enable_mixed_chunk=True), executor).run(asked)
    executor.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = prompt + answer.tokens
        truth = logprobs_of(model, whole).cpu()
        own = answer.prompt_values + answer.sampled_logprobs
        torch.testing.assert_close(torch.tensor(own), own_logprobs(model, whole).cpu(), atol=NEAR, rtol=0)
        top, ids = truth[len(prompt) - 1 :].topk(TOP)
        torch.testing.assert_close(torch.tensor([row.top for row in answer.logprobs]), top, atol=NEAR, rtol=0)
        assert [row.top_ids[0] for row in answer.logprobs] == ids[:, 0].tolist() == answer.tokens
        chosen = truth[len(prompt) - 1 :][:, list(CHOSEN)]
        torch.testing.assert_close(torch.tensor([row.chosen for row in answer.logprobs]), chosen, atol=NEAR, rtol=0)
        pieces = [torch.from_numpy(piece.top) for piece in answer.prompt_logprobs if len(piece.values)]
        if pieces:
            torch.testing.assert_close(torch.cat(pieces), truth[: len(prompt) - 1].topk(TOP).values, atol=NEAR, rtol=0)
