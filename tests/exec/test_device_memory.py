"""A device without enough memory: steps run in pieces, too large requests end, and memory is released and resumed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rootstock_llm.services.worker.core.contracts.plan import EmbeddingParams, RowFault, SamplingParams
from rootstock_llm.services.worker.exec import build
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.contracts.operations import (
    OperationRefused,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
)
from rootstock_llm.services.worker.exec.contracts.protocol import Executor, ExecutorError
from rootstock_llm.services.worker.exec.device import NoDevice, device_of
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from rootstock_llm.services.worker.exec.memory_parts import MemoryParts, NoModel
from rootstock_llm.services.worker.exec.pools import kv_pool
from rootstock_llm.services.worker.exec.pools.kv_pool import NO_POOL, KVPool
from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError
from tests.exec.driver import Driver, Sequence, greedy
from tests.exec.embedding_folders import FOLDERS
from tests.exec.host_executors import build_host_executor
from tests.exec.test_device_graphs import ALL_KINDS, run_all, same, sequences
from tests.exec.tiny_models import MODELS

PAGE_SIZE, SLOTS, PAGES = 4, 12, 400


def built(folder: Path, max_tokens: int = 512) -> DeviceExecutor:
    options = DeviceOptions(device="cpu", kernels="torch", attention_backend="torch", max_tokens=max_tokens)
    executor, _ = build_device_executor(str(folder), "float32", PAGE_SIZE, SLOTS, PAGES, 0.5, None, options, lambda _: None)
    return executor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    MODELS["qwen3"].build(path)
    return path


@pytest.fixture(scope="module")
def cpu(folder: Path) -> Iterator[Executor]:
    executor, _ = build_host_executor(str(folder), "float32", PAGE_SIZE, SLOTS, PAGES, 0.5, None, 1, lambda _: None)
    yield executor
    executor.close()


class Narrow:
    """A model with memory for `max_pass` tokens per forward pass, and without memory for the slots in `too_large`."""

    def __init__(self, model: Any, max_pass: int, too_large: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self._model, self._max_pass, self._too_large = model, max_pass, too_large
        self.refused = 0

    def forward(self, input_ids: torch.Tensor, rows: Any, pool: Any) -> None:
        if len(input_ids) > self._max_pass or self._too_large & set(rows.slots.tolist()):
            self.refused += 1
            raise torch.OutOfMemoryError(f"no memory for {len(input_ids)} tokens")
        self._model.forward(input_ids, rows, pool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def narrowed(executor: DeviceExecutor, max_pass: int, too_large: set[int] | None = None) -> Narrow:
    narrow = Narrow(executor.runner.passes.model, max_pass, too_large or set())
    executor.runner.passes.model = narrow
    return narrow


@pytest.mark.by_day(one_in=3, seed=4)
@pytest.mark.parametrize("max_pass", [1, 3, 10])
def test_step_is_computed_in_pieces_when_memory_is_short(folder: Path, cpu: Executor, max_pass: int) -> None:
    executor = built(folder)
    narrow = narrowed(executor, max_pass)
    ours = run_all(Driver(executor, PAGE_SIZE), sequences(), 8)
    assert same(ours, run_all(Driver(cpu, PAGE_SIZE), sequences(), 8))
    assert narrow.refused >= 10 and executor.runner.stats.pieces > 10


@pytest.mark.by_day(one_in=3, seed=1)
@pytest.mark.parametrize("name", ["qwen3.5", "gemma3"])
@pytest.mark.parametrize("max_pass", [1, 3, 10])
def test_step_in_pieces_leaves_the_same_states_and_windows_as_a_whole_step(tmp_path: Path, name: str, max_pass: int) -> None:
    MODELS[name].build(tmp_path)
    wide, narrow = built(tmp_path), built(tmp_path)
    refusing = narrowed(narrow, max_pass)
    expected = run_all(Driver(wide, PAGE_SIZE), sequences(), 8)
    assert same(run_all(Driver(narrow, PAGE_SIZE), sequences(), 8), expected)
    assert refusing.refused >= 10 and narrow.runner.stats.pieces > 10


def test_step_is_computed_in_pieces_when_larger_than_max_tokens(folder: Path, cpu: Executor) -> None:
    executor = built(folder, max_tokens=16)
    assert same(run_all(Driver(executor, PAGE_SIZE), sequences(), 4), run_all(Driver(cpu, PAGE_SIZE), sequences(), 4))
    assert executor.runner.stats.pieces > 0


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("dimensions", [0, 8])
def test_embedding_counts_each_token_once_when_a_pass_is_repeated(folder: Path, cpu: Executor, dimensions: int) -> None:
    vectors = []
    for executor in (built(folder), cpu):
        if isinstance(executor, DeviceExecutor):
            narrowed(executor, 5)
        wanted = Sequence(list(range(3, 40)), 2, SamplingParams(1, embedding=EmbeddingParams(dimensions)))
        Driver(executor, PAGE_SIZE).prefill([wanted, Sequence([5, 6, 7], 5, greedy())], chunk=20)
        assert wanted.embedding is not None
        vectors.append(wanted.embedding)
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-5)


def test_largest_request_ends_when_pieces_do_not_fit_into_memory(folder: Path, cpu: Executor) -> None:
    executor = built(folder)
    narrowed(executor, 100, {1})
    driver, twin = Driver(executor, PAGE_SIZE), Sequence([4, 5, 6], 7, greedy())
    rows = [Sequence([4, 5, 6], 0, greedy()), Sequence(list(range(6, 36)), 1, greedy()), Sequence([7, 8], 2, greedy())]
    run = executor.forward(driver.plan([(row, len(row.prompt)) for row in rows]))
    executor.sample(run, {})
    result = executor.wait(run)
    Driver(cpu, PAGE_SIZE).prefill([twin])
    assert result.faults == {1: RowFault.OUT_OF_MEMORY} and result.tokens[1] == 0
    assert [int(result.tokens[0])] == twin.output


def test_kernel_error_fails_only_one_step(folder: Path) -> None:
    executor, lost = built(folder), list[str]()
    executor.on_lost = lost.append
    driver, model = Driver(executor, PAGE_SIZE), executor.runner.passes.model

    class Broken(Narrow):
        def forward(self, input_ids: torch.Tensor, rows: Any, pool: Any) -> None:
            raise RuntimeError("a kernel failed")

    executor.runner.passes.model = Broken(model, 0)
    with pytest.raises(ExecutorError, match=r"step 1 failed.*a kernel failed"):
        driver.prefill([Sequence([1, 2, 3], 0, greedy())])
    executor.runner.passes.model = model
    for slot in range(8):  # more steps than the ring has buffers
        sequence = Sequence([1, 2, 3], slot, greedy())
        driver.prefill([sequence])
        assert len(sequence.output) == 1
    assert lost == []


def test_sampling_error_fails_only_the_affected_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After more failed steps than the rings have buffers, the next step must succeed."""
    executor = built(folder)
    driver = Driver(executor, PAGE_SIZE)

    def broken(*_: Any) -> None:
        raise RuntimeError("a sampling kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(executor.runner.sampler, "run_kernels", broken)
        for slot in range(6):
            with pytest.raises(ExecutorError, match="a sampling kernel failed"):
                driver.prefill([Sequence([1, 2, 3], slot, ALL_KINDS[5])])
    sequence = Sequence([1, 2, 3], 6, ALL_KINDS[5])
    driver.prefill([sequence])
    driver.decode([sequence], 4)
    assert len(sequence.output) == 4


def test_lost_device_is_reported_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, lost = built(folder), list[str]()
    executor.on_lost = lost.append

    def fail(*_: Any) -> None:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(executor.runner.streams, "synchronize", fail)
    monkeypatch.setattr(executor.runner.passes, "run", fail)
    for _ in range(2):
        with pytest.raises(ExecutorError, match="unspecified launch failure"):
            Driver(executor, PAGE_SIZE).prefill([Sequence([1, 2, 3], 0, greedy())])
    assert lost == ["the device does not respond: unspecified launch failure"]
    executor.close()


def test_pool_is_allocated_after_the_memory_of_the_smallest_pool_is_freed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, alive, allocate = list[weakref.ref[torch.Tensor]](), list[int](), kv_pool.allocate

    def counted(*args: Any) -> KVPool:
        alive.append(sum(keys() is not None for keys in made))
        pool = allocate(*args)
        made.append(weakref.ref(pool.keys[0]))
        return pool

    monkeypatch.setattr(kv_pool, "allocate", counted)
    built(folder).close()
    assert alive == [0, 0], "the smallest pool, then the pool for requests"


def test_memory_can_be_released_and_resumed(folder: Path) -> None:
    executor, both = built(folder), {"kv": True, "weights": True}
    before, after = Sequence([1, 2, 3], 0, greedy()), Sequence([1, 2, 3], 1, greedy())
    driver = Driver(executor, PAGE_SIZE)
    driver.prefill([before])
    driver.decode([before], 5)
    model = executor.runner.passes.model
    held = [weakref.ref(model.model.embedding.packed.data), weakref.ref(executor.runner.passes.pool.keys[0])]
    del model
    executor.apply(ReleaseMemory(**both))
    assert [each() for each in held] == [None, None], "released weights and pool must have no references"
    with pytest.raises(ExecutorError, match="released"):
        driver.prefill([Sequence([1, 2], 2, greedy())])
    executor.apply(ResumeMemory(**both))
    driver.prefill([after])
    driver.decode([after], 5)
    assert after.output == before.output


def test_resuming_memory_waits_for_the_forward_stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is filled with zeros on the forward stream. On another stream, the zeros could overwrite the KV of a step."""
    executor, both = built(folder), {"kv": True, "weights": True}
    runner, calls = executor.runner, list[str]()

    @contextmanager
    def on_forward() -> Iterator[None]:
        calls.append("forward")
        yield
        calls.append("left")

    monkeypatch.setattr(runner.streams, "on_forward", on_forward)
    monkeypatch.setattr(runner.streams, "synchronize", lambda: calls.append("waited"))
    made = KVPool((torch.ones(1),), (torch.ones(1),))
    dropped: list[ReleaseMemory] = []
    noted = [lambda name=name: calls.append(name) or made for name in ("model", "pool", "graphs")]
    parts = MemoryParts(runner, *noted, drop=dropped.append)  # type: ignore[arg-type]
    parts.release(ReleaseMemory(**both))
    parts.resume(ResumeMemory(**both))
    assert calls == ["forward", "model", "pool", "left", "waited", "graphs"] and runner.passes.pool is made
    assert dropped == [ReleaseMemory(**both)]


def test_failed_resume_releases_all_memory_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and pool fit into the memory, but the graphs do not."""
    executor, both = built(folder), {"kv": True, "weights": True}
    operator = executor._operations
    executor.apply(ReleaseMemory(**both))

    made: list[weakref.ref[torch.Tensor]] = []

    def full() -> None:
        passes = executor.runner.passes
        made.extend((weakref.ref(passes.model.model.embedding.packed.data), weakref.ref(passes.pool.keys[0])))  # type: ignore[attr-defined]
        raise torch.OutOfMemoryError("no memory for graphs")

    with monkeypatch.context() as patch:
        patch.setattr(operator, "_memory", replace(operator._memory, capture=full))
        with pytest.raises(OperationRefused, match="no memory for graphs"):
            executor.apply(ResumeMemory(**both))
    assert executor.runner.passes.pool is NO_POOL and isinstance(executor.runner.passes.model, NoModel)
    assert [each() for each in made] == [None, None], "the memory of a failed resume must have no references"
    executor.apply(ResumeMemory(**both))
    driver, sequence = Driver(executor, PAGE_SIZE), Sequence([1, 2, 3], 0, greedy())
    driver.prefill([sequence])
    assert len(sequence.output) == 1
    executor.close()


def test_page_table_is_updated_when_a_step_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler may already have planned a later step with the pages of the failed step."""
    executor = built(folder)
    driver, ring, send = Driver(executor, PAGE_SIZE), executor.runner._ring, executor.runner._ring.send

    def narrow(sections: Any) -> Any:
        if any(name == "columns" for name, _ in sections):
            raise MemoryError("no memory for a larger buffer")
        return send(sections)

    plan = driver.plan([(Sequence(list(range(30)), 3, greedy()), 30)])
    with monkeypatch.context() as patch:
        patch.setattr(ring, "send", narrow)
        run = executor.forward(plan)
        with pytest.raises(ExecutorError, match="no memory for a larger buffer"):
            executor.sample(run, {})
            executor.wait(run)
    assert executor.runner.passes.table[3, : len(plan.table_pages)].tolist() == plan.table_pages.tolist()
    sequence = Sequence([1, 2, 3], 0, greedy())
    driver.prefill([sequence])
    assert len(sequence.output) == 1
    executor.close()


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("max_pass", [64, 16])
def test_encoder_computes_each_prompt_in_one_pass(tmp_path: Path, max_pass: int) -> None:
    """The first prompt has more tokens than max_tokens; in one case, it also exceeds the device's memory."""
    FOLDERS["bert-mean"].build(tmp_path)
    cpu, _ = build_host_executor(str(tmp_path), "float32", PAGE_SIZE, SLOTS, PAGES, 0.5, None, 1, lambda _: None)
    params, results = SamplingParams(1, embedding=EmbeddingParams()), []
    for executor in (built(tmp_path, max_tokens=8), cpu):
        if isinstance(executor, DeviceExecutor):
            narrowed(executor, max_pass)
        each = [Sequence(list(range(6, 6 + size)), slot, params) for slot, size in enumerate((30, 5, 7))]
        run = executor.forward(Driver(executor, PAGE_SIZE).plan([(one, len(one.prompt)) for one in each]))
        executor.sample(run, {})
        results.append(executor.wait(run))
        executor.close()
    ours, theirs = results
    assert ours.faults == ({} if max_pass > 30 else {0: RowFault.OUT_OF_MEMORY})
    assert sorted(ours.embeddings) == [row for row in range(3) if row not in ours.faults]
    assert all(vector == pytest.approx(theirs.embeddings[row], abs=1e-5) for row, vector in ours.embeddings.items())


def test_mean_embedding_accepts_more_tokens_than_the_buffers_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FOLDERS["llama-mean"].build(tmp_path)
    monkeypatch.setattr(build, "PIECE_BYTES", 1)
    vectors = []
    cpu, _ = build_host_executor(str(tmp_path), "float32", PAGE_SIZE, SLOTS, PAGES, 0.5, None, 1, lambda _: None)
    for executor in (built(tmp_path), cpu):
        wanted = Sequence(list(range(6, 46)), 2, SamplingParams(1, embedding=EmbeddingParams()))
        Driver(executor, PAGE_SIZE).prefill([wanted], chunk=30)
        vectors.append(wanted.embedding)
        executor.close()
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-5)


