"""The executor's contract apart from the computed values: failures, stale rows, loading errors, and the model's description."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rootstock_llm.services.shared.observe.log_fields import FIELDS
from rootstock_llm.services.worker.core.contracts.plan import RowFault
from rootstock_llm.services.worker.core.contracts.pool_sizes import PoolTooSmall
from rootstock_llm.services.worker.exec import build as build_module
from rootstock_llm.services.worker.exec import model_pools
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from rootstock_llm.services.worker.exec.contracts.options import DeviceOptions, TierOptions
from rootstock_llm.services.worker.exec.contracts.protocol import ExecutorError
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from rootstock_llm.services.worker.exec.tiers import make_tiers
from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError, UnsupportedModel
from tests.exec.driver import Driver, Sequence, greedy, i32
from tests.exec.embedding_folders import FOLDERS
from tests.exec.expert_folders import fuse_experts
from tests.exec.host_executors import build_host_executor
from tests.exec.tiny_models import MODELS
from tests.exec.transformers_families import SERVED


def build(
    folder: Path, dtype: str = "auto", num_pages: int | None = 64, check: bool = True, fraction: float = 0.01
) -> tuple[DeviceExecutor, LoadedInfo]:
    return build_host_executor(str(folder), dtype, 4, 8, num_pages, fraction, 64, 1, lambda _: None, check_relay=check)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    MODELS["llama-untied"].build(tmp_path)
    return tmp_path


@pytest.fixture
def executor(folder: Path) -> Iterator[DeviceExecutor]:
    built, _ = build(folder)
    yield built
    built.close()


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, drop: str = "", reshape: str = "") -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items() if not drop or drop not in name}
    if reshape:
        tensors[reshape] = tensors[reshape][1:].clone()
    save_file(tensors, path, metadata={"format": "pt"})


def test_executor_info_describes_the_model(folder: Path) -> None:
    executor, info = build(folder)
    executor.close()
    assert (info.architecture, info.vocab_size, info.context_len, info.dtype) == ("LlamaForCausalLM", 257, 64, "float32")
    assert info.eos_token_ids == (5,)
    assert (info.num_pages, info.page_size, info.kv_bytes_per_token) == (64, 4, 2 * 3 * 2 * 16 * 4)
    assert info.weight_bytes >= (folder / "model.safetensors").stat().st_size * 0.99


def test_pool_fills_the_given_share_of_memory(folder: Path) -> None:
    executor, info = build(folder, num_pages=None, fraction=0.001)
    executor.close()
    assert info.num_pages > 64
    with pytest.raises(PoolTooSmall, match="no KV page of 4 tokens"):
        build(folder, num_pages=None, fraction=0.0)


def test_loading_warns_when_the_pool_is_smaller_than_the_models_context(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_pools, "free_memory", lambda: 2 * 10 * 4 * (2 * 3 * 2 * 16 * 4))  # half of it holds ten pages
    executor, info = build_host_executor(str(folder), "auto", 4, 8, None, 0.5, None, 1, lambda _: None)
    executor.close()
    assert info.context_len == 40
    (warning,) = [
        each for each in caplog.records if each.levelname == "WARNING" and "smaller than the model's context" in each.msg
    ]
    assert "Set context_len" in warning.msg and "mem_fraction_static" in warning.msg
    assert vars(warning)[FIELDS] == {"context_len": 40, "model_context": 512}


def test_building_the_executor_logs_the_host_tier_and_the_free_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    for module in (model_pools, make_tiers):
        monkeypatch.setattr(module, "free_memory", lambda: 1 << 30)
    options = DeviceOptions(device="cpu", num_threads=1, tiers=TierOptions(1e9, 0, None, bytes(32), host_share=0.01))
    executor, info = build_module.build_device_executor(str(folder), "auto", 4, 8, 64, 0.5, 64, options, messages.append)
    executor.close()
    assert info.host_pages == (1 << 30) // 100 // info.page_bytes
    line = next(line for line in messages if line.startswith("host tier"))
    assert "10 MiB" in line and "of 1024 MiB of free memory; hicache_ratio uses at most 1% of it" in line


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_to_float32(folder: Path, dtype: str) -> None:
    outputs = []
    for name in ("float32", dtype):
        executor, info = build(folder, name)
        assert info.dtype == name
        sequence = Sequence(list(range(20)), 0, greedy(1, top_logprobs=5))
        Driver(executor, 4).prefill([sequence])
        executor.close()
        outputs.append(sequence.logprobs[0])
    assert list(outputs[0].top) == pytest.approx(list(outputs[1].top), abs=0.4)


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, {}, UnsupportedModel, "architecture GPT2LMHeadModel is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, {}, CheckpointError, "quantized"),
        ({}, {"drop": "layers.1.mlp.up_proj"}, CheckpointError, "lacks 1 tensors: model.layers.1.mlp.up_proj.weight"),
        ({}, {"drop": "lm_head"}, CheckpointError, "lm_head.weight"),
        ({}, {"drop": "layers"}, CheckpointError, r"lacks 27 tensors.*\.\.\."),
        ({}, {"reshape": "model.norm.weight"}, CheckpointError, r"model.norm.weight .* shape \(63,\).* \(64,\)"),
    ],
    ids=["architecture", "quantized", "one-missing", "head-missing", "many-missing", "shape"],
)
def test_loading_refuses_a_wrong_checkpoint(
    folder: Path, config: dict[str, object], tensors: dict[str, str], error: type[Exception], message: str
) -> None:
    if config:
        edit_config(folder, **config)
    if tensors:
        edit_tensors(folder, **tensors)
    with pytest.raises(error, match=message):
        build(folder)


def fused_mixtral(folder: Path) -> None:
    MODELS["mixtral"].build(folder, torch.float16)
    fuse_experts(folder)


OWNERS: dict[str, Callable[[Path], object]] = {
    "our decoder": MODELS["llama-untied"].build,
    "transformers": SERVED["llama-gelu"].build,
    "encoder": FOLDERS["bert-mean"].build,
    "torch twins": fused_mixtral,  # the C++ kernels do not take float16
}


@pytest.mark.parametrize("owner", OWNERS)
def test_loaded_weights_share_no_memory_with_their_files(owner: str, tmp_path: Path) -> None:
    """A process that writes or truncates the file of a served model would otherwise change the weights or end the worker."""
    OWNERS[owner](tmp_path)
    executor, _ = build(tmp_path)
    gc.collect()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    executor.close()
    assert not mapped


def test_loading_refuses_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        build(tmp_path)


def test_loading_refuses_a_folder_without_safetensors_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only safetensors"):
        build(folder)


def test_loading_refuses_an_unknown_dtype(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="int8 is not supported"):
        build(folder, "int8")


def test_step_in_flight_gets_the_token_of_the_previous_step_on_the_device(executor: DeviceExecutor) -> None:
    sequence, twin = Sequence([1, 2, 3], 0, greedy()), Sequence([1, 2, 3], 1, greedy())
    driver = Driver(executor, 4)
    driver.prefill([twin])
    driver.decode([twin], 6)
    runs = []
    for count in (3, 1, 1, 1, 1, 1):
        plan = driver.plan([(sequence, count)])
        if count == 1:
            plan = replace(plan, num_extend=0, input_ids=i32([]))
        run = executor.forward(plan)
        executor.sample(run, {})
        runs.append(run)
    assert [int(executor.wait(run).tokens[0]) for run in runs] == twin.output


def test_failed_step_fails_only_the_caller_that_waits_for_that_step(executor: DeviceExecutor) -> None:
    driver, sequence = Driver(executor, 4), Sequence([1, 2, 3], 0, greedy())
    unwritten = driver.plan([(Sequence([7], 5, greedy(), computed=1, admitted=True), 1)])
    bad = executor.forward(unwritten)
    executor.sample(bad, {})
    driver.prefill([sequence])
    with pytest.raises(ExecutorError, match=r"step 1 failed.*slots \[5\]"):
        executor.wait(bad)
    assert len(sequence.output) == 1


def test_grammar_mask_applies_only_to_the_row_whose_number_is_its_key(executor: DeviceExecutor) -> None:
    """The key of a mask is the number of its row in the plan. Rows that are not sampled have a number too.

    A row without a mask may get any token.
    """
    driver, words = Driver(executor, 4), np.zeros(9, dtype=np.uint32)
    words[250 // 32] = 1 << 250 % 32
    chunked = Sequence([1, 2, 3, 4, 5, 6, 7, 8], 0, greedy())
    masked, plain = Sequence([1, 2, 3], 1, greedy()), Sequence([1, 2, 3], 2, greedy())
    driver.step([(chunked, 4), (masked, 3), (plain, 3)], {1: words, 0: words})
    assert masked.output == [250] and plain.output != [250] and chunked.output == []
    driver.step([(chunked, 4), (plain, 1), (masked, 1)], {2: words, 9: words})
    assert masked.output == [250, 250] and plain.output[1] != 250 and chunked.output != [250]


def test_only_the_row_without_an_allowed_token_gets_a_fault(executor: DeviceExecutor) -> None:
    driver = Driver(executor, 4)
    rows = [(Sequence([1, 2, 3], 0, greedy()), 3), (Sequence([1, 2, 3], 1, greedy()), 3)]
    run = executor.forward(driver.plan(rows))
    executor.sample(run, {0: np.zeros(9, dtype=np.uint32)})
    result = executor.wait(run)
    assert result.faults == {0: RowFault.NO_TOKEN_ALLOWED} and result.tokens[0] == 0 and result.tokens[1] != 0


def test_empty_plan_gives_an_empty_result(executor: DeviceExecutor) -> None:
    run = executor.forward(Driver(executor, 4).plan([]))
    executor.sample(run, {})
    assert len(executor.wait(run).tokens) == 0


@pytest.mark.by_day(one_in=3, seed=31)
@pytest.mark.parametrize("start", [0, 3, 63, 64, 67, 1000], ids=lambda start: f"at-{start}")
def test_stale_rows_do_not_change_any_page(folder: Path, start: int) -> None:
    executor, _ = build(folder, check=False)
    driver, sequence = Driver(executor, 4), Sequence([1, 2, 3], 0, greedy())
    driver.prefill([sequence])
    # The comparison is bitwise, because unwritten memory may contain NaN.
    before = [pool.view(torch.int32).clone() for pool in executor.runner.passes.pool.keys]
    row = {"slots": i32([6]), "starts": i32([start]), "num_tokens": i32([1]), "sample": np.array([True])}
    run = executor.forward(replace(driver.plan([]), num_extend=0, **row))
    executor.sample(run, {})
    executor.wait(run)
    after = [pool.view(torch.int32) for pool in executor.runner.passes.pool.keys]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    executor.close()
