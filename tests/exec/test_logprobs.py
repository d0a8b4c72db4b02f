"""Log probabilities of outputs and prompts equal transformers' log_softmax, for any chunk size and in mixed batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rootstock_llm.kernels.contracts.sample_ops import SampleKernels
from rootstock_llm.services.worker.core.contracts.plan import (
    BatchPlan,
    ForwardMode,
    PromptLogprobs,
    RowFault,
    SamplingParams,
    SlotParams,
)
from rootstock_llm.services.worker.exec.sampling import logprob_requests as logprob_wishes
from rootstock_llm.services.worker.exec.sampling.logprob_requests import Logits, LogprobRequests
from rootstock_llm.services.worker.exec.streams.copies import Readback
from tests.all_pairs import each_pair, each_value
from tests.exec.device_doubles import InlineStreams
from tests.exec.driver import Driver, Sequence, i32
from tests.exec.host_executors import KERNELS, build_host_executor, on_both_by_night, on_both_kernels
from tests.exec.sampling import Sampling
from tests.exec.tiny_models import MODELS

CLOSE = 1e-4
VOCAB = 257
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
WHOLE = 1 << 30
CHECKPOINTS = ["qwen3", "llama-untied"]


@dataclass(frozen=True)
class Scored:
    """A checkpoint, and transformers' log probabilities for any tokens."""

    folder: Path
    model: Any

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """Returns float32[n, V]; row i has the log probabilities of the token after tokens[i]."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


# Runs each checkpoint with one kernel set. The test of chunk sizes runs each checkpoint with both.
by_turns = each_value(indirect=("scored", "kernel_name"), scored=CHECKPOINTS, kernel_name=KERNELS)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def scored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scored:
    folder = tmp_path_factory.mktemp(request.param)
    return Scored(folder, MODELS[request.param].build(folder))


@pytest.fixture
def driving(scored: Scored, monkeypatch: pytest.MonkeyPatch, kernel_name: str) -> Iterator[Driver]:
    """A driver whose executor measures log probabilities for 7 tokens at a time, so that most rows need several pieces."""
    monkeypatch.setattr(logprob_wishes, "PIECE_BYTES", 7 * 4 * VOCAB)
    executor, _ = build_host_executor(
        str(scored.folder), "float32", 4, 16, 512, 0.5, None, 1, lambda _: None, True, kernel_name
    )  # fmt: skip
    yield Driver(executor, 4)
    executor.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()


def check_top(values: Any, ids: Any, expected: torch.Tensor, num: int) -> None:
    """Compares one row's most likely tokens with transformers'. If values are equal, the ids may differ."""
    assert len(values) == len(ids) == num
    assert list(values) == pytest.approx(expected.topk(num).values.tolist(), abs=CLOSE)
    assert [float(expected[i]) for i in ids] == pytest.approx(list(values), abs=CLOSE)


def check_outputs(sequence: Sequence, scored: Scored) -> None:
    expected = scored.expected(sequence.tokens)[len(sequence.prompt) - 1 : -1]
    assert len(sequence.logprobs) == len(sequence.output)
    for row, token, found in zip(expected, sequence.output, sequence.logprobs, strict=True):
        assert found.sampled == pytest.approx(float(row[token]), abs=CLOSE)
        check_top(found.top, found.top_ids, row, sequence.params.top_logprobs)
        chosen = [float(row[i]) for i in sequence.params.logprob_token_ids]
        assert list(found.chosen) == pytest.approx(chosen, abs=CLOSE)


@pytest.mark.by_day(one_in=2, seed=1)
@by_turns
def test_output_logprobs_equal_transformers_in_a_mixed_batch(scored: Scored, driving: Driver) -> None:
    wants = [
        replace(GREEDY, top_logprobs=0),
        GREEDY,
        replace(GREEDY, top_logprobs=20),
        replace(GREEDY, top_logprobs=3, logprob_token_ids=(9, 250, 9), temperature=1.0, seed=5, frequency_penalty=1.0),
        replace(GREEDY, top_logprobs=0, logprob_token_ids=(0,), temperature=2.0, top_k=5),
        *[replace(GREEDY, top_logprobs=index) for index in range(1, 8)],
    ]
    sequences = [Sequence(prompt_of(5 + 3 * index, index), index, params) for index, params in enumerate(wants)]
    driving.prefill(sequences)
    driving.decode(sequences, 6)
    for sequence in sequences:
        if sequence.params.top_logprobs < 0:
            assert sequence.logprobs == []
        else:
            check_outputs(sequence, scored)


def joined(parts: list[PromptLogprobs]) -> PromptLogprobs:
    columns = ("values", "top_ids", "top", "chosen")
    return PromptLogprobs(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))


@pytest.mark.by_day(one_in=4)
@each_pair(
    indirect=("scored", "kernel_name"),
    chunk={"4": 4, "12": 12, "40": 40, "whole": WHOLE},
    first=[0, 1, 17, 44],
    scored=CHECKPOINTS,
    kernel_name=KERNELS,
)
def test_prompt_logprobs_equal_transformers_for_any_chunk_size(scored: Scored, driving: Driver, chunk: int, first: int) -> None:
    params = replace(GREEDY, top_logprobs=4, logprob_token_ids=(3, 77), prompt_logprobs_from=first)
    sequence = Sequence(prompt_of(45), 2, params)
    driving.prefill([sequence], chunk)
    driving.decode([sequence], 4)
    found, begin = joined(sequence.prompt_logprobs), max(1, first)
    expected = scored.expected(sequence.prompt)[begin - 1 : -1]
    targets = sequence.prompt[begin:]
    assert found.values.dtype == found.top.dtype == found.chosen.dtype == np.float32 and found.top_ids.dtype == np.int32
    assert found.values.tolist() == pytest.approx([float(r[t]) for r, t in zip(expected, targets, strict=True)], abs=CLOSE)
    assert found.chosen.tolist() == pytest.approx(expected[:, [3, 77]].numpy(), abs=CLOSE)
    for index, row in enumerate(expected):
        check_top(found.top[index].tolist(), found.top_ids[index].tolist(), row, 4)
    check_outputs(sequence, scored)


@pytest.mark.by_day(one_in=2, seed=1)
@by_turns
def test_prompt_and_output_logprobs_share_a_step(scored: Scored, driving: Driver) -> None:
    """Logits of prompts and of sampled rows share a buffer, so one must not overwrite the other."""
    early = Sequence(prompt_of(9, 1), 0, replace(GREEDY, top_logprobs=2))
    late = [Sequence(prompt_of(30 + n, n), n, replace(GREEDY, top_logprobs=n, prompt_logprobs_from=0)) for n in (1, 2)]
    plain = Sequence(prompt_of(20, 9), 3, replace(GREEDY, top_logprobs=1))
    driving.prefill([early])
    while late[1].computed < len(late[1].prompt):
        extends = [s for s in (*late, plain) if s.computed < len(s.prompt)]
        driving.step([(s, min(12, len(s.prompt) - s.computed)) for s in extends] + [(early, 1)])
    driving.decode([early, *late, plain], 6)
    for sequence in (early, *late, plain):
        check_outputs(sequence, scored)
    for sequence in late:
        found, expected = joined(sequence.prompt_logprobs), scored.expected(sequence.prompt)[:-1]
        targets = torch.tensor(sequence.prompt[1:])
        assert found.values.tolist() == pytest.approx(expected.gather(1, targets[:, None])[:, 0].tolist(), abs=CLOSE)
        assert found.top.shape == (len(targets), sequence.params.top_logprobs)
    assert plain.prompt_logprobs == []


@pytest.mark.by_day(one_in=2)
@by_turns
def test_prompt_logprobs_can_be_requested_without_output_logprobs(scored: Scored, driving: Driver) -> None:
    sequence = Sequence(prompt_of(10), 0, replace(GREEDY, prompt_logprobs_from=0))
    driving.prefill([sequence])
    assert sequence.prompt_logprobs[0].values.shape == (9,)
    assert sequence.prompt_logprobs[0].top.shape == (9, 0) and sequence.logprobs == []


# Without a model


def scores_of(
    kernels: SampleKernels, params: SamplingParams, plan: BatchPlan, logits: Logits
) -> tuple[dict[int, PromptLogprobs], dict[int, RowFault]]:
    """Returns a plan's prompt log probabilities and faults by row, for slot 0 with these parameters and a vocabulary of 8."""
    streams = InlineStreams()
    made, readback = LogprobRequests(4, 8, kernels, streams.device), Readback(streams)
    made.admit(SlotParams(0, 0, params, (), i32([])))
    pieces = made.measure_prompts(plan, torch.from_numpy(plan.input_ids.astype(np.int64)), logits, readback, "")
    readback.launch()
    return made.prompts(pieces, readback.host())


