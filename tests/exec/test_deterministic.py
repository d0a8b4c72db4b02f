"""Deterministic mode of executor and scheduler: the bits of a result depend only on the request."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rootstock_llm.services.worker.core.contracts.cache_groups import CacheGroup
from rootstock_llm.services.worker.core.contracts.plan import EmbeddingParams, SamplingParams
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.contracts.protocol import Executor
from rootstock_llm.services.worker.exec.kernel_set import numerics
from rootstock_llm.services.worker.exec.weights.checkpoint import UnsupportedModel
from tests.exec.driver import Driver, Sequence
from tests.exec.random_contexts import Asked, World, alone, strings, targets
from tests.exec.tiny_models import MODELS, TinyModel
from tests.exec.transformers_families import SERVED
from tests.night import NIGHTLY

WORLD = World()
CONTEXTS = 1000 if NIGHTLY else 24  # number of random contexts, a third per kind of sampling
PROMPT_TOKENS, NEW_TOKENS = 45, 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head size of 64. CPUs with bfloat16 dot products use special kernel tiles for this size."""
    made = tmp_path_factory.mktemp("model")
    TinyModel("Qwen3", {"head_dim": 64, "num_attention_heads": 8, "hidden_size": 128}).build(made)
    return made


def made_of(folder: Path, dtype: str, deterministic: bool = True, kernels: str = "auto") -> Executor:
    return with_groups(folder, dtype, deterministic, kernels)[0]


def with_groups(
    folder: Path, dtype: str, deterministic: bool = True, kernels: str = "auto", quantization: str = "auto"
) -> tuple[Executor, tuple[CacheGroup, ...]]:
    """Returns an executor and the cache groups of its model."""
    options = DeviceOptions(
        device="cpu",
        num_threads=1,
        deterministic=deterministic,
        kernels=kernels,
        quantization=quantization,
        quantize_head=quantization != "auto",
    )
    executor, info = build_device_executor(
        str(folder), dtype, WORLD.page_size, WORLD.max_slots, WORLD.num_pages, 0.5, WORLD.context_len, options, lambda _: None
    )
    return executor, info.groups


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def executor(request: pytest.FixtureRequest, folder: Path) -> Iterator[Executor]:
    made = made_of(folder, request.param)
    yield made
    made.close()


