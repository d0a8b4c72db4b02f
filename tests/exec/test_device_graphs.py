"""The device executor with decode graphs, on a CPU.

GraphDouble detects launches that a real graph would replay wrongly, and StepGuard detects host waits during a step. The tokens
must equal those of the executor on host streams.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.reference import sampling as sampling_twin
from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits
from rootstock_llm.services.worker.core.contracts.plan import DryParams, EmbeddingParams, RowFault, SamplingParams
from rootstock_llm.services.worker.exec.attention.backend import AttentionBatch, KernelAttention
from rootstock_llm.services.worker.exec.build import DeviceOptions, DeviceParts, assemble_executor
from rootstock_llm.services.worker.exec.contracts.protocol import Executor, ExecutorError
from rootstock_llm.services.worker.exec.eager_cost import IN_FLIGHT, STEPS, graph_limits, measured_eager_cost
from rootstock_llm.services.worker.exec.kernel_set import KernelSet
from rootstock_llm.services.worker.exec.loading import load_model
from rootstock_llm.services.worker.exec.pools.kv_pool import LayerGroups
from rootstock_llm.services.worker.exec.sampling import sampler as device_sampler
from rootstock_llm.services.worker.exec.streams.copies import Readback
from rootstock_llm.services.worker.exec.streams.cuda_streams import Mark
from rootstock_llm.services.worker.exec.streams.host_streams import HostArrival
from tests.all_pairs import each_value
from tests.exec.device_doubles import (
    ForgetfulMemory,
    GraphDouble,
    GraphMemoryDouble,
    HostWaits,
    InlineStreams,
    ReplayedOtherwise,
    StepGuard,
    Watch,
    WatchedKernels,
)
from tests.exec.driver import Driver, Sequence, greedy, i32
from tests.exec.host_executors import build_host_executor, load_request
from tests.exec.tiny_models import MODELS
from tests.night import NIGHTLY

PAGE_SIZE, SLOTS, PAGES = 4, 12, 400


class CapturableTorch(KernelAttention):
    """Attention in torch that can be captured in a graph. WatchedAttention records each call of this attention as one launch."""

    captures = True

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(replace(batch, graph=0))

    def release_graphs(self) -> None:
        return


class Device:
    """A device executor whose kernels and graphs are recorded and checked (device_doubles.py)."""

    def __init__(
        self,
        folder: Path,
        graphs: type[Any] = GraphMemoryDouble,
        slots: int = SLOTS,
        eager_cost: float | None = 0.0,
        **options: object,
    ) -> None:
        self.watch = Watch()
        self.graphs = graphs(self.watch)
        layers, sampling = WatchedKernels(reference, self.watch), WatchedKernels(sampling_twin, self.watch)
        loaded = load_model(load_request(folder, "float32", PAGE_SIZE, None))
        parts = DeviceParts(
            streams=InlineStreams(),
            kernels=KernelSet(layers, sampling),  # type: ignore[arg-type]
            attention=lambda shape: WatchedAttention(CapturableTorch(reference), self.watch),  # type: ignore
            graph_memory=self.graphs,  # type: ignore[arg-type]
            eager_cost=eager_cost,
        )
        given = DeviceOptions(**{"device": "cpu", "max_graph_rows": 8, "max_tokens": 64, **options})  # type: ignore[arg-type]
        model = replace(loaded, kernels=layers, model=loaded.model)  # type: ignore[arg-type]
        self.executor, _ = assemble_executor(model, slots, PAGE_SIZE, PAGES, 0.5, given, lambda _: None, True, parts)


class WatchedAttention(WatchedKernels):
    name = "watched"
    captures = True


# Marks tests that do not depend on the model, so that they run with only one model.
of_one_model = pytest.mark.parametrize("folder", ["qwen3"], indirect=True, scope="module")
BOTH = ["qwen3", "mistral-window"]
of_one_by_day = pytest.mark.parametrize("folder", BOTH if NIGHTLY else BOTH[:1], indirect=True, scope="module")


@pytest.fixture(scope="module", params=BOTH)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    MODELS[request.param].build(path)
    return path


@pytest.fixture
def device(folder: Path) -> Device:
    return Device(folder)


@pytest.fixture(scope="module")
def cpu(folder: Path) -> Iterator[Executor]:
    executor, _ = build_host_executor(str(folder), "float32", PAGE_SIZE, SLOTS, PAGES, 0.5, None, 1, lambda _: None, True)
    yield executor
    executor.close()


class Guarded(Driver):
    """A driver that launches steps under StepGuard. It waits for results outside of the guard."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.executor, PAGE_SIZE)
        self._device = device

    def step(self, rows: list[tuple[Sequence, int]], masks: dict[int, np.ndarray] | None = None) -> None:  # type: ignore[override]
        executor, self.executor = self.executor, GuardedExecutor(self._device)  # type: ignore[assignment]
        try:
            super().step(rows, masks)
        finally:
            self.executor = executor


