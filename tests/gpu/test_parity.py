"""Compares the device executor with transformers: equal tokens in float32, and in bf16 no larger errors than transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exec.device_executors import executor_of
from tests.exec.tiny_models import MODELS, SHAPE, TinyModel
from tests.gpu.served import Served, config_for, greedy
from tests.gpu.truth import generated, own_logprobs, prompts_of

NEW_TOKENS = 32
VOCAB = int(SHAPE["vocab_size"])  # type: ignore[call-overload]
MIDDLE = TinyModel(
    "Qwen3",
    {
        "vocab_size": 16_384,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "initializer_range": 0.02,
    },
)


@pytest.mark.by_day(one_in=8, seed=1)
@pytest.mark.parametrize("name", MODELS)
def test_executor_gives_the_tokens_of_transformers_in_float32(name: str, tmp_path: Path, device: str) -> None:
    model = MODELS[name].build(tmp_path).to(device)
    prompts = prompts_of(VOCAB)
    want = [generated(model, prompt, NEW_TOKENS) for prompt in prompts]
    executor = executor_of(tmp_path, device)
    for overlap, mixed in ((True, True), (False, False)):
        config = config_for(VOCAB, enable_mixed_chunk=mixed, chunked_prefill_size=64)
        answers = Served(config, executor, overlap).run([(prompt, greedy(NEW_TOKENS)) for prompt in prompts])
        assert [answer.tokens for answer in answers] == want
    executor.close()


@pytest.mark.by_day(one_in=5, seed=7)
@pytest.mark.parametrize("name", ["llama-untied", "mistral-window", "qwen2", "qwen3", "middle"])
def test_bf16_results_are_as_near_to_float32_as_bf16_results_of_transformers(name: str, tmp_path: Path, device: str) -> None:
    shape = MIDDLE if name == "middle" else MODELS[name]
    model = shape.build(tmp_path, torch.bfloat16).to(device)
    vocab = int(model.config.vocab_size)
    executor = executor_of(tmp_path, device, dtype="bfloat16")
    assert_near(model, executor, vocab)
    executor.close()


def assert_near(model: Any, executor: Any, vocab: int, **config: Any) -> None:
    """Compares the log probabilities of all prompt and output tokens with float32.

    Args:
        model: transformers' model in bf16. The function converts it to float32.
    """
    prompts = prompts_of(vocab, (2, 17, 130, 300))
    asked = [(prompt, greedy(NEW_TOKENS, prompt_logprobs_from=1, top_logprobs=0)) for prompt in prompts]
    answers = Served(config_for(vocab, **config), executor).run(asked)
    wholes = [prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)]
    ours = torch.tensor([v for answer in answers for v in answer.prompt_values + answer.sampled_logprobs])
    theirs = torch.cat([own_logprobs(model, whole) for whole in wholes]).cpu()
    model.float()
    truth = torch.cat([own_logprobs(model, whole) for whole in wholes]).cpu()
    assert len(ours) == len(truth) == sum(len(whole) - 1 for whole in wholes)
    mine, other = (ours - truth).abs(), (theirs - truth).abs()
    assert float(mine.mean()) <= 1.5 * float(other.mean()) + 2e-3, (mine.mean(), other.mean())
    assert float(mine.quantile(0.99)) <= 2 * float(other.quantile(0.99)) + 1e-2, (mine.quantile(0.99), other.quantile(0.99))
    assert float(mine.max()) <= 4 * float(other.max()) + 2e-2, (
        mine.max(),
        other.max(),
    )  # rounding causes few large errors, but reading a wrong page causes errors of several nats
