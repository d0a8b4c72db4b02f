"""Tests of the limits by device memory: running requests, chunks, and the largest step that these limits allow."""

from __future__ import annotations

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.messages import Submit
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, SamplingParams, StepResult
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.device_limits import limits_of, max_step_tokens, resolved
from rootstock_llm.services.worker.settings import WorkerSettings
from tests.core.deployed_config import deployed_config
from tests.core.harness import LetterDecoder

GIB = 2**30


@pytest.mark.by_day(one_in=2, seed=9)
@pytest.mark.parametrize(
    ("gib", "rows", "chunk"),
    [
        (None, 64, 2048),
        (23.5, 64, 2048),
        (39.5, 128, 4096),
        (79.6, 256, 8192),
        (178, 256, 16384),
    ],
    ids=["CPU", "RTX 4090", "A100 40 GB", "H100", "B200"],
)
def test_limits_follow_from_device_memory(gib: float | None, rows: int, chunk: int) -> None:
    device_bytes = None if gib is None else int(gib * GIB)
    limits = limits_of(device_bytes)
    assert (limits.max_running_requests, limits.chunked_prefill_size) == (rows, chunk)
    found = resolved(WorkerSettings(), device_bytes)
    assert (found.max_running_requests, found.chunked_prefill_size) == (rows, chunk)


def test_limits_that_the_operator_sets_are_unchanged() -> None:
    """A chunk size of 0 also counts as set. Prompts are then not cut into chunks."""
    found = resolved(WorkerSettings(max_running_requests=7, chunked_prefill_size=0), 140 * GIB)
    assert (found.max_running_requests, found.chunked_prefill_size) == (7, 0)
    found = resolved(WorkerSettings(max_running_requests=7), 140 * GIB)
    assert (found.max_running_requests, found.chunked_prefill_size) == (7, 8192)


@pytest.mark.parametrize(("device_bytes", "mixed"), [(None, True), (80 * GIB, False)], ids=["CPU", "GPU"])
def test_steps_are_mixed_by_default_when_the_device_is_a_cpu(device_bytes: int | None, mixed: bool) -> None:
    assert resolved(WorkerSettings(), device_bytes).enable_mixed_chunk is mixed
    assert resolved(WorkerSettings(enable_mixed_chunk=not mixed), device_bytes).enable_mixed_chunk is not mixed


@pytest.mark.parametrize("off", [0, -1])
def test_prompts_are_not_chunked_when_chunks_are_disabled(off: int) -> None:
    found = resolved(WorkerSettings(chunked_prefill_size=off), 140 * GIB)
    assert (found.chunked_prefill_size, max_step_tokens(found)) == (0, 16384)


def test_largest_step_is_one_chunk_or_one_prefill() -> None:
    h200 = resolved(WorkerSettings(), 140 * GIB)
    assert (h200.max_prefill_tokens, max_step_tokens(h200)) == (16384, 8192)
    assert max_step_tokens(resolved(WorkerSettings(chunked_prefill_size=0), 140 * GIB)) == 16384
    assert max_step_tokens(resolved(WorkerSettings(max_prefill_tokens=1000), 140 * GIB)) == 1000
    assert max_step_tokens(resolved(WorkerSettings(max_prefill_tokens=16, max_running_requests=100), None)) == 116


@pytest.mark.by_day(one_in=3, seed=21)
@pytest.mark.parametrize(
    ("chunk", "prefill", "rows", "mixed"),
    [(32, 64, 6, True), (8, 64, 40, False), (8, 64, 40, True), (0, 48, 12, False), (64, 24, 12, True)],
)
def test_no_step_exceeds_max_step_tokens(chunk: int, prefill: int, rows: int, mixed: bool) -> None:
    """Many prompts, each shorter than max_prefill_tokens, run with decode rows."""
    settings = WorkerSettings(
        max_running_requests=rows, chunked_prefill_size=chunk, max_prefill_tokens=prefill, page_size=4, enable_mixed_chunk=mixed
    )
    config = deployed_config(
        num_pages=2000,
        page_size=4,
        context_len=256,
        vocab_size=100,
        max_running_requests=rows,
        max_prefill_tokens=prefill,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=mixed,
    )
    core, rng, largest = Scheduler(config, LetterDecoder()), np.random.default_rng(0), 0
    for number in range(3 * rows):
        prompt = rng.integers(0, 100, rng.integers(1, prefill), dtype=np.int32)
        params = SamplingParams(max_new_tokens=int(rng.integers(1, 30)), ignore_eos=True)
        core.submit(Submit(0, number, f"r{number}", prompt, params), 0.0)
    while (plan := core.plan(0.0)) is not None:
        largest = max(largest, int(plan.num_tokens.sum()))
        core.commit(_result(plan), 0.0)
        core.take_output()
    assert core.idle and largest <= max_step_tokens(settings)
    assert largest >= min(chunk or prefill, prefill) // 2, "the steps use at least half of the limit"


def _result(plan: BatchPlan) -> StepResult:
    return StepResult(plan.step_id, np.zeros(plan.num_rows, dtype=np.int32))
