"""Models with special layers give equal tokens and vectors with our C++ kernels and with torch's reference kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootstock_llm.services.worker.core.contracts.plan import EmbeddingParams, SamplingParams
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.contracts.protocol import Executor
from tests.exec.driver import Driver, Sequence, greedy
from tests.exec.embedding_folders import FOLDERS
from tests.exec.host_executors import build_host_executor
from tests.exec.transformers_families import SERVED

PAGE_SIZE, SLOTS, PAGES = 4, 8, 256
FAMILIES = ("gemma2-dynamic-rope", "gpt2", "gpt-oss-dynamic-rope", "qwen2-moe")  # score caps, learned positions, sinks, experts
VECTORS = ("qwen3-last", "llama-mean", "gpt-neox-last", "bert-cls", "roberta-mean")


def both(folder: Path) -> tuple[Executor, Executor]:
    options = DeviceOptions(device="cpu", kernels="torch", max_tokens=256)
    device, on_device = build_device_executor(
        str(folder), "float32", PAGE_SIZE, SLOTS, PAGES, 0.5, None, options, lambda _: None, True
    )
    cpu, info = build_host_executor(str(folder), "float32", PAGE_SIZE, SLOTS, PAGES, 0.5, None, 1, lambda _: None, True)
    assert on_device.generates == info.generates and on_device.needs_whole_prompt == info.needs_whole_prompt
    return device, cpu


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("name", FAMILIES)
def test_both_kernel_sets_give_equal_tokens(name: str, tmp_path: Path) -> None:
    SERVED[name].build(tmp_path)
    outputs = []
    for executor in both(tmp_path):
        driver = Driver(executor, PAGE_SIZE)
        each = [Sequence(list(range(6 + slot, 40 + 3 * slot)), slot, greedy()) for slot in range(3)]
        driver.prefill(each, chunk=13)
        driver.decode(each, 10)
        outputs.append([sequence.output for sequence in each])
        executor.close()
    assert outputs[0] == outputs[1]


@pytest.mark.by_day(one_in=3, seed=6)
@pytest.mark.parametrize("name", VECTORS)
def test_both_kernel_sets_give_equal_embedding_vectors(name: str, tmp_path: Path) -> None:
    FOLDERS[name].build(tmp_path)
    vectors = []
    for executor in both(tmp_path):
        params = SamplingParams(1, embedding=EmbeddingParams())
        each = [Sequence(list(range(6 + slot, 20 + 5 * slot)), slot, params) for slot in range(3)]
        Driver(executor, PAGE_SIZE).prefill(each)
        vectors.append([sequence.embedding for sequence in each])
        executor.close()
    for ours, theirs in zip(*vectors, strict=True):
        assert ours is not None and ours == pytest.approx(theirs, abs=1e-5)
