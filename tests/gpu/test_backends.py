"""Tests each attention backend with several page sizes, with and without a sliding window."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.exec.device_executors import executor_of
from tests.exec.tiny_models import MODELS, TinyModel
from tests.gpu.served import Served, config_for, greedy
from tests.gpu.test_parity import MIDDLE, assert_near
from tests.gpu.truth import generated, prompts_of

VOCAB, NEW_TOKENS = 257, 24
MIDDLE_WINDOW = TinyModel("Mistral", {**MIDDLE.options, "sliding_window": 48, "bos_token_id": None})
needs_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")


@pytest.mark.by_day(one_in=12, seed=8)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("model_name", ["qwen3", "mistral-window"])
@pytest.mark.parametrize("name", ["triton", "torch"])
def test_each_back_end_gives_the_tokens_of_transformers_in_float32(
    name: str, model_name: str, page_size: int, tmp_path: Path, device: str
) -> None:
    model = MODELS[model_name].build(tmp_path).to(device)
    prompts = prompts_of(VOCAB, (1, 7, 16, 65, 130))
    want = [generated(model, prompt, NEW_TOKENS) for prompt in prompts]
    num_pages = 2048 // page_size
    executor = executor_of(tmp_path, device, page_size, num_pages=num_pages, attention_backend=name, cuda_graphs=name == "triton")
    config = config_for(VOCAB, page_size=page_size, num_pages=num_pages, enable_mixed_chunk=True, chunked_prefill_size=32)
    answers = Served(config, executor).run([(prompt, greedy(NEW_TOKENS)) for prompt in prompts])
    assert [answer.tokens for answer in answers] == want
    executor.close()


@pytest.mark.by_day(one_in=4, seed=2)
@needs_flashinfer
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", [MIDDLE, MIDDLE_WINDOW], ids=["full", "window"])
def test_flashinfer_results_in_bf16_are_near_float32_results(
    shape: TinyModel, page_size: int, tmp_path: Path, device: str
) -> None:
    model = shape.build(tmp_path, torch.bfloat16).to(device)
    num_pages = 4096 // page_size
    executor = executor_of(tmp_path, device, page_size, num_pages=num_pages, dtype="bfloat16", attention_backend="flashinfer")
    assert_near(model, executor, int(model.config.vocab_size), page_size=page_size, num_pages=num_pages)
    executor.close()


@needs_flashinfer
def test_flashinfer_gives_the_same_logprobs_with_and_without_graphs(tmp_path: Path, device: str) -> None:
    """Compares log probabilities instead of tokens, because rounding may change one token and then all later ones."""
    MIDDLE.build(tmp_path, torch.bfloat16)
    vocab = int(MIDDLE.options["vocab_size"])
    prompts = prompts_of(vocab, (3, 30, 64, 100, 200))
    found = []
    for graphs in (True, False):
        executor = executor_of(tmp_path, device, dtype="bfloat16", attention_backend="flashinfer", cuda_graphs=graphs)
        asked = [(prompt, greedy(NEW_TOKENS, top_logprobs=0)) for prompt in prompts]
        answers = Served(config_for(vocab), executor).run(asked)
        found.append(answers)
        executor.close()
    for mine, other in zip(*found, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(mine.tokens, other.tokens, strict=True)) if a != b), NEW_TOKENS)
        assert same >= 1
        near = torch.tensor(mine.sampled_logprobs[:same]) - torch.tensor(other.sampled_logprobs[:same])
        assert float(near.abs().max()) < 0.05