class GuardedExecutor:
    def __init__(self, device: Device) -> None:
        self._device = device

    def forward(self, plan):  # type: ignore[no-untyped-def]
        with StepGuard(self._device.watch):
            return self._device.executor.forward(plan)

    def sample(self, run, masks):  # type: ignore[no-untyped-def]
        with StepGuard(self._device.watch):
            self._device.executor.sample(run, masks)

    def wait(self, run):  # type: ignore[no-untyped-def]
        return self._device.executor.wait(run)


ALL_KINDS = (
    SamplingParams(64, temperature=0.0),
    SamplingParams(64, temperature=0.8, seed=3),
    SamplingParams(64, temperature=1.2, seed=1 << 40, top_k=20, top_p=0.9, min_p=0.02, top_logprobs=4),
    SamplingParams(64, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(64, temperature=0.7, seed=5, frequency_penalty=-0.5, logit_bias=((7, 3.0), (9, -100.0), (7, 1.0), (999, 5.0))),
    SamplingParams(64, temperature=0.0, dry=DryParams(0.8, allowed_length=1), top_logprobs=0, logprob_token_ids=(3, 500, 0)),
    SamplingParams(64, temperature=0.9, seed=8, allowed_token_ids=tuple(range(0, 257, 3)), banned_token_ids=(6, 9)),
    SamplingParams(64, temperature=0.0, min_new_tokens=5, top_logprobs=2, prompt_logprobs_from=1),
)


def sequences(count: int = len(ALL_KINDS)) -> list[Sequence]:
    rng = random.Random(4)
    made = [
        Sequence([rng.randrange(6, 257) for _ in range(rng.randrange(1, 30))], slot, ALL_KINDS[slot % len(ALL_KINDS)])
        for slot in range(count)
    ]
    for each in made:
        each.stop_token_ids = tuple(range(40, 90)) if each.params.min_new_tokens else ()
    return made


def outputs_of(each: Sequence) -> tuple[list[object], list[float]]:
    """Returns a sequence's results: values that must be equal, and numbers that may differ by rounding."""
    exact: list[object] = [each.output, *(p.top_ids for p in each.logprobs), *(p.top_ids.tolist() for p in each.prompt_logprobs)]
    close = [value for p in each.logprobs for value in (p.sampled, *p.top, *p.chosen)]
    close += [float(value) for p in each.prompt_logprobs for part in (p.values, p.top, p.chosen) for value in part.reshape(-1)]
    return exact, close


def same(ours: list[Sequence], theirs: list[Sequence]) -> bool:
    pairs = [(outputs_of(one), outputs_of(other)) for one, other in zip(ours, theirs, strict=True)]
    return all(one[0] == other[0] and one[1] == pytest.approx(other[1], abs=1e-3) for one, other in pairs)


def run_all(driver: Driver, each: list[Sequence], tokens: int) -> list[Sequence]:
    driver.prefill(each, chunk=9)
    driver.decode(each, tokens)
    return each


def test_device_executor_gives_the_same_results_as_the_cpu_executor_for_all_features(device: Device, cpu: Executor) -> None:
    ours = run_all(Guarded(device), sequences(), 24)
    assert same(ours, run_all(Driver(cpu, PAGE_SIZE), sequences(), 24))
    assert all(len(each.output) == 24 for each in ours) and ours[2].logprobs and ours[7].prompt_logprobs
    assert device.graphs.replays > 40, "decode steps must use graphs"


@of_one_by_day
def test_graphs_compute_any_batch_up_to_the_largest_graph_size(device: Device, cpu: Executor) -> None:
    for count in (1, 2, 3, 7, 8, 9, 12):
        mine, theirs = sequences(count), sequences(count)
        before = device.graphs.replays
        assert same(run_all(Guarded(device), mine, 6), run_all(Driver(cpu, PAGE_SIZE), theirs, 6))
        assert (device.graphs.replays > before) == (count <= 8)


class RecordedLoad(HostArrival):
    """A load that is never complete. wait() records the group and the number of graph replays so far, and does not block."""

    def __init__(self, device: Device, groups: int, waits: list[tuple[int, int]]) -> None:
        super().__init__(groups)
        self._device, self._waits = device, waits

    def wait(self, group: int) -> None:
        self._waits.append((group, self._device.graphs.replays))


@of_one_model
def test_graph_step_waits_for_the_whole_load_of_a_new_page(device: Device) -> None:
    """The layers of a graph cannot wait for groups of a load, so the step waits for the whole load first.

    A step without a graph waits layer by layer.
    """
    driver, waits, sequence = Guarded(device), list[tuple[int, int]](), Sequence([1, 2, 3], 1, greedy())
    runner = device.executor.runner
    layers = len(runner.passes.pool.keys)
    for page in (0, 1):
        runner._arrivals.add(i32([page]), LayerGroups.for_pools([layers]), RecordedLoad(device, layers, waits))
    before = device.graphs.replays
    driver.prefill([sequence])
    assert waits == [(layer, before) for layer in range(layers)]
    driver.step([(sequence, 1)])
    assert len(waits) == layers and device.graphs.replays > before, "a step without a new page in its table must not wait"
    before = device.graphs.replays
    driver.step([(sequence, 1)])
    assert waits[layers:] == [(layers - 1, before)] and device.graphs.replays > before
    driver.step([(sequence, 1)])
    assert len(waits) == layers + 1


@pytest.mark.by_day(one_in=2, seed=2)
def test_graph_ignores_grammar_masks_of_earlier_steps(device: Device) -> None:
    driver, words = Guarded(device), np.zeros(9, dtype=np.uint32)
    words[250 // 32] = 1 << 250 % 32
    masked, plain = Sequence([1, 2, 3], 1, greedy()), Sequence([1, 2, 3], 2, greedy())
    driver.prefill([masked, plain])
    driver.step([(plain, 1), (masked, 1)], {1: words})
    driver.step([(plain, 1), (masked, 1)])
    driver.step([(masked, 1), (plain, 1)], {0: words, 7: words})
    assert masked.output[1] == masked.output[3] == 250 and masked.output[2] != 250
    assert 250 not in plain.output


@of_one_model
def test_graph_ignores_earlier_masks_when_a_step_has_too_many_penalties(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampler, "MAX_LOSSES", -1)
    driver, words = Guarded(device), np.zeros(9, dtype=np.uint32)
    words[250 // 32] = 1 << 250 % 32
    repeats = SamplingParams(64, temperature=0.0, dry=DryParams(0.8, allowed_length=1))
    plain, other, lossy = (
        Sequence([1, 2, 3], 1, greedy()), Sequence([1, 2, 3], 2, greedy()), Sequence([7, 8, 7, 8, 7], 3, repeats)
    )  # fmt: skip
    driver.prefill([plain, other, lossy])
    driver.step([(plain, 1), (other, 1)], {0: words, 1: words})
    driver.step([(lossy, 1), (plain, 1)])
    assert plain.output[1] == 250 and plain.output[2] != 250 and lossy.output[1] != 250


@of_one_model
def test_memory_addresses_in_a_captured_graph_stay_allocated(folder: Path) -> None:
    device = Device(folder, ForgetfulMemory)
    gc.collect()
    assert len(device.graphs.named) > 100 and device.graphs.freed() == 0


@of_one_model
def test_step_reports_a_fault_for_each_faulty_row(device: Device) -> None:
    driver = Driver(device.executor, PAGE_SIZE)
    too_many = SamplingParams(8, temperature=0.0, logit_bias=tuple((index % 250, 1.0) for index in range(2000)))
    rows = [Sequence([1, 2, 3], 0, greedy()), Sequence([1, 2, 3], 1, greedy()), Sequence([1, 2], 2, too_many)]
    run = device.executor.forward(driver.plan([(row, len(row.prompt)) for row in rows]))
    device.executor.sample(run, {0: np.zeros(9, dtype=np.uint32)})
    result = device.executor.wait(run)
    assert result.faults == {0: RowFault.NO_TOKEN_ALLOWED, 2: RowFault.FAILED}
    assert result.tokens[0] == result.tokens[2] == 0 and result.tokens[1] != 0


@of_one_model
def test_step_in_flight_gets_the_token_of_the_previous_step_on_the_device(device: Device) -> None:
    params = SamplingParams(64, temperature=0.0, frequency_penalty=0.6, dry=DryParams(0.5, allowed_length=1))
    sequence, twin = Sequence([1, 2, 3], 0, params), Sequence([1, 2, 3], 1, params)
    driver = Driver(device.executor, PAGE_SIZE)
    driver.prefill([twin])
    driver.decode([twin], 6)
    runs = []
    for count in (3, 1, 1, 1, 1, 1):
        plan = driver.plan([(sequence, count)])
        if count == 1:
            plan = replace(plan, num_extend=0, input_ids=i32([]))
        run = device.executor.forward(plan)
        device.executor.sample(run, {})
        runs.append(run)
    assert [int(device.executor.wait(run).tokens[0]) for run in runs] == twin.output


@of_one_by_day
def test_forced_tokens_replace_sampled_tokens_in_penalties(device: Device, cpu: Executor) -> None:
    """After a jump of its grammar, a slot continues with forced tokens instead of sampled ones."""
    outputs = []
    for executor in (device.executor, cpu):
        driver = Driver(executor, PAGE_SIZE)
        params = SamplingParams(64, temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2)
        sequence = Sequence([1, 2, 3, 4], 3, params)
        driver.prefill([sequence])
        driver.decode([sequence], 4)
        kept = sequence.output[:2]
        sequence.prompt, sequence.output = [*sequence.prompt, *kept, 9, 9, 9], []
        driver.prefill([sequence])
        driver.decode([sequence], 8)
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]


def with_forced_tokens(driver: Driver, chunks: list[int], beside: int = 3) -> list[Sequence]:
    """Decodes rows of different kinds of sampling. After three decoded tokens, the first row gets six forced tokens.

    Then the first row decodes six more tokens, and each other row decodes until it has six output tokens.

    Args:
        chunks: number of the first row's tokens in each of the next steps: its third decoded token, then the forced tokens.
        beside: number of other rows.
    """
    rows = sequences()[: beside + 1]
    driver.prefill(rows)
    driver.decode(rows, 3)
    first, *others = rows
    first.num_prompt_tokens, earlier_output = len(first.prompt), list(first.output)
    first.prompt, first.output = [*first.prompt, *first.output, 9, 200, 31, 8, 77, 120][: first.computed + sum(chunks)], []
    for count in chunks:
        driver.step([(first, count), *((other, 1) for other in others)])
    driver.decode(rows, 6)
    first.output = [*earlier_output, *first.output]
    return rows


@each_value(indirect=("folder",), chunks={"whole": [7], "many": [1, 3, 2, 1], "two": [4, 3]}, folder=BOTH)
def test_forced_tokens_are_computed_by_a_graph(device: Device, cpu: Executor, chunks: list[int]) -> None:
    runner = device.executor.runner
    runner.graph_limits = GraphLimits(8, 1000)
    steps = runner.stats.eager_steps
    ours = with_forced_tokens(Guarded(device), chunks, beside=1)
    assert same(ours, with_forced_tokens(Driver(cpu, PAGE_SIZE), chunks, beside=1))
    assert runner.stats.eager_steps == steps + 1, "only the step with the prompts may run without a graph"
    assert same(with_forced_tokens(Guarded(device), [7], beside=4), with_forced_tokens(Driver(cpu, PAGE_SIZE), [7], beside=4))
    assert runner.stats.eager_steps == steps + 3, "11 tokens, more than the 8 rows of a graph, must run without one"


@of_one_model
def test_cost_of_a_step_without_a_graph_is_measured_at_the_start(folder: Path) -> None:
    """The cost is the extra time of a step without a graph, in multiples of the time of a step with one.

    A graph reads a request's KV once for each forced token. The number of these rereads is limited. The limit follows from the
    cost, the bytes of the weights and the bytes of the KV.
    """
    runner = Device(folder, eager_cost=None, max_graph_rows=3).executor.runner
    found = runner.graph_limits
    assert found.rows == 3 and 0 <= found.eager_cost < 1000 and (found.rereads > 0) == (found.eager_cost > 0)
    assert graph_limits(256, 0.05, weight_bytes=16_000_000, kv_bytes_per_token=128) == GraphLimits(256, 6250, 0.05)
    assert graph_limits(8, 0.05, weight_bytes=16_000_000, kv_bytes_per_token=0).rereads == 0


class CountedStreams(InlineStreams):
    """Streams that count the steps that the host has launched without waiting for their end."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = self.ended = self.most_in_flight = 0

    def step(self) -> None:
        self.launched += 1
        self.most_in_flight = max(self.most_in_flight, self.launched - self.ended)

    def mark_copy(self) -> Mark:
        return StepEnd(self, self.launched)

    def synchronize(self) -> None:
        self.ended = self.launched


class StepEnd:
    def __init__(self, streams: CountedStreams, step: int) -> None:
        self._streams, self._step = streams, step

    def wait(self) -> None:
        self._streams.ended = max(self._streams.ended, self._step)

    def precede(self) -> None:
        return


@of_one_model
def test_measured_steps_without_a_graph_do_not_wait_for_copies_from_unpinned_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, such a copy waits for all earlier steps, so that host and device would not work in parallel."""
    runner, copied, from_numpy = Device(folder, max_graph_rows=3).executor.runner, list[int](), torch.from_numpy

    def counted(array: np.ndarray) -> torch.Tensor:
        copied.append(array.size)
        return from_numpy(array)

    monkeypatch.setattr(torch, "from_numpy", counted)
    with torch.inference_mode():
        measured_eager_cost(runner, 3)
    assert len(copied) == 1, "the columns are copied once, before the first timed step"


@of_one_model
def test_measured_steps_are_not_launched_far_ahead_of_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Device(folder, max_graph_rows=3).executor.runner
    streams = runner.streams = CountedStreams()
    plan = runner.attention.plan

    def counted(batch: AttentionBatch) -> None:
        streams.step()
        plan(batch)

    monkeypatch.setattr(runner.attention, "plan", counted)
    with torch.inference_mode():
        measured_eager_cost(runner, 3)
    assert streams.launched == 2 * (STEPS + 1) and streams.most_in_flight == IN_FLIGHT


@of_one_by_day
def test_forced_tokens_use_no_graph_when_rereads_exceed_the_limit(device: Device) -> None:
    runner = device.executor.runner
    runner.graph_limits = GraphLimits(8, 20)
    steps = runner.stats.eager_steps
    with_forced_tokens(Guarded(device), [7], beside=1)
    assert runner.stats.eager_steps == steps + 2


@of_one_by_day
def test_graph_samples_one_row_per_slot_when_the_graph_has_more_rows_than_slots(folder: Path, cpu: Executor) -> None:
    """Two graphs with more rows than slots must have separate masks.

    With shared masks, a graph could apply those of another graph's step.
    """
    device = Device(folder, slots=2, max_graph_rows=16)
    driver, words = Guarded(device), np.zeros(9, dtype=np.uint32)
    words[250 // 32] = 1 << 250 % 32
    device.executor.runner.graph_limits = GraphLimits(16, 1000)
    outputs = []
    for each in (driver, Driver(cpu, PAGE_SIZE)):
        one, other = Sequence([1, 2, 3], 0, greedy()), Sequence([4, 5], 1, greedy())
        each.prefill([one, other])
        for count, masks in ((6, {0: words}), (10, {1: words}), (6, {}), (10, {})):
            one.prompt, one.output = [*one.tokens, *range(20, 20 + count)], []
            each.step([(one, len(one.prompt) - one.computed), (other, 1)], masks)
        outputs.append((one.tokens, other.tokens))
    assert outputs[0] == outputs[1] and device.executor.runner.stats.eager_steps == 1
    assert outputs[0][1][-3:].count(250) == 1


@pytest.mark.by_day(one_in=2, seed=2)
def test_embedding_requests_share_steps_with_sampled_rows(device: Device, cpu: Executor) -> None:
    vectors = []
    for executor in (device.executor, cpu):
        driver = Driver(executor, PAGE_SIZE)
        wanted = Sequence(list(range(3, 20)), 4, SamplingParams(1, embedding=EmbeddingParams(dimensions=16)))
        driver.prefill([wanted, Sequence([5, 6, 7], 5, greedy())], chunk=6)
        assert wanted.embedding is not None
        vectors.append(wanted.embedding)
    assert vectors[0] == pytest.approx(vectors[1], abs=1e-5)


@of_one_model
def test_missing_token_of_the_previous_step_fails_only_one_step(device: Device) -> None:
    driver, sequence = Driver(device.executor, PAGE_SIZE), Sequence([1, 2, 3], 0, greedy())
    unwritten = driver.plan([(Sequence([7], 5, greedy(), computed=1, admitted=True), 1)])
    bad = device.executor.forward(unwritten)
    device.executor.sample(bad, {})
    with pytest.raises(ExecutorError, match=r"step 1 failed.*slots \[5\]"):
        device.executor.wait(bad)
    driver.prefill([sequence])
    assert len(sequence.output) == 1


@of_one_model
def test_failed_readback_fails_only_one_step(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the steps after the failed one, slots with penalties must still get their tokens."""
    penalised = SamplingParams(64, temperature=0.0, frequency_penalty=0.5, dry=DryParams(0.5, allowed_length=1))
    driver, first, twin = Driver(device.executor, PAGE_SIZE), Sequence([1, 2, 3], 0, penalised), Sequence([1, 2, 3], 1, penalised)

    def full(_: Readback) -> None:
        raise MemoryError("no pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(Readback, "launch", full)
        run = device.executor.forward(driver.plan([(first, 3)]))
        device.executor.sample(run, {})
    with pytest.raises(ExecutorError, match="no pinned memory"):
        device.executor.wait(run)
    driver.prefill([twin])
    driver.decode([twin], 4)
    assert len(twin.output) == 4


@of_one_by_day
def test_warm_up_launches_every_kernel_of_a_step(folder: Path) -> None:
    launched = set[str]()

    class Noted:
        def __init__(self, kernels: object) -> None:
            self._kernels = kernels

        def __getattr__(self, name: str) -> object:
            launched.add(name)
            return getattr(self._kernels, name)

    loaded = load_model(load_request(folder, "float32", PAGE_SIZE, None))
    parts = DeviceParts(kernels=KernelSet(Noted(reference), Noted(sampling_twin)))  # type: ignore[arg-type]
    options = DeviceOptions(device="cpu", max_tokens=64)
    assemble_executor(loaded, SLOTS, PAGE_SIZE, PAGES, 0.5, options, lambda _: None, False, parts)
    assert launched >= {"update_page_table", "resolve_tokens", "edit_logits", "select_tokens", "measure_logprobs"}


@of_one_model
def test_number_of_measured_top_logprobs_is_rounded_up_to_5_or_20(device: Device) -> None:
    logprobs, rows = device.executor.runner.sampler.logprobs, torch.zeros(1, dtype=torch.int32)
    logits = torch.arange(257.0)[None]
    found = [logprobs.measure(logits, rows, rows, number).top_ids[0].tolist() for number in (0, 1, 4, 5, 6, 20)]
    assert [len(ids) for ids in found] == [0, 5, 5, 5, 20, 20]
    assert all(ids == list(range(256, 256 - len(ids), -1)) for ids in found)


@of_one_model
def test_empty_plan_gives_an_empty_result(device: Device) -> None:
    run = device.executor.forward(Driver(device.executor, PAGE_SIZE).plan([]))
    device.executor.sample(run, {})
    assert len(device.executor.wait(run).tokens) == 0


class FailsAtThird(GraphMemoryDouble):
    """Graph memory that captures two graphs and fails at the third, as a driver of a GPU may do."""

    def capture(self, work: Callable[[], None]) -> GraphDouble:
        if len(self.graphs) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().capture(work)


@of_one_by_day
def test_steps_are_launched_without_graphs_when_a_capture_fails(folder: Path, cpu: Executor) -> None:
    device = Device(folder, FailsAtThird)
    assert same(run_all(Guarded(device), sequences(3), 6), run_all(Driver(cpu, PAGE_SIZE), sequences(3), 6))
    assert device.graphs.replays == 0 and device.executor.runner.stats.eager_steps > 6


# Tests of the doubles


def test_step_guard_detects_that_the_host_waits_for_the_device() -> None:
    with StepGuard(Watch()), pytest.raises(HostWaits, match="item"):
        torch.ones(3).sum().item()
    with StepGuard(Watch()), pytest.raises(HostWaits, match="getitem"):
        torch.ones(3).__getitem__(torch.ones(3) > 0)


@pytest.mark.parametrize("change", ["scalar", "address", "number"])
def test_fake_graph_detects_changed_launches(change: str) -> None:
    values, other, factor, times = torch.ones(4), torch.ones(4), [2.0], [1]
    chosen = [values]

    def work() -> None:
        for _ in range(times[0]):
            chosen[0].mul_(factor[0])

    graph = GraphMemoryDouble(Watch()).capture(work)
    graph.replay()
    factor[0], chosen[0], times[0] = {
        "scalar": (3.0, values, 1), "address": (2.0, other, 1), "number": (2.0, values, 2),
    }[change]  # fmt: skip
    with pytest.raises(ReplayedOtherwise):
        graph.replay()
