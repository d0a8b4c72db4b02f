"""Embeddings of encoders and decoders equal transformers' pooled hidden states and sentence-transformers' vectors."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel

from rootstock_llm.services.worker.core.contracts.plan import EmbeddingParams, SamplingParams
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from rootstock_llm.services.worker.exec.contracts.protocol import ExecutorError
from rootstock_llm.services.worker.exec.loading import read_pooling
from rootstock_llm.services.worker.exec.pools.embedding_pool import PoolingConfig, PoolingKind
from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError, UnsupportedModel
from tests.all_pairs import each_value
from tests.exec.driver import Driver, Sequence, greedy
from tests.exec.embedding_folders import FOLDERS, MODULE
from tests.exec.host_executors import build_host_executor
from tests.exec.tiny_models import SHAPE

LENGTHS = (1, 2, 7, 30, 31, 60)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
MEAN = PoolingConfig(PoolingKind.MEAN, True)


@contextmanager
def serving(folder: Path, page_size: int = 4) -> Iterator[tuple[Driver, LoadedInfo]]:
    executor, info = build_host_executor(str(folder), "auto", page_size, 8, 256, 0.5, None, 1, lambda _: None, check_relay=True)
    try:
        yield Driver(executor, page_size), info
    finally:
        executor.close()


def request(prompt: list[int], slot: int, dimensions: int = 0, normalize: bool | None = None) -> Sequence:
    embedding = EmbeddingParams(dimensions, normalize)
    return Sequence(prompt, slot, SamplingParams(max_new_tokens=1, embedding=embedding))


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 257, (length,), generator=generator).tolist() for length in LENGTHS]


def pooled(model: Any, ids: list[int], pooling: str, normalize: bool) -> np.ndarray:
    """Returns the vector that transformers' model gives for a text."""
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    vector = {"cls": states[0], "mean": states.mean(0), "lasttoken": states[-1]}[pooling]
    return (torch.nn.functional.normalize(vector, dim=0) if normalize else vector).numpy()


def vector_of(sequence: Sequence) -> np.ndarray:
    assert sequence.embedding is not None
    return sequence.embedding