def prompt_plan(num_tokens: int, offset: int, after: int) -> BatchPlan:
    """Returns a plan with one extend row in slot 0, whose tokens are 0, 1, 2, ..."""
    none = i32([])
    return BatchPlan(
        step_id=1, mode=ForwardMode.EXTEND, num_extend=1, slots=i32([0]), starts=i32([0]), num_tokens=i32([num_tokens]),
        input_ids=np.arange(num_tokens, dtype=np.int32), sample=np.array([False]), mask_rows=none,
        prompt_logprob_rows=i32([0]), prompt_logprob_offsets=i32([offset]), prompt_logprob_nexts=i32([after]), admitted=(),
        table_slots=none, table_firsts=none, table_counts=none, table_pages=none,
    )  # fmt: skip


@pytest.mark.by_day(one_in=2, seed=19)
@pytest.mark.parametrize(
    ("piece", "offset", "after", "targets"),
    [
        (1, 0, 7, [1, 2, 3, 4, 5, 7]),
        (2, 0, 7, [1, 2, 3, 4, 5, 7]),
        (5, 0, 7, [1, 2, 3, 4, 5, 7]),
        (6, 0, 7, [1, 2, 3, 4, 5, 7]),
        (2, 0, -1, [1, 2, 3, 4, 5]),
        (5, 0, -1, [1, 2, 3, 4, 5]),
        (1, 4, 6, [5, 6]),
        (100, 4, 6, [5, 6]),
        (100, 5, -1, []),
    ],
)
def test_logprob_measurement_requests_logits_in_pieces_of_limited_size(
    kernels: SampleKernels, monkeypatch: pytest.MonkeyPatch, piece: int, offset: int, after: int, targets: list[int]
) -> None:
    monkeypatch.setattr(logprob_wishes, "PIECE_BYTES", piece * 4 * 8)
    table, asked = torch.randn(6, 8, generator=torch.Generator().manual_seed(3)), []
    buffer = torch.empty(piece, 8)

    def logits(wanted: torch.Tensor) -> torch.Tensor:
        """Returns a view of one shared buffer, like a model's logits."""
        asked.extend(wanted.tolist())
        assert len(wanted) <= piece
        buffer[: len(wanted)] = table[wanted]
        return buffer[: len(wanted)]

    params = replace(GREEDY, top_logprobs=2, logprob_token_ids=(7, 99))
    scores, faults = scores_of(kernels, params, prompt_plan(6, offset, after), logits)
    found, expected = scores[0], table.log_softmax(-1)[offset : offset + len(targets)]
    assert asked == list(range(offset, offset + len(targets)))
    assert found.values.tolist() == pytest.approx([float(r[t]) for r, t in zip(expected, targets, strict=True)], abs=1e-6)
    np.testing.assert_allclose(found.top, expected.topk(2).values.numpy(), atol=1e-6)
    assert found.chosen[:, 0].tolist() == pytest.approx(expected[:, 7].tolist(), abs=1e-6)
    assert (found.chosen[:, 1] == -np.inf).all() and faults == {}


