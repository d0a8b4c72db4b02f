"""Draft tokens on a device: the host waits only for lengths, and ids and bits equal those of a CPU without drafting.

The tests cover all drafters, with and without graphs. LateStreams replaces the device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.reference import sampling as sampling_twin
from rootstock_llm.services.worker.core.contracts.plan import RowFault
from rootstock_llm.services.worker.core.planning.draft_controller import DraftController
from rootstock_llm.services.worker.exec import build
from rootstock_llm.services.worker.exec.attention.backend import AttentionBatch, AttentionShape, KernelAttention
from rootstock_llm.services.worker.exec.build import DeviceOptions, DeviceParts, assemble_executor, build_device_executor
from rootstock_llm.services.worker.exec.contracts.protocol import ExecutorError
from rootstock_llm.services.worker.exec.contracts.step_data import ForwardBatch
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from rootstock_llm.services.worker.exec.kernel_set import KernelSet
from rootstock_llm.services.worker.exec.loading import load_model
from tests.core.fake_grammar import spec
from tests.exec.always_guessing import always, now_and_then
from tests.exec.device_doubles import GraphMemoryDouble, Watch, WatchedKernels
from tests.exec.draft_folders import add_mtp, write_eagle3
from tests.exec.driver import Driver, Sequence, greedy
from tests.exec.guesses import Guesses
from tests.exec.host_executors import load_request
from tests.exec.late_streams import LateStreams
from tests.exec.random_contexts import Asked, Turned, World, alone, answer_in, random_context, strings, targets
from tests.exec.test_device_graphs import CapturableTorch, WatchedAttention
from tests.exec.test_device_memory import Narrow
from tests.exec.tiny_models import TinyModel
from tests.night import NIGHTLY

CONTEXTS = 100 if NIGHTLY else 3
WORLD = World(max_drafts=4)
PROMPT_TOKENS, NEW_TOKENS = 45, 30
MODEL = TinyModel("Qwen3", {"head_dim": 64, "num_attention_heads": 8, "hidden_size": 128})
SIZES = (WORLD.page_size, WORLD.max_slots, WORLD.num_pages, 0.5, WORLD.context_len)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with an MTP layer. Its subfolder has an EAGLE-3 head."""
    made = tmp_path_factory.mktemp("model")
    MODEL.build(made / "target")
    add_mtp(made / "target", deepseek=False)
    write_eagle3(made / "eagle3", made / "target", draft_vocab=100)
    return made


def made_of(folder: Path, algorithm: str = "none", **options: Any) -> DeviceExecutor:
    """Builds an executor. If it drafts, it runs on LateStreams."""
    drafts = 0 if algorithm == "none" else WORLD.max_drafts
    draft = {"draft": "target", "eagle3": "eagle3"}.get(algorithm)
    given = DeviceOptions(
        device="cpu",
        num_threads=1,
        deterministic=True,
        max_drafts=drafts,
        speculative_algorithm=algorithm,
        draft_model=str(folder / draft) if draft else "",
        **options,
    )
    parts = DeviceParts(streams=LateStreams()) if drafts else None
    executor, _ = build_device_executor(str(folder / "target"), "float32", *SIZES, given, lambda _: None, True, parts)
    return executor


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[DeviceExecutor]:
    executor = made_of(folder)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def late(folder: Path) -> DeviceExecutor:
    return made_of(folder, "ngram")


def asked(number: int) -> Asked:
    return list(targets(WORLD, random.Random(5), PROMPT_TOKENS, NEW_TOKENS))[number]


def guess_with(executor: DeviceExecutor, plain: DeviceExecutor, target: Asked, errors: float) -> Guesses:
    guesses = Guesses([[*target.prompt, *alone(World(), plain, target).tokens]], errors, WORLD.vocab_size)
    executor._steps._drafter = guesses  # type: ignore[attr-defined]
    return guesses


@pytest.mark.parametrize("number", [pytest.param(2, id="penalties"), *([pytest.param(1, id="top-p")] if NIGHTLY else [])])
def test_drafting_changes_no_bit_of_an_answer_on_a_slow_device(plain: DeviceExecutor, late: DeviceExecutor, number: int) -> None:
    target = asked(number)
    guesses = guess_with(late, plain, target, 0.3)
    assert strings(WORLD, late, target, range(CONTEXTS)) == strings(World(), plain, target, range(1))
    assert guesses.accepted > 0