@pytest.mark.by_day(one_in=3, seed=13)
@pytest.mark.parametrize("name", FOLDERS)
def test_vectors_equal_transformers_when_texts_share_a_batch(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    case = FOLDERS[name]
    model = case.build(tmp_path)
    sequences = [request(text, slot) for slot, text in enumerate(texts())]
    with serving(tmp_path) as (driver, info):
        driver.prefill(sequences)
    assert info.embedding_size == 64
    for sequence in sequences:
        expected = pooled(model, sequence.prompt, case.pooling, case.normalize)
        np.testing.assert_allclose(vector_of(sequence), expected, atol=1e-5)


# Configs of encoders that cannot be served: their states depend on other texts of a batch, or they have too few positions.
UNSOUND: dict[str, dict[str, Any]] = {
    "fnet": {},
    "convbert": {"embedding_size": 64, "conv_kernel_size": 3, "head_ratio": 2},
    "yoso": {"use_expectation": True},
    "big_bird": {},
    "mra": {},
}


def test_loading_refuses_encoders_whose_vectors_depend_on_other_texts(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for name, options in UNSOUND.items():
        config = AutoConfig.for_model(name, **{**SHAPE, "pad_token_id": 0, "num_hidden_layers": 2, **options})
        torch.manual_seed(11)
        AutoModel.from_config(config).save_pretrained(tmp_path / name)
        with pytest.raises(UnsupportedModel, match=r"is not supported|cannot compute"), serving(tmp_path / name):
            pass


def test_loading_detects_a_missing_head_although_the_config_names_a_head(tmp_path: Path) -> None:
    """Qwen3-Embedding-8B has untied embeddings and tensor names without a prefix, but no LM head."""
    model = FOLDERS["qwen3-base-last"].build(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    changes = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    sequence = request(texts()[2], 0)
    with serving(tmp_path) as (driver, info):
        driver.prefill([sequence])
    assert not info.generates
    np.testing.assert_allclose(vector_of(sequence), pooled(model, sequence.prompt, "lasttoken", True), atol=1e-5)


@pytest.mark.by_day(one_in=4)
@pytest.mark.skipif(importlib.util.find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed")
@pytest.mark.parametrize("name", ["qwen3-last", "llama-mean", "bert-cls", "bert-mean"])
def test_vectors_equal_sentence_transformers(name: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    FOLDERS[name].build(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"0": 0}, unk_token="0"))).save_pretrained(tmp_path)
    theirs = SentenceTransformer(str(tmp_path), device="cpu", local_files_only=True)
    rows = [torch.tensor(text) for text in texts()]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    with torch.inference_mode():
        expected = theirs({"input_ids": ids, "attention_mask": mask})["sentence_embedding"].numpy()
    sequences = [request(text, slot) for slot, text in enumerate(texts())]
    with serving(tmp_path) as (driver, _):
        driver.prefill(sequences)
    for sequence, vector in zip(sequences, expected, strict=True):
        np.testing.assert_allclose(vector_of(sequence), vector, atol=1e-5)


@pytest.mark.by_day(one_in=3, seed=1)
@each_value(name=["qwen3-last", "llama-mean", "gpt-neox-last"], chunk=[4, 12, 28])
def test_vectors_of_causal_models_equal_transformers_when_prompts_are_chunked(name: str, chunk: int, tmp_path: Path) -> None:
    case = FOLDERS[name]
    model = case.build(tmp_path)
    sequences = [request(text, slot) for slot, text in enumerate(texts())]
    with serving(tmp_path) as (driver, info):
        driver.prefill(sequences, chunk)
    assert not info.needs_whole_prompt
    for sequence in sequences:
        expected = pooled(model, sequence.prompt, case.pooling, case.normalize)
        np.testing.assert_allclose(vector_of(sequence), expected, atol=1e-5)


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("name", ["qwen3-last", "bert-cls"])
def test_vectors_are_cut_before_normalization(name: str, tmp_path: Path) -> None:
    model = FOLDERS[name].build(tmp_path)
    prompt = texts()[3]
    cut, raw = request(prompt, 0, dimensions=10), request(prompt, 1, normalize=False)
    with serving(tmp_path) as (driver, _):
        driver.prefill([cut, raw])
    whole = pooled(model, prompt, FOLDERS[name].pooling, normalize=False)
    np.testing.assert_allclose(vector_of(raw), whole, atol=1e-5)
    np.testing.assert_allclose(vector_of(cut), whole[:10] / np.linalg.norm(whole[:10]), atol=1e-5)


def test_last_token_pooling_works_after_a_cached_prefix(tmp_path: Path) -> None:
    model = FOLDERS["qwen3-last"].build(tmp_path)
    first, second = request(texts()[5], 0), request(texts()[5][:16] + texts()[2], 1)
    with serving(tmp_path) as (driver, info):
        driver.prefill([first])
        second.pages, second.computed = first.pages[:4], 16
        driver.prefill([second])
    assert info.pooling_reuses_prefix
    np.testing.assert_allclose(vector_of(second), pooled(model, second.prompt, "lasttoken", True), atol=1e-5)


def test_model_with_a_head_generates_and_embeds_in_one_step(tmp_path: Path) -> None:
    model = FOLDERS["qwen3-last"].build(tmp_path)
    vector, text = request(texts()[4], 0), Sequence(texts()[3], 1, greedy(4))
    with serving(tmp_path) as (driver, info):
        driver.prefill([vector, text])
        driver.decode([text], 4)
    assert info.generates and len(text.output) == 4
    np.testing.assert_allclose(vector_of(vector), pooled(model, vector.prompt, "lasttoken", True), atol=1e-5)


@pytest.mark.parametrize("name", ["llama-mean", "bert-mean", "gpt-neox-last"])
def test_model_without_a_head_refuses_generation(name: str, tmp_path: Path) -> None:
    FOLDERS[name].build(tmp_path)
    with serving(tmp_path) as (driver, info):
        assert not info.generates
        with pytest.raises(ExecutorError, match="computes embeddings and samples no tokens"):
            driver.prefill([Sequence([5, 6, 7], 0, greedy(1))])


@pytest.mark.parametrize(
    ("name", "whole_prompt", "reuses_prefix"),
    [("qwen3-last", False, True), ("llama-mean", False, False), ("bert-mean", True, False)],
)
def test_model_info_reports_whether_prompts_may_be_cut_and_prefixes_reused(
    name: str, whole_prompt: bool, reuses_prefix: bool, tmp_path: Path
) -> None:
    FOLDERS[name].build(tmp_path)
    with serving(tmp_path) as (_, info):
        pass
    assert (info.needs_whole_prompt, info.pooling_reuses_prefix) == (whole_prompt, reuses_prefix)


@pytest.mark.parametrize(("name", "tokens"), [("bert-cls", 512), ("roberta-mean", 64), ("mpnet-mean", 64)])
def test_encoder_context_is_the_size_of_the_position_table(name: str, tokens: int, tmp_path: Path) -> None:
    case = FOLDERS[name]
    model = case.build(tmp_path)
    sequence = request(texts()[5] * 9, 0)
    sequence.prompt = sequence.prompt[:tokens]
    with serving(tmp_path) as (driver, info):
        driver.prefill([sequence])
    assert info.context_len == tokens
    np.testing.assert_allclose(vector_of(sequence), pooled(model, sequence.prompt, case.pooling, case.normalize), atol=1e-5)


def test_encoder_has_no_kv_cache(tmp_path: Path) -> None:
    FOLDERS["bert-cls"].build(tmp_path)
    executor, info = build_host_executor(str(tmp_path), "auto", 16, 8, None, 0.5, None, 1, lambda _: None)
    executor.close()
    assert (info.kv_bytes_per_token, info.num_pages) == (0, 8 * 32)


def test_default_pooling_is_used_when_there_are_no_pooling_files(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, MEAN) is MEAN


@pytest.mark.by_day(one_in=3)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pooling_mode": "max"}, "pooling max is not supported"),
        ({"pooling_mode": ["cls", "mean"]}, "pooling cls and mean is not supported"),
        ({"pooling_mode_weightedmean_tokens": True}, "pooling weightedmean is not supported"),
    ],
)
def test_unsupported_pooling_modes_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    FOLDERS["bert-cls"].build(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=message):
        read_pooling(tmp_path, MEAN)


@pytest.mark.parametrize(
    ("modules", "error", "message"),
    [
        ([{"type": MODULE + "Pooling", "path": "../1_Pooling"}], CheckpointError, "outside of the model's folder"),
        ([{"type": MODULE + "Pooling", "path": ".."}], CheckpointError, "outside of the model's folder"),
        ([{"path": "1_Pooling"}], CheckpointError, "without a type"),
        ({}, CheckpointError, "JSON array"),
        ([{"type": MODULE + "Dense", "path": "2_Dense"}], UnsupportedModel, "modules.json has modules Dense"),
        ([], UnsupportedModel, "0 Pooling modules"),
    ],
    ids=["outside", "parent", "no-type", "object", "dense", "none"],
)
def test_wrong_lists_of_modules_are_refused(modules: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(error, match=message):
        read_pooling(tmp_path, MEAN)


def test_models_page_lists_each_tested_embedding_model() -> None:
    page = DOCS.read_text()
    assert [name for name in FOLDERS if f"`{name}`" not in page] == []
