"""Runs the device executor with Triton kernels only: layers, attention and sampling, from the request to the completion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rootstock_llm.kernels.triton.layers.layers import TritonLayers
from rootstock_llm.services.worker.core.contracts.messages import FinishReason
from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from rootstock_llm.services.worker.core.planning.draft_controller import DraftController
from rootstock_llm.services.worker.exec.attention.triton_backend import TritonAttention
from rootstock_llm.services.worker.exec.build import DeviceParts, assemble_executor, build_device_executor
from rootstock_llm.services.worker.exec.loading import load_model
from rootstock_llm.services.worker.exec.weights.load_request import LoadRequest, LoadTarget
from rootstock_llm.services.worker.exec.weights.weight_stream import StreamOptions, stream_weights
from tests.exec.always_guessing import always
from tests.exec.device_executors import options_for
from tests.exec.draft_folders import add_mtp
from tests.exec.tiny_models import TinyModel
from tests.gpu.served import Served, config_for, greedy
from tests.gpu.truth import generated, own_logprobs, prompts_of
from tests.night import NIGHTLY

VOCAB, NEW_TOKENS, PAGE_SIZE, PAGES, CONTEXT = 67, 4, 4, 16, 32
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 1, "head_dim": 16, "max_position_embeddings": 64}
MODEL = TinyModel("Qwen3", SIZES)
MIXTURE = TinyModel("Qwen3Moe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24})
GPT_OSS = TinyModel("GptOss", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"]})


@pytest.mark.by_day(one_in=3, seed=1)
@pytest.mark.parametrize("tiny", [MODEL, MIXTURE, GPT_OSS], ids=["dense", "experts", "sinks"])
def test_executor_completes_greedy_and_sampled_requests(tiny: TinyModel, tmp_path: Path, device: torch.device) -> None:
    """A greedy request runs together with a request that uses most sampling parameters; the longer prompt is chunked."""

    def weights(checkpoint: Any, read: Any, dtype: Any, kernels: Any, progress: Any, phases: Any, quantization: Any) -> Any:
        options = StreamOptions(threads=1)
        return stream_weights(checkpoint, read, dtype, device, kernels, options, progress, phases, quantization=quantization)

    model = tiny.build(tmp_path).to(device)
    prompts = prompts_of(VOCAB, (2, 11))
    drawn = SamplingParams(
        max_new_tokens=3,
        temperature=0.8,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        frequency_penalty=0.3,
        banned_token_ids=(4, 7),
        logit_bias=((9, 1.0),),
        seed=4,
        ignore_eos=True,
        top_logprobs=2,
        prompt_logprobs_from=1,
    )
    target = LoadTarget(device, lambda _: TritonLayers(device), weights)
    loaded = load_model(LoadRequest(tmp_path, "float32", PAGE_SIZE, CONTEXT, 1, lambda _: None, target=target))
    parts = DeviceParts(attention=lambda shape: TritonAttention(shape, device))
    options = options_for(str(device), kernels="triton", max_tokens=16)
    executor, pages = assemble_executor(loaded, 2, PAGE_SIZE, PAGES, 0.5, options, lambda _: None, True, parts)
    limits = {"chunked_prefill_size": 8, "max_prefill_tokens": 16, "enable_mixed_chunk": True}
    config = config_for(VOCAB, num_pages=pages, page_size=PAGE_SIZE, context_len=CONTEXT, max_running_requests=2, **limits)
    first, second = Served(config, executor).run([(prompts[0], greedy(NEW_TOKENS)), (prompts[1], drawn)])
    executor.close()
    assert first.tokens == generated(model, prompts[0], NEW_TOKENS)
    assert second.finish is not None and second.finish.reason is FinishReason.LENGTH, second.finish
    assert len(second.tokens) == 3 and not {4, 7} & set(second.tokens)
    own = torch.tensor(second.prompt_values + second.sampled_logprobs)
    torch.testing.assert_close(own, own_logprobs(model, prompts[1] + second.tokens).cpu(), atol=1e-3, rtol=0)


@pytest.mark.skipif(not NIGHTLY, reason="takes minutes; runs only with ROOTSTOCK_TEST_NIGHTLY=1")
def test_executor_verifies_draft_tokens_of_an_mtp_layer(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's MTP layer drafts two tokens per step with the same kernels.

    With draft tokens, each column of a sampling call is a slice of a larger tensor. The kernels must accept such slices.
    """
    model = MODEL.build(tmp_path).to(device)
    add_mtp(tmp_path, deepseek=False)
    monkeypatch.setattr(DraftController, "choose", always)
    algorithm = {"max_drafts": 2, "speculative_algorithm": "mtp"}
    options = options_for(str(device), kernels="triton", max_tokens=16, **algorithm)
    parts = DeviceParts(attention=lambda shape: TritonAttention(shape, device))
    sizes = (PAGE_SIZE, 1, PAGES, 0.5, CONTEXT)
    executor, _ = build_device_executor(str(tmp_path), "float32", *sizes, options, lambda _: None, True, parts)
    limits = {"num_pages": PAGES, "page_size": PAGE_SIZE, "context_len": CONTEXT, "max_running_requests": 1}
    (prompt,) = prompts_of(VOCAB, (2,))
    (completion,) = Served(config_for(VOCAB, max_drafts=2, **limits), executor).run([(prompt, greedy(NEW_TOKENS))])
    executor.close()
    assert completion.tokens == generated(model, prompt, NEW_TOKENS)
    assert completion.finish is not None and completion.finish.verified.drafted > 0
