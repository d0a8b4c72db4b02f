"""The experts that an executor reports: counts of rows and ids of single tokens, equal to those of transformers' routers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.experts import ExpertShape
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.contracts.operations import OperationRefused, ReleaseMemory, ResumeMemory
from rootstock_llm.services.worker.exec.contracts.protocol import Executor
from rootstock_llm.services.worker.exec.step.step_experts import RoutedPart, StepExperts
from tests.exec.guesses import Guesses
from tests.exec.test_device_graphs import Device, GuardedExecutor
from tests.exec.test_scheduler_parity import PAGE_SIZE, Served, config_for
from tests.exec.test_speculation import guess_with
from tests.exec.tiny_models import EXPERTS, MODELS, TinyModel, greedy_answers

# All layers of this Mixtral are sparse, and none has a window, because windows would need cache groups.
MIXTURES = {"mixtral": TinyModel("Mixtral", EXPERTS), "qwen3-moe": MODELS["qwen3-moe"]}
SHAPES = {"mixtral": ExpertShape((0, 1, 2), 8, 3), "qwen3-moe": ExpertShape((0, 2), 8, 3)}
RNG = random.Random(5)
PROMPTS = [[RNG.randrange(6, 257) for _ in range(length)] for length in (3, 9, 17, 60)]
NEW_TOKENS = 12


class Mixture:
    """A mixture on disk, with transformers' outputs for PROMPTS and the experts that transformers' routers choose."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.shape = folder, SHAPES[name]
        self._model: Any = MIXTURES[name].build(folder)
        self.answers = greedy_answers(self._model, PROMPTS, NEW_TOKENS)
        self.routed = [self._routed([*prompt, *answer[:-1]]) for prompt, answer in zip(PROMPTS, self.answers, strict=True)]

    def _routed(self, tokens: list[int]) -> NDArray[np.int64]:
        """Returns int64[tokens, layers, chosen]: the experts of each token, in falling order of their logits."""
        with torch.inference_mode():
            layers = self._model(torch.tensor([tokens]), output_router_logits=True).router_logits
        logits = torch.stack([layer.view(len(tokens), -1) for layer in layers], 1)
        return logits.topk(self.shape.num_chosen, -1).indices.numpy()


@pytest.fixture(scope="module", params=list(SHAPES))
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return Mixture(request.param, tmp_path_factory.mktemp("mixture"))


@pytest.fixture
def executors(mixture: Mixture) -> Iterator[Any]:
    """Builds executors, and closes them after the test."""
    opened: list[Executor] = []

    def build(max_tokens: int = 512, max_drafts: int = 0) -> Executor:
        options = DeviceOptions(device="cpu", num_threads=1, max_tokens=max_tokens, max_drafts=max_drafts)
        sizes = (PAGE_SIZE, 16, 1024, 0.5, 512)
        executor, info = build_device_executor(str(mixture.folder), "float32", *sizes, options, lambda _: None)
        assert info.experts == mixture.shape
        opened.append(executor)
        return executor

    yield build
    for executor in opened:
        executor.close()


def recording(mixture: Mixture, executor: Executor, overlap: bool = True, **changes: Any) -> Served:
    """Returns a scheduler with a running record."""
    served = Served(config_for(experts=mixture.shape, **changes), executor, overlap)
    SchedulerControl(served.core).start_expert_record()
    return served


def check(served: Served, mixture: Mixture, first: int = 0) -> None:
    """Runs PROMPTS. Checks their output, their routed experts from `first` on, and the record against transformers.

    If `first` is -1, the requests return no routed experts.
    """
    assert served.run(PROMPTS, NEW_TOKENS, routed_from=first) == mixture.answers
    for handle, wanted in enumerate(mixture.routed if first >= 0 else ()):
        assert np.concatenate(served.routed[handle]).tolist() == wanted[first:].tolist()
    found = served.core.expert_record.distribution()
    assert found is not None
    every = np.concatenate(mixture.routed)
    counts = [np.bincount(layer.ravel(), minlength=mixture.shape.num_experts) for layer in every.swapaxes(0, 1)]
    assert found.rows.tolist() == np.array(counts).tolist()
    assert found.num_tokens == len(every)


@pytest.mark.by_day(one_in=3, seed=1)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("chunk", [0, 8, 64])
def test_experts_equal_those_of_transformers(mixture: Mixture, executors: Any, overlap: bool, chunk: int) -> None:
    check(recording(mixture, executors(), overlap, chunked_prefill_size=chunk, enable_mixed_chunk=True), mixture, 3)


