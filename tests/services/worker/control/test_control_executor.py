"""Tests of operations on a CPU executor with the demo model: released memory, equal completions afterwards, and profiles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rootstock_llm.services.worker.exec.contracts.operations import (
    OperationRefused,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
)
from rootstock_llm.services.worker.exec.contracts.protocol import Executor, ExecutorError
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from tests.exec.driver import Driver, Sequence, greedy
from tests.exec.host_executors import build_host_executor
from tests.services.worker.control.demo_prompt import DEMO, counting

PAGE_SIZE = 16
PROMPT = counting()
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a copy of the demo model that a test may change."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(DEMO / file, copy)
    return copy


@pytest.fixture
def build(folder: Path) -> Iterator[Callable[[int], DeviceExecutor]]:
    """Yields a function that makes an executor. The argument of the function is the number of KV pages."""
    made: list[DeviceExecutor] = []

    def make(num_pages: int) -> DeviceExecutor:
        executor, _ = build_host_executor(str(folder), "float32", PAGE_SIZE, 4, num_pages, 0.5, 256, 1, lambda _: None)
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.close()


def greedy_tokens(executor: Executor, num_tokens: int = 12) -> list[int]:
    """Returns greedy tokens for PROMPT, computed without a cached prefix."""
    driver, sequence = Driver(executor, PAGE_SIZE), Sequence(PROMPT, slot=0, params=greedy())
    driver.step([(sequence, len(PROMPT))])
    for _ in range(num_tokens - 1):
        driver.step([(sequence, 1)])
    return sequence.output


def rss() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def pools(executor: DeviceExecutor) -> list[torch.Tensor]:
    pool = executor.runner.passes.pool
    return [*pool.keys, *pool.values]


def touch(executor: DeviceExecutor) -> None:
    """Writes to every page of the pools, because the system allocates memory at the first write."""
    for tensor in pools(executor):
        with torch.inference_mode():
            tensor.zero_()


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.parametrize(("kv", "weights"), [(True, False), (False, True), (True, True)])
def test_completion_is_unchanged_after_memory_is_released_and_resumed(
    build: Callable[[int], DeviceExecutor], kv: bool, weights: bool
) -> None:
    executor = build(8)
    before = greedy_tokens(executor)
    assert len(set(before)) > 2
    executor.apply(ReleaseMemory(kv, weights))
    executor.apply(ResumeMemory(kv, weights))
    assert greedy_tokens(executor) == before


def test_release_of_the_kv_cache_returns_memory_to_the_operating_system(build: Callable[[int], DeviceExecutor]) -> None:
    executor = build(8192)
    size = sum(tensor.nbytes for tensor in pools(executor))
    assert size > 256 * MIB
    touch(executor)
    used = rss()
    executor.apply(ReleaseMemory(kv=True, weights=False))
    assert used - rss() > 0.95 * size
    executor.apply(ResumeMemory(kv=True, weights=False))
    assert sum(tensor.nbytes for tensor in pools(executor)) == size
    assert len(greedy_tokens(executor)) == 12


def test_release_of_the_weights_returns_memory_to_the_operating_system(build: Callable[[int], DeviceExecutor]) -> None:
    executor = build(8)
    size = (DEMO / "model.safetensors").stat().st_size  # bytes; float32 in memory takes at least the size of the file
    greedy_tokens(executor)
    used = rss()
    executor.apply(ReleaseMemory(kv=False, weights=True))
    assert used - rss() > 0.9 * size
    for _ in range(2):
        executor.apply(ResumeMemory(kv=False, weights=True))
        executor.apply(ReleaseMemory(kv=False, weights=True))
    executor.apply(ResumeMemory(kv=False, weights=True))
    assert rss() < used + size


def test_resume_loads_the_weights_again_from_the_folder(build: Callable[[int], DeviceExecutor], folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    executor = build(8)
    before = greedy_tokens(executor)
    executor.apply(ReleaseMemory(kv=True, weights=True))
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor.flip(0) if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    executor.apply(ResumeMemory(kv=True, weights=True))
    assert greedy_tokens(executor) != before


def test_step_fails_when_memory_is_released(build: Callable[[int], DeviceExecutor]) -> None:
    executor = build(8)
    before = greedy_tokens(executor)
    for kv, weights in ((True, False), (False, True)):
        executor.apply(ReleaseMemory(kv, weights))
        with pytest.raises(ExecutorError):
            greedy_tokens(executor)
        executor.apply(ResumeMemory(kv, weights))
    assert greedy_tokens(executor) == before


def test_resume_fails_when_a_file_is_missing_and_can_be_repeated(build: Callable[[int], DeviceExecutor], folder: Path) -> None:
    executor = build(8)
    before = greedy_tokens(executor)
    executor.apply(ReleaseMemory(kv=True, weights=True))
    weights, away = folder / "model.safetensors", folder / "away"
    weights.rename(away)
    with pytest.raises(OperationRefused, match=r"cannot resume: .*model"):
        executor.apply(ResumeMemory(kv=True, weights=True))
    away.rename(weights)
    executor.apply(ResumeMemory(kv=True, weights=True))
    assert greedy_tokens(executor) == before


def test_resume_refuses_a_model_of_another_shape(build: Callable[[int], DeviceExecutor], folder: Path) -> None:
    executor, config = build(8), folder / "config.json"
    before = greedy_tokens(executor)
    executor.apply(ReleaseMemory(kv=False, weights=True))
    right = config.read_text()
    config.write_text(json.dumps({**json.loads(right), "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}))
    with pytest.raises(OperationRefused, match="other sizes"):
        executor.apply(ResumeMemory(kv=False, weights=True))
    config.write_text(right)
    executor.apply(ResumeMemory(kv=False, weights=True))
    assert greedy_tokens(executor) == before


def test_profile_writes_a_chrome_trace_of_the_steps(build: Callable[[int], DeviceExecutor], tmp_path: Path) -> None:
    executor, path = build(8), tmp_path / "steps.trace.json"
    before = greedy_tokens(executor)
    executor.apply(StartProfile(path))
    with pytest.raises(OperationRefused, match="is already running"):
        executor.apply(StartProfile(tmp_path / "second"))
    assert greedy_tokens(executor, 4) == before[:4]
    executor.apply(StopProfile())
    with pytest.raises(OperationRefused, match="no profile is running"):
        executor.apply(StopProfile())
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert [name for name in names if name in ("forward 1", "sample 1", "forward 4")] == ["forward 1", "sample 1", "forward 4"]
    assert not (tmp_path / "second").exists()


def test_profile_ends_even_if_the_trace_cannot_be_written(build: Callable[[int], DeviceExecutor], tmp_path: Path) -> None:
    executor = build(8)
    executor.apply(StartProfile(tmp_path / "absent" / "x.json"))
    with pytest.raises(OperationRefused, match="cannot be written"):
        executor.apply(StopProfile())
    executor.apply(StartProfile(tmp_path / "x.json"))
    executor.apply(StopProfile())
    json.loads((tmp_path / "x.json").read_text())