@pytest.mark.by_day(one_in=2, seed=29)
@on_both_kernels
@pytest.mark.parametrize(
    ("poison", "faults"), [(torch.nan, {0: RowFault.NAN_LOGITS}), (torch.inf, {0: RowFault.NAN_LOGITS}), (-torch.inf, {})]
)
def test_prompt_gets_a_fault_when_logits_are_not_finite(
    kernels: SampleKernels, poison: float, faults: dict[int, RowFault]
) -> None:
    table = torch.zeros(6, 8)
    table[3, 2:5] = poison
    params = replace(GREEDY, top_logprobs=1)
    assert scores_of(kernels, params, prompt_plan(6, 0, 1), lambda wanted: table[wanted])[1] == faults
    assert scores_of(kernels, params, prompt_plan(6, 4, 1), lambda wanted: table[wanted])[1] == {}


@on_both_by_night
def test_top_logprobs_are_limited_to_the_vocabulary(kernels: SampleKernels) -> None:
    sampler = Sampling(1, 8, kernels)
    sampler.admit(SlotParams(0, 0, replace(GREEDY, top_logprobs=20), (), i32([])))
    logits = torch.arange(8, dtype=torch.float32)[None]
    found = sampler.sample(logits, i32([0]), i32([1])).logprobs[0]
    assert found.top_ids == (7, 6, 5, 4, 3, 2, 1, 0)


def test_admission_drops_the_logprob_options_of_the_previous_request(kernels: SampleKernels) -> None:
    sampler, found = Sampling(1, 8, kernels), []
    for params in (replace(GREEDY, top_logprobs=1, logprob_token_ids=(3,)), replace(GREEDY, top_logprobs=0), GREEDY):
        sampler.admit(SlotParams(0, 0, params, (), i32([])))
        result = sampler.sample(torch.zeros(1, 8), i32([0]), i32([1]))
        found.append({row: (len(values.top), len(values.chosen)) for row, values in result.logprobs.items()})
    assert found == [{0: (1, 1)}, {0: (0, 0)}, {}]
