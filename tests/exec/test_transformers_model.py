"""Models that run transformers' code compute equal logits with our paged attention and with their own attention."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from rootstock_llm.services.worker.exec.models import transformers_check
from rootstock_llm.services.worker.exec.models.registry import NotCovered, config_of
from rootstock_llm.services.worker.exec.models.transformers_check import MaskDescription, MaskFunction, Probe
from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError, UnsupportedModel
from tests.exec.driver import Driver, Sequence, greedy
from tests.exec.host_executors import build_host_executor
from tests.exec.tiny_models import SHAPE, TinyModel
from tests.exec.transformers_families import REFUSED, SERVED

PAGE_SIZE = 4
NUM_NEW = 12
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
REASONS = {
    "diffllama": "does not compute exactly one attention per layer",
    "xglm": "has attention that transformers cannot replace",
    "bloom": "has attention that transformers cannot replace",
    "falcon": "has attention that transformers cannot replace",
    "mpt": "has attention that transformers cannot replace",
    "gptj": "has attention that transformers cannot replace",
    "codegen": "has attention that transformers cannot replace",
    "lfm2": "has layers of type conv; only full_attention and sliding_attention are supported",
    "mamba": "has layers of type linear_attention",
    "mamba2": "has layers of type linear_attention",
    "falcon-h1": "has layers of type hybrid",
    "qwen3-next": "has layers of type linear_attention",
    "recurrent-gemma": "has layers of type",
    "llama4-text": "has layers of type chunked_attention",
    "deepseek-v4": "has layers of type heavily_compressed_attention",
    "minimax-m3": "has layers of type minimax_m3_sparse",
    "deepseek-v3.2": "has layers of type indexed_attention",
    "glm-5": "has layers of type indexed_attention",
    "t5": "T5ForConditionalGeneration is not supported",
    "llava": "LlavaForConditionalGeneration is not supported",
}


@contextmanager
def serving(folder: Path, dtype: str = "auto", context_len: int | None = None) -> Iterator[tuple[Driver, LoadedInfo]]:
    executor, info = build_host_executor(
        str(folder), dtype, PAGE_SIZE, 8, 256, 0.5, context_len, 1, lambda _: None, check_relay=True
    )
    try:
        yield Driver(executor, PAGE_SIZE), info
    finally:
        executor.close()


def refusal(folder: Path) -> str:
    with pytest.raises(UnsupportedModel) as caught, serving(folder):
        pass
    return str(caught.value)


def ids_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 257, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_three(driver: Driver) -> list[Sequence]:
    """Runs three prompts and decodes: the first in chunks, the second with 16 cached tokens of the first, the third whole."""
    params = greedy(NUM_NEW, top_logprobs=20)
    first = Sequence(ids_of(41, 1), 0, params)
    second = Sequence(first.prompt[:16] + ids_of(9, 2), 3, params)
    third = Sequence(ids_of(3, 3), 1, params)
    driver.prefill([first], 16)
    second.pages, second.computed = first.pages[: 16 // PAGE_SIZE], 16
    driver.step([(second, 9), (third, 3), (first, 1)])
    driver.decode([first, second, third], NUM_NEW)
    return [first, second, third]


def expect_own_numbers(model: Any, sequence: Sequence, tolerance: float) -> None:
    """Compares greedy tokens and top log probabilities with the logits of transformers' model for the whole sequence."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([sequence.tokens]), use_cache=False).logits[0].float()
    expected = logits.log_softmax(-1)[len(sequence.prompt) - 1 : -1]
    assert sequence.output == expected.argmax(-1).tolist()
    for row, own in zip(sequence.logprobs, expected, strict=True):
        assert list(row.top) == pytest.approx(own.topk(20).values.tolist(), abs=tolerance)
        assert [float(own[token]) for token in row.top_ids] == pytest.approx(list(row.top), abs=tolerance)


@pytest.mark.by_day(one_in=4, seed=5)
@pytest.mark.parametrize("name", SERVED)
def test_paged_attention_equals_transformers_with_chunks_and_cached_pages_and_batches(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = SERVED[name].build(tmp_path)
    with serving(tmp_path) as (driver, _):
        sequences = run_three(driver)
    assert len({token for sequence in sequences for token in sequence.output}) > 1, "the outputs must have different tokens"
    for sequence in sequences:
        expect_own_numbers(model, sequence, 1e-3)


@pytest.mark.by_day(one_in=4, seed=4)
@pytest.mark.parametrize("name", ["gemma2-dynamic-rope", "gpt2", "qwen2-moe", "gpt-oss-dynamic-rope"])
def test_paged_attention_is_close_to_transformers_in_half_precision(name: str, tmp_path: Path) -> None:
    model = SERVED[name].build(tmp_path)
    sequence = Sequence(ids_of(30, 5), 0, greedy(1, top_logprobs=5))
    with serving(tmp_path, "bfloat16") as (driver, info):
        driver.prefill([sequence], 12)
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([sequence.prompt])).logits[0, -1].float().log_softmax(-1)
    assert info.dtype == "bfloat16"
    assert [float(own[token]) for token in sequence.logprobs[0].top_ids] == pytest.approx(list(sequence.logprobs[0].top), abs=0.6)