def test_closing_the_executor_reports_a_lost_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, lost = built(folder), list[str]()
    executor.on_lost = lost.append

    def fail() -> None:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(executor.runner.streams, "synchronize", fail)
    executor.close()
    assert len(lost) == 1


def test_resume_is_refused_when_the_folder_has_another_model(tmp_path: Path) -> None:
    MODELS["qwen3"].build(tmp_path)
    executor = built(tmp_path)
    executor.apply(ReleaseMemory(kv=False, weights=True))
    MODELS["llama-untied"].build(tmp_path)
    with pytest.raises(OperationRefused, match="other sizes"):
        executor.apply(ResumeMemory(kv=False, weights=True))
    (tmp_path / "config.json").unlink()
    with pytest.raises(OperationRefused, match=r"no config\.json"):
        executor.apply(ResumeMemory(kv=False, weights=True))


def test_profile_has_the_names_of_the_steps(folder: Path, tmp_path: Path) -> None:
    executor = built(folder)
    executor.apply(StartProfile(tmp_path / "trace.json"))
    Driver(executor, PAGE_SIZE).prefill([Sequence([1, 2, 3], 0, greedy())])
    executor.apply(StopProfile())
    text = (tmp_path / "trace.json").read_text()
    assert '"forward 1"' in text and '"sample 1"' in text


def test_unusable_devices_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, message in (("meta", "steps cannot run on the device meta"), ("cuda:0", "no GPU for cuda:0")):
        options = DeviceOptions(device=device)
        with pytest.raises(NoDevice, match=message):
            build_device_executor(str(folder), "auto", PAGE_SIZE, SLOTS, PAGES, 0.5, None, options, lambda _: None)


def test_device_without_an_index_gets_the_index_of_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's set_device() requires a device with an index."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert [device_of("cuda"), device_of("cuda:1")] == chosen == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        built(tmp_path)
