"""Launches a step of every kind before the first request, so that all kernels are compiled and libraries have chosen kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rootstock_llm.services.shared.limits import MAX_TOP_LOGPROBS
from rootstock_llm.services.worker.core.contracts.plan import (
    BatchPlan,
    DryParams,
    EmbeddingParams,
    ForwardMode,
    SamplingParams,
    SlotParams,
)
from rootstock_llm.services.worker.exec.contracts.protocol import NO_MASKS
from rootstock_llm.services.worker.exec.contracts.step_data import SampleOrder
from rootstock_llm.services.worker.exec.sampling.logprob_requests import TOPS
from rootstock_llm.services.worker.exec.step.idle_steps import StepBounds, idle_decode, largest_step
from rootstock_llm.services.worker.exec.step.model_runner import DeviceRunner, StepRun
from rootstock_llm.services.worker.exec.step.passes import NOTHING
from rootstock_llm.services.worker.exec.streams.copies import Readback

# Tokens of the prompts on a GPU, in addition to a prompt that fills a pass. Libraries choose kernels by the number of tokens.
PROMPTS = (1, 20, 100, 1000)
DECODES = (1, 40)  # rows of decode steps without a graph
VERIFIED, DRAFTED = (1, 3), 2  # decode rows with draft tokens in a step, and draft tokens per row
EVERYTHING = SamplingParams(  # all features of sampling
    max_new_tokens=4,
    temperature=0.7,
    min_new_tokens=2,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    banned_token_ids=(0,),
    dry=DryParams(0.5, allowed_length=1),
    top_logprobs=MAX_TOP_LOGPROBS,
    logprob_token_ids=(0,),
)
VECTOR = SamplingParams(max_new_tokens=1, embedding=EmbeddingParams())


def warm_up(
    runner: DeviceRunner,
    bounds: StepBounds,
    prompts: Sequence[int] = PROMPTS,
    max_drafts: int = 0,
    ends_context: bool = False,
) -> None:
    """Launches a step of every kind on the forward stream.

    Afterwards, the page table is empty, the pool's first pages are undefined, and slot 0 needs an admission.

    Args:
        prompts: tokens of the prompts; a larger number than the bounds allow is reduced.
        max_drafts: draft tokens per row, 0 if steps verify no draft tokens.
        ends_context: whether to launch also steps of one row at the end of the longest context. The attention of deterministic
            mode has other kernels for contexts that are longer than a split.
    """
    for tokens in prompts:
        some = replace(bounds, max_tokens=min(tokens, bounds.max_tokens), max_slots=min(tokens, bounds.max_slots))
        largest_step(runner, some)
    if ends_context:
        largest_step(runner, replace(bounds, max_tokens=1, max_slots=1), bounds.context_len - 1)
    for rows in DECODES:
        idle_decode(runner, min(rows, bounds.max_slots))
    if bounds.generates:
        _logprobs(runner)
    _request(runner, bounds.generates, bounds.context_len - 1 if ends_context else 0)
    if max_drafts:
        for rows in VERIFIED:
            _verification(runner, min(rows, bounds.max_slots, bounds.max_tokens // (1 + DRAFTED)))


def _logprobs(runner: DeviceRunner) -> None:
    logits = runner.passes.all_logits(1)
    rows = torch.zeros(1, dtype=torch.int32, device=runner.passes.device)
    for num_top in TOPS:
        runner.sampler.logprobs.measure(logits, rows, rows, num_top)


def _request(runner: DeviceRunner, generates: bool, last: int) -> None:
    """Runs a request with all features of sampling: a prompt of one token, then one decode step.

    An embedding has no decode step.

    Args:
        last: position of a second decode step; 0 for no such step.
    """
    decodes = [(start, 0) for start in (1, last) if start] if generates else []
    for start, num_extend in ((0, 1), *decodes):
        run = StepRun(_step(start, num_extend, EVERYTHING if generates else VECTOR), Readback(runner.streams))
        runner.forward(run)
        masks = {0: np.full(runner.sampler.num_words, ~np.uint32(0), dtype=np.uint32)} if generates else {}
        runner.sample(run, masks)
        runner.result(run)
    runner.passes.table.fill_(-1)


def _verification(runner: DeviceRunner, rows: int) -> None:
    """Runs a step in which `rows` slots verify DRAFTED draft tokens each."""
    if not rows:
        return
    tokens = rows * (1 + DRAFTED)
    plan = replace(
        _step(1, 0, EVERYTHING),
        slots=np.repeat(np.arange(rows, dtype=np.int32), 1 + DRAFTED),
        starts=np.tile(np.arange(1 + DRAFTED, dtype=np.int32), rows),
        num_tokens=np.ones(tokens, dtype=np.int32),
        sample=np.ones(tokens, dtype=np.bool_),
        table_slots=NOTHING,
        table_firsts=NOTHING,
        table_counts=NOTHING,
        table_pages=NOTHING,
    )
    run = StepRun(plan, Readback(runner.streams), known=np.zeros(tokens, dtype=np.int32))
    rows_in_order = np.arange(tokens).reshape(rows, 1 + DRAFTED).T.ravel()
    order = SampleOrder(rows_in_order, (rows,) * (1 + DRAFTED), np.zeros(rows * DRAFTED, dtype=np.int32))
    runner.passes.table.fill_(0)
    runner.forward(run)
    runner.sample(run, NO_MASKS, NO_MASKS, lambda _: order)
    runner.result(run)
    runner.passes.table.fill_(-1)


def _step(start: int, num_extend: int, params: SamplingParams) -> BatchPlan:
    """Returns the plan of a step with one token in slot 0. If the token's position is 0, the step also admits the slot.

    Args:
        start: position of the token.
        num_extend: 1 if the plan has the token's id, 0 if the step reads it from the relay.
    """
    zero, one = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int32)
    history = zero if params is EVERYTHING else NOTHING
    return BatchPlan(
        step_id=start,
        mode=ForwardMode.EXTEND if num_extend else ForwardMode.DECODE,
        num_extend=num_extend,
        slots=zero,
        starts=zero + start,
        num_tokens=one,
        input_ids=zero[:num_extend],
        sample=np.ones(1, dtype=np.bool_),
        mask_rows=NOTHING,
        prompt_logprob_rows=NOTHING,
        prompt_logprob_offsets=NOTHING,
        prompt_logprob_nexts=NOTHING,
        admitted=(SlotParams(0, 1, params, (0,), history),) if start == 0 else (),
        table_slots=zero,
        table_firsts=zero,
        table_counts=one,
        table_pages=zero,
    )