@pytest.mark.by_day(one_in=3, seed=27)
@pytest.mark.parametrize("name", REFUSED)
def test_loading_refuses_models_that_paged_attention_cannot_compute(name: str, tmp_path: Path) -> None:
    REFUSED[name].build(tmp_path)
    assert REASONS[name] in refusal(tmp_path)


def test_check_of_a_model_finds_a_state_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, "conv")
    REFUSED["lfm2"].build(tmp_path)
    assert "paged attention computes other results" in refusal(tmp_path)


def allow(monkeypatch: pytest.MonkeyPatch, *types: str) -> None:
    monkeypatch.setattr(transformers_check, "LAYER_TYPES", transformers_check.LAYER_TYPES | set(types))


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("name", ["deepseek-v4", "minimax-m3", "deepseek-v3.2", "glm-5", "mamba", "lfm2"])
def test_loading_refuses_layer_types_before_the_weights_are_read(name: str, tmp_path: Path) -> None:
    REFUSED[name].build(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert REASONS[name] in refusal(tmp_path)


def test_loading_refuses_unknown_layer_types(tmp_path: Path) -> None:
    SERVED["gemma2"].build(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.layer_types = ["full_attention", "folded_attention", "sliding_attention"]
    with pytest.raises(UnsupportedModel, match="Gemma2ForCausalLM has layers of type folded_attention"):
        transformers_check.refuse_by_config(config, None)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_registry_refuses_unsupported_layer_types(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(
        **SHAPE, layer_types=["full_attention", "indexed_attention", "full_attention"], architectures=[f"{family}ForCausalLM"]
    )
    with pytest.raises(NotCovered, match="indexed_attention"):
        config_of(config)


@pytest.mark.parametrize("window", [100, 150])
def test_check_of_a_model_finds_an_ignored_window(window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TinyModel("Cohere2", {"head_dim": 16, "sliding_window": window}).build(tmp_path)
    monkeypatch.setattr(Probe, "_window", lambda *_: 0)
    assert "paged attention computes other results" in refusal(tmp_path)


DEEP = {**SERVED["gpt-oss-dynamic-rope"].options, "num_hidden_layers": 24, "sliding_window": 128}


def test_loading_accepts_a_deep_model_with_experts_and_windows_in_half_precision(tmp_path: Path) -> None:
    TinyModel("GptOss", DEEP).build(tmp_path, torch.bfloat16)
    with serving(tmp_path, "bfloat16") as (_, info):
        assert info.dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_check_of_a_model_finds_one_layer_with_a_halved_window(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Probe.record

    def halved(probe: Probe, module: Any, *others: Any) -> None:
        whole(probe, module, *others)
        if module.layer_idx == 2:
            assert probe.layers[2].kv.window == 128
            probe.layers[2] = replace(probe.layers[2], kv=replace(probe.layers[2].kv, window=64))

    monkeypatch.setattr(Probe, "record", halved)
    TinyModel("GptOss", DEEP).build(tmp_path, dtype)
    assert "paged attention computes other results" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["deepseek-v4", "minimax-m3"])
def test_check_of_a_model_refuses_compressed_and_sparse_layers_when_all_types_are_allowed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, "heavily_compressed_attention", "minimax_m3_sparse")
    REFUSED[name].build(tmp_path)
    assert "attention" in refusal(tmp_path)


@pytest.mark.by_day(one_in=2, seed=29)
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, []),
        ({"sliding_window": 128}, [128]),
        ({"sliding_window": 4096}, []),
        ({"attention_chunk_size": 8192, "chunk_size_feed_forward": 7}, []),
        ({"compress_rates": {"heavily_compressed_attention": 128, "other": 4}}, [128, 4]),
        ({"compress_rates": [4, 128, 4]}, [4, 128, 4]),
        ({"index_block_size": 128, "index_topk_blocks": 16}, [128]),
        ({"keep_window_size": 2048, "mamba_chunk_size": 256, "attention_dropout_rate": 0}, [2048]),
    ],
    ids=["none", "window", "long window", "masked chunk", "rates by type", "rates by layer", "block", "other keys"],
)
def test_attention_sizes_below_the_context_are_found_in_the_config(options: dict[str, Any], sizes: list[int]) -> None:
    assert [size for _, size in transformers_check.named_sizes(transformers.LlamaConfig(**options))] == sizes


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize(
    ("options", "context_len", "tokens"),
    [
        ({}, 4096, 160),
        ({}, 64, 64),
        ({"sliding_window": 1024}, 4096, 1048),
        ({"sliding_window": 4096}, 8192, 160),
        ({"compress_rates": {"a": 128, "b": 512}}, 8192, 536),
        ({"index_block_size": 512}, 256, 160),
    ],
)
def test_long_trial_is_longer_than_each_attention_size_that_trials_cover(
    options: dict[str, Any], context_len: int, tokens: int
) -> None:
    trial = transformers_check.long_trial(transformers.LlamaConfig(**options), context_len)
    assert len(trial.ids[0]) == tokens