@pytest.mark.parametrize("algorithm", ["eagle3", "mtp"] if NIGHTLY else ["mtp"])
def test_draft_head_with_a_quantized_target_changes_no_bit_of_a_completion(
    folder: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms, target = {"quantization": "int8", "quantize_head": True}, asked(0)
    without, drafting = made_of(folder, **forms), made_of(folder, algorithm, **forms)
    expected = alone(World(), without, target)
    monkeypatch.setattr(DraftController, "choose", now_and_then())
    found = alone(WORLD, drafting, target)
    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)
    assert found.verified.drafted > 0
    without.close()
    drafting.close()


@pytest.mark.parametrize("algorithm", ["ngram", "draft", "eagle3", "mtp"] if NIGHTLY else ["eagle3"])
def test_no_drafter_changes_a_bit_of_an_answer(
    folder: Path, plain: DeviceExecutor, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One drafter is the target itself, so all of its draft tokens must be accepted. A rejection shows a gap in the draft KV."""
    target = asked(0)
    executor = made_of(folder, algorithm)
    assert strings(WORLD, executor, target, range(CONTEXTS)) == strings(World(), plain, target, range(1))
    monkeypatch.setattr(DraftController, "choose", now_and_then())
    verified = alone(WORLD, executor, target).verified
    assert algorithm == "ngram" or verified.drafted > 0
    assert algorithm != "draft" or verified.accepted == verified.drafted
    executor.close()


def test_drafting_changes_no_token_of_an_answer_with_a_grammar(plain: DeviceExecutor, late: DeviceExecutor) -> None:
    """The grammar forces some tokens while a row of the request is in flight. The result of this row must be discarded."""
    bound = asked(2)
    target = replace(bound, params=replace(bound.params, grammar=spec(1, NEW_TOKENS), top_logprobs=-1))
    expected = alone(World(), plain, target).tokens
    guesses = guess_with(late, plain, target, 0.3)
    for seed in range(CONTEXTS):
        context = random_context(WORLD, seed, target, expected)
        assert answer_in(replace(context, overlap=True), late).tokens == expected[len(context.target.resumed) :]
    assert guesses.accepted > 0


def test_step_waits_for_the_previous_step_only_when_draft_tokens_are_verified(
    plain: DeviceExecutor, late: DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, streams = asked(1), late.runner.streams
    assert isinstance(streams, LateStreams)
    guess_with(late, plain, target, 0.0)
    waits: list[tuple[bool, bool]] = []
    forward, step = late._steps.forward, [False]

    def counted(run: Any) -> None:
        before, verified = streams.waits, step[0]
        forward(run)
        step[0] = bool(run.draft_tokens.result())
        waits.append((verified or bool(run.plan.drafts.any()), streams.waits > before))

    monkeypatch.setattr(late._steps, "forward", counted)
    monkeypatch.setattr(DraftController, "choose", now_and_then())
    turned = Turned(WORLD.config(), late, overlap=True)
    answer, beside = turned.submit(target), turned.submit(Asked(target.prompt[:20], target.params))
    turned.finish()
    assert answer.bits() == alone(World(), plain, target).bits() and beside.ended
    assert {waited for must, waited in waits if not must} == {False}
    assert {waited for must, waited in waits if must} == {True}


class Sized(WatchedAttention):
    """Recorded attention that checks that each step fits into the rows and tokens of its shape."""

    def __init__(self, shape: AttentionShape, watch: Watch) -> None:
        super().__init__(CapturableTorch(reference), watch)
        self._shape, self.most = shape, 0

    def plan(self, batch: AttentionBatch) -> None:
        self.most = max(self.most, len(batch.starts))
        assert self.most <= self._shape.max_rows and int(batch.num_tokens.sum()) <= self._shape.max_tokens
        self._kernels.plan(batch)


def with_graphs(folder: Path) -> DeviceExecutor:
    watch = Watch()
    layers, sampling = WatchedKernels(reference, watch), WatchedKernels(sampling_twin, watch)
    loaded = load_model(load_request(folder / "target", "float32", WORLD.page_size, WORLD.context_len))
    parts = DeviceParts(
        streams=LateStreams(watch),
        kernels=KernelSet(layers, sampling),  # type: ignore[arg-type]
        attention=lambda shape: Sized(shape, watch),
        graph_memory=GraphMemoryDouble(watch),  # type: ignore[arg-type]
        eager_cost=1.0,
    )
    options = DeviceOptions(device="cpu", max_graph_rows=8, max_tokens=64, max_drafts=4)
    model = replace(loaded, kernels=layers, model=loaded.model)  # type: ignore[arg-type]
    executor, _ = assemble_executor(model, 6, WORLD.page_size, WORLD.num_pages, 0.5, options, lambda _: None, True, parts)
    return executor


def test_verification_of_draft_tokens_uses_graphs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a slot has several rows in a step, the step's sampling is not part of the graph.

    A step that needs more rows of logits than a graph has uses no graph.
    """
    monkeypatch.setattr(DraftController, "choose", always)
    target, executor = replace(asked(2), prompt=asked(2).prompt[:9]), with_graphs(folder)
    world = replace(WORLD, max_slots=6)
    options = DeviceOptions(device="cpu", kernels="torch", attention_backend="torch")
    torch_alone, _ = build_device_executor(str(folder / "target"), "float32", *SIZES, options, lambda _: None)
    expected = alone(World(), torch_alone, target)
    guesses = guess_with(executor, torch_alone, target, 0.3)
    before = replace(executor.runner.stats)
    assert alone(world, executor, target).tokens == expected.tokens and guesses.accepted > 0
    assert executor.runner.stats.graph_steps > before.graph_steps
    assert executor.runner.stats.eager_steps == before.eager_steps + 1, "only the step with the prompt may run without a graph"
    turned = Turned(world.config(), executor, overlap=True)
    crowd = [turned.submit(target) for _ in range(3)]
    turned.finish()
    assert [answer.tokens for answer in crowd] == [expected.tokens] * 3
    assert executor.runner.attention.most > 8, "a step must have more rows than there are slots, and more than a graph has"  # type: ignore[attr-defined]
    torch_alone.close()


def test_hidden_states_for_the_drafter_are_in_the_order_of_the_plan(late: DeviceExecutor) -> None:
    """A graph computes the last token of each row first, because it is sampled. The drafter needs states in the plan's order."""
    plans = []
    forward = late.runner.forward
    turned = Turned(WORLD.config(), late, overlap=False)
    for size in (3, 5):
        turned.submit(replace(asked(0), prompt=asked(0).prompt[:size]))
    late.runner.forward = lambda run: (plans.append(run), forward(run))  # type: ignore[method-assign, assignment]
    turned.turn()
    late.runner.forward = forward  # type: ignore[method-assign]
    turned.finish()
    run = plans[0]
    columns, known = ForwardBatch.of_known(run.plan, 64, 16)
    run.order = columns.order
    assert known[:8].tolist() != run.plan.input_ids.tolist()
    of_pass = (torch.from_numpy(known),)
    for first, count in ((0, 3), (3, 5), (4, 2)):
        (kept,) = late.runner.copied_states(run, of_pass, first, count)
        assert kept.tolist() == run.plan.input_ids[first : first + count].tolist()


def test_step_is_computed_without_draft_tokens_when_memory_is_short(
    plain: DeviceExecutor, late: DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, runner = asked(1), late.runner
    guess_with(late, plain, target, 0.0)
    monkeypatch.setattr(DraftController, "choose", always)
    narrow, given_up, pieces = Narrow(runner.passes.model, 1), runner.stats.given_up, runner.stats.pieces
    monkeypatch.setattr(runner.passes, "model", narrow)
    answer = alone(WORLD, late, target)
    assert answer.bits() == alone(World(), plain, target).bits()
    assert answer.verified.drafted > 0 == answer.verified.accepted
    assert narrow.refused > 0 and runner.stats.pieces > pieces and runner.stats.given_up == given_up


def test_row_that_runs_out_of_memory_replaces_the_length_of_the_previous_request(folder: Path) -> None:
    """The next step is already planned to follow the failed row's tokens. So the slot's length must include these tokens."""
    executor = made_of(folder, "ngram")
    driver, runner = Driver(executor, WORLD.page_size), executor.runner
    driver.prefill([Sequence(list(range(6, 46)), 0, greedy())])
    lengths = executor._steps._lengths  # type: ignore[attr-defined]
    assert lengths[0] == 40
    runner.passes.model = Narrow(runner.passes.model, 100, {0})
    run = executor.forward(driver.plan([(Sequence([7, 8, 9], 0, greedy()), 3)]))
    executor.sample(run, {})
    assert executor.wait(run).faults == {0: RowFault.OUT_OF_MEMORY} and lengths[0] == 3
    executor.close()


def test_drafting_changes_no_bit_of_an_answer_when_the_drafter_has_no_memory(
    folder: Path, plain: DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of the draft model and copies of hidden states fail at times. The steps must succeed without them."""
    target, executor = asked(1), made_of(folder, "eagle3")
    refused = []

    def now_and_then_refused(owner: Any, name: str, every: int) -> None:
        whole, calls = getattr(owner, name), iter(range(1 << 30))

        def narrow(*args: Any) -> Any:
            if next(calls) % every == every - 1:
                refused.append(name)
                raise torch.OutOfMemoryError(name)
            return whole(*args)

        monkeypatch.setattr(owner, name, narrow)

    now_and_then_refused(executor.runner, "copied_states", 4)
    now_and_then_refused(executor._steps._drafter, "_pass", 5)  # type: ignore[attr-defined]
    assert strings(WORLD, executor, target, range(1)) == strings(World(), plain, target, range(1))
    monkeypatch.setattr(DraftController, "choose", always)
    answer = alone(WORLD, executor, target)
    assert answer.bits() == alone(World(), plain, target).bits() and answer.verified.drafted > 0
    assert refused.count("copied_states") > 1 and refused.count("_pass") > 1
    executor.close()


def test_committed_tokens_stay_when_the_next_step_fails(
    folder: Path, plain: DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page table must still get the failed step's pages, because a later step in flight may use them."""
    target, executor = asked(1), made_of(folder, "ngram")
    guesses = guess_with(executor, plain, target, 0.0)
    monkeypatch.setattr(DraftController, "choose", always)
    forward, failed = executor._steps.forward, []

    def broken(*_: object) -> None:
        raise RuntimeError("the bookkeeping failed")

    def watched(run: Any) -> None:
        with monkeypatch.context() as patch:
            if len(run.plan.table_slots):
                patch.setattr(guesses, "sampled", broken)
            try:
                forward(run)
            except RuntimeError:
                failed.append(run.plan)
                raise

    monkeypatch.setattr(executor._steps, "forward", watched)
    turned = Turned(WORLD.config(enable_radix_cache=False), executor, overlap=True)
    answer = turned.submit(target)
    with pytest.raises(ExecutorError, match="the bookkeeping failed"):
        turned.finish()
    assert answer.tokens and answer.tokens == alone(World(), plain, target).tokens[: len(answer.tokens)]
    plan = failed[0]
    slot, first, mapped = int(plan.table_slots[0]), int(plan.table_firsts[0]), int(plan.table_counts[0])
    assert executor.runner.passes.table[slot, first : first + mapped].tolist() == plan.table_pages[:mapped].tolist()
    executor.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_executor_with_drafts_can_be_assembled_for_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tensor on the device fails, because the machine has no GPU. All earlier steps of the assembly succeed."""
    monkeypatch.setattr(build, "device_of", lambda name: torch.device("cuda", 0))
    loaded = load_model(load_request(folder / "target", "float32", WORLD.page_size, WORLD.context_len))
    parts = DeviceParts(LateStreams(), KernelSet(reference, sampling_twin), lambda _: KernelAttention(reference))
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        assemble_executor(loaded, 4, 4, 16, 0.5, DeviceOptions(max_drafts=4), lambda _: None, False, parts)