@pytest.mark.by_day(one_in=3, seed=9)
@pytest.mark.parametrize("number", range(3), ids=["greedy", "top-p", "penalties"])
def test_result_has_the_same_bits_in_any_context(executor: Executor, number: int) -> None:
    target = list(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[number]
    assert len(strings(WORLD, executor, target, range(number, CONTEXTS, 3))) == 1


@pytest.mark.by_day(one_in=6, seed=1)
@pytest.mark.parametrize("number", range(3), ids=["greedy", "top-p", "penalties"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_result_of_quantized_weights_has_the_same_bits_in_any_context(
    folder: Path, quantization: str, dtype: str, number: int
) -> None:
    executor, _ = with_groups(folder, dtype, quantization=quantization)
    target = list(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[number]
    assert len(strings(WORLD, executor, target, range(number, CONTEXTS, 3))) == 1
    executor.close()


@pytest.mark.by_day(one_in=12, seed=1)
@pytest.mark.parametrize("number", range(3), ids=["greedy", "top-p", "penalties"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_result_of_quantized_experts_has_the_same_bits_in_any_context(
    quantization: str, dtype: str, number: int, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 96, "mlp_only_layers": []}
    replace(MODELS["qwen3-moe"], options=MODELS["qwen3-moe"].options | sizes).build(tmp_path)
    executor, _ = with_groups(tmp_path, dtype, quantization=quantization)
    target = list(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[number]
    assert len(strings(WORLD, executor, target, range(number, CONTEXTS, 3))) == 1
    executor.close()


@pytest.mark.by_day(one_in=9, seed=2)
@pytest.mark.parametrize("number", range(3), ids=["greedy", "top-p", "penalties"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["qwen3.5-window", "gemma2", "gemma3", "gpt-oss", "mixtral", "qwen3.5-moe"])
def test_result_of_a_model_with_windows_or_states_or_experts_has_the_same_bits_in_any_context(
    name: str, dtype: str, number: int, tmp_path: Path
) -> None:
    MODELS[name].build(tmp_path)
    executor, groups = with_groups(tmp_path, dtype)
    world = replace(WORLD, groups=groups)
    target = list(targets(world, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[number]
    assert groups and len(strings(world, executor, target, range(number, CONTEXTS, 3))) == 1
    executor.close()


def test_result_has_different_bits_without_deterministic_mode(folder: Path) -> None:
    """Uses torch's linear layers, because their sums depend on the number of rows on every CPU.

    The sums of our kernels depend on the number of rows only on some CPUs.
    """
    executor = made_of(folder, "float32", deterministic=False, kernels="torch")
    *_, target = targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS)
    assert any(len(strings(WORLD, executor, target, range(seed, seed + 1))) > 1 for seed in range(40))
    executor.close()


@pytest.mark.by_day(one_in=2)
def test_prompt_logprobs_equal_the_output_logprobs_of_the_same_text(executor: Executor) -> None:
    for target in targets(WORLD, random.Random(6), PROMPT_TOKENS, NEW_TOKENS):
        written = alone(WORLD, executor, target)
        scoring = replace(target.params, max_new_tokens=1, prompt_logprobs_from=PROMPT_TOKENS)
        scored = alone(WORLD, executor, Asked(target.prompt + tuple(written.tokens), scoring))
        values = np.concatenate([part.values for part in scored.scored])
        assert [float(value).hex() for value in values] == [row.sampled.hex() for row in written.logprobs]


def test_mean_embedding_has_the_same_bits_for_any_chunk_size(tmp_path: Path) -> None:
    TinyModel("Qwen3", {}).build(tmp_path)
    kinds = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(kinds))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    executor = made_of(tmp_path, "float32")
    prompt = [7, *range(20, 60)]
    vectors = set()
    for slot, chunk in enumerate((41, 40, 20, 7, 1)):
        sequence = Sequence(prompt, slot, SamplingParams(max_new_tokens=1, embedding=EmbeddingParams()))
        driver = Driver(executor, WORLD.page_size)
        driver.next_page = 16 * slot
        driver.prefill([sequence], chunk)
        vectors.add(sequence.embedding.tobytes() if sequence.embedding is not None else b"")
    assert len(vectors) == 1 and b"" not in vectors
    executor.close()


def test_fingerprint_depends_on_the_dtype(folder: Path) -> None:
    """On one machine, fingerprints of two dtypes differ. Without deterministic mode, the fingerprint is empty."""
    fingerprints = {}
    for dtype, deterministic in (("float32", True), ("bfloat16", True), ("float32", False)):
        options = DeviceOptions(device="cpu", num_threads=1, deterministic=deterministic)
        executor, info = build_device_executor(str(folder), dtype, 8, 2, 8, 0.5, 64, options, lambda _: None)
        executor.close()
        fingerprints[dtype, deterministic] = info.numerics
    assert fingerprints["float32", False] == ""
    expected = [numerics("auto", torch.device("cpu"), dtype, 64, 8) for dtype in (torch.float32, torch.bfloat16)]
    assert [fingerprints["float32", True], fingerprints["bfloat16", True]] == expected
    assert len(set(expected)) == 2


@pytest.mark.by_day(one_in=2, seed=2)
def test_sampled_text_depends_on_the_seed(executor: Executor) -> None:
    """Only the seed determines the output. The worker's gRPC server chooses a seed for a request without one."""
    prompt = next(targets(WORLD, random.Random(7), 9, 1)).prompt
    texts = {
        tuple(
            alone(
                WORLD, executor, Asked(prompt, SamplingParams(max_new_tokens=20, temperature=1.0, seed=seed, ignore_eos=True))
            ).tokens
        )
        for seed in range(5)
    }
    assert len(texts) == 5


@pytest.mark.parametrize(("dtype", "kernels"), [("float16", "auto"), ("float32", "torch")])
def test_deterministic_mode_refuses_dtypes_and_kernels_that_do_not_support_the_mode(
    folder: Path, dtype: str, kernels: str
) -> None:
    with pytest.raises(ValueError, match="deterministic"):
        made_of(folder, dtype, kernels=kernels)


def test_deterministic_mode_refuses_models_that_transformers_computes(tmp_path: Path) -> None:
    SERVED["gpt2"].build(tmp_path)
    with pytest.raises(UnsupportedModel, match="no deterministic mode: transformers' code computes it"):
        made_of(tmp_path, "float32")