@pytest.mark.parametrize("first", [0, 3])
def test_experts_are_complete_when_a_step_is_computed_in_pieces(mixture: Mixture, executors: Any, first: int) -> None:
    """Covers the fault of sglang #26860 on the executor: a step has more tokens than the executor's buffers hold."""
    executor = executors(max_tokens=16)
    check(recording(mixture, executor, enable_mixed_chunk=True), mixture, first)
    assert executor.runner.stats.pieces > 4


@pytest.mark.parametrize("first", [-1, 0])
def test_rejected_draft_tokens_are_not_counted(mixture: Mixture, executors: Any, first: int) -> None:
    executor = executors(max_drafts=4)
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, mixture.answers, strict=True)]
    guess_with(executor, Guesses(texts, 0.3, 257))
    served = recording(mixture, executor, max_drafts=4, speculative_adaptive=False, enable_mixed_chunk=True)
    check(served, mixture, first)
    assert 0 < served.core.counters.accepted_tokens_total < served.core.counters.drafted_tokens_total


def test_graph_steps_report_the_experts_of_each_replay_without_padding(mixture: Mixture) -> None:
    """Covers the fault of sglang #12162 on the executor: captured decode steps must report the experts of each replay.

    The steps also launch no work for which the host waits.
    """
    device = Device(mixture.folder)
    executor: Any = GuardedExecutor(device)
    check(recording(mixture, executor, enable_mixed_chunk=True, num_pages=400, max_running_requests=12), mixture)
    assert device.executor.runner.stats.graph_steps > 4


def test_experts_of_prompt_tokens_in_graphs_are_in_the_order_of_positions(mixture: Mixture) -> None:
    """A graph computes the sampled tokens first, and then the other tokens of a prompt."""
    device = Device(mixture.folder, eager_cost=9.0)
    changes = {"chunked_prefill_size": 4, "num_pages": 400, "max_running_requests": 12}
    served = recording(mixture, device.executor, enable_mixed_chunk=True, **changes)
    check(served, mixture)
    assert device.executor.runner.stats.graph_steps > sum(not plan.num_extend for plan in served.plans)


def test_draft_tokens_in_graphs_are_not_counted_when_they_are_rejected(mixture: Mixture) -> None:
    device = Device(mixture.folder, max_drafts=3)
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, mixture.answers, strict=True)]
    guess_with(device.executor, Guesses(texts, 0.3, 257))
    changes = {"max_drafts": 3, "speculative_adaptive": False, "num_pages": 400, "max_running_requests": 12}
    check(recording(mixture, device.executor, enable_mixed_chunk=True, **changes), mixture)
    assert device.executor.runner.stats.graph_steps > 0


def test_experts_of_each_row_have_separate_memory() -> None:
    experts = StepExperts()
    experts.parts.append(RoutedPart("experts_0", (0, 2), (1, 3)))
    _, routed = experts.results({"experts_0": torch.arange(24, dtype=torch.int16).reshape(4, 2, 3)})
    assert {row: ids[:, 0, 0].tolist() for row, ids in routed.items()} == {0: [0], 2: [6, 12, 18]}
    assert all(ids.base is None for ids in routed.values())


@pytest.mark.parametrize(
    "changes", [{"num_experts_per_tok": 2}, {"num_experts": 12, "num_local_experts": 12}], ids=["chosen", "all"]
)
def test_resume_is_refused_when_the_folder_has_other_experts(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = MODELS["qwen3-moe"]
    model.build(tmp_path)
    options = DeviceOptions(device="cpu", num_threads=1)
    executor, _ = build_device_executor(str(tmp_path), "float32", PAGE_SIZE, 16, 64, 0.5, 512, options, lambda _: None)
    executor.apply(ReleaseMemory(kv=False, weights=True))
    TinyModel(model.family, {**model.options, **changes}).build(tmp_path)
    with pytest.raises(OperationRefused, match="other sizes"):
        executor.apply(ResumeMemory(kv=False, weights=True))
    executor.close()


def test_step_collects_no_experts_when_no_record_runs(mixture: Mixture, executors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def collected(*_: Any) -> None:
        raise AssertionError("no plan asks for experts")

    monkeypatch.setattr(StepExperts, "add", collected)
    served = Served(config_for(experts=mixture.shape), executors(), True)
    assert served.run(PROMPTS, NEW_TOKENS) == mixture.answers