def test_error_names_the_config_key_of_an_attention_size_beyond_all_trials() -> None:
    config = transformers.LlamaConfig(index_block_size=4096, max_position_embeddings=8192, architectures=["LlamaForCausalLM"])
    with pytest.raises(UnsupportedModel, match=r"has index_block_size 4096; .* Set context_len to 4096 or less"):
        transformers_check.refuse_by_config(config, None)
    transformers_check.refuse_by_config(config, 4096)


@pytest.mark.by_day(one_in=2, seed=6)
@pytest.mark.parametrize(
    ("window", "allows", "fits"),
    [
        (0, lambda _, __, q, k: k <= q, True),
        (24, lambda _, __, q, k: (k <= q) & (k > q - 24), True),
        (24, lambda _, __, q, k: (k <= q) & (k > q - 25), False),
        (24, lambda _, __, q, k: (k <= q) & (k // 24 == q // 24), False),
        (0, lambda _, __, q, k: (k <= q) & (k > q - 4000), False),
        (0, lambda _, __, q, k: k <= q + 1, False),
    ],
    ids=["causal", "window", "another-window", "chunks", "unnamed-window", "looks-ahead"],
)
def test_is_causal_window_checks_a_mask_to_the_end_of_the_context(window: int, allows: MaskFunction, fits: bool) -> None:
    assert MaskDescription(allows, window).is_causal_window(8192) is fits


def test_executor_info_describes_a_transformers_model(tmp_path: Path) -> None:
    SERVED["gemma2-dynamic-rope"].build(tmp_path)
    with serving(tmp_path, context_len=100) as (_, info):
        pass
    assert (info.architecture, info.vocab_size, info.context_len, info.dtype) == ("Gemma2ForCausalLM", 257, 100, "float32")
    # Only the second of the three layers has its KV in pages; the others have windows.
    assert (info.kv_bytes_per_token, info.generates, info.embedding_size) == (2 * (16 + 16) * 4, True, 64)
    assert not info.needs_whole_prompt and info.pooling_reuses_prefix
    assert info.weight_bytes >= (tmp_path / "model.safetensors").stat().st_size * 0.99


def test_executor_info_counts_keys_and_values_of_different_sizes(tmp_path: Path) -> None:
    SERVED["deepseek-v3"].build(tmp_path)
    with serving(tmp_path) as (_, info):
        pass
    assert info.kv_bytes_per_token == 3 * 4 * ((16 + 8) + 16) * 4


def test_context_of_longrope_is_the_original_length(tmp_path: Path) -> None:
    SERVED["phi3-longrope"].build(tmp_path)
    with serving(tmp_path) as (_, info):
        pass
    assert info.context_len == 128


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_loading_refuses_an_architecture_of_another_model_type(tmp_path: Path) -> None:
    SERVED["gpt2"].build(tmp_path)
    edit_config(tmp_path, architectures=["OPTForCausalLM"])
    assert "OPTForCausalLM is not supported" in refusal(tmp_path)


def test_loading_never_runs_code_of_the_folder(tmp_path: Path) -> None:
    SERVED["gpt2"].build(tmp_path)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit_config(tmp_path, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    with pytest.raises(CheckpointError), serving(tmp_path):
        pass
    assert not (tmp_path / "ran").exists()


def test_loading_error_names_missing_tensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    SERVED["phi"].build(tmp_path)
    tensors = {name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items() if "layers.1.mlp" not in name}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 4 tensors: model.layers.1.mlp.fc1.bias"), serving(tmp_path):
        pass


def test_models_page_lists_each_tested_family() -> None:
    page = DOCS.read_text()
    assert [name for name in (*SERVED, *REFUSED) if f"`{name}`" not in page] == []
