"""Runs and times an executor's first steps before the worker serves requests, so that the time limit of a step is known.

The first steps run on the scheduler loop's thread. A separate scheduler plans them. It is discarded with its prefix cache, so
that no request reads the KV of these steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import Submit
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, EmbeddingParams, SamplingParams
from rootstock_llm.services.worker.core.requests.finish import TextRules
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.exec.contracts.protocol import Executor, ExecutorError

logger = logging.getLogger(__name__)

SHORT_TOKENS, LONG_TOKENS = 32, 256  # lengths of the first and the second prompt
SLOW_S = 0.5  # if the first prompt takes more seconds, the second prompt has SHORT_TOKENS, so that the worker starts sooner
MAX_NEW_TOKENS = 2  # output tokens per prompt: one from the prefill step, one from a decode step
OnStep = Callable[[BatchPlan, float], None]


def run_first_steps(
    executor: Executor,
    config: SchedulerConfig,
    rules: TextRules,
    generates: bool,
    on_step: OnStep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs two prompts, one after the other, and reports the steps of the second prompt.

    The steps of the first prompt also load and compile code, so they are not reported. A failed step is logged and ends the
    function.

    Args:
        executor: the executor to measure.
        config: configuration of the worker's scheduler.
        rules: the text functions that the scheduler needs for stop rules.
        generates: whether the model generates tokens; otherwise the prompts are embedded.
        on_step: called with each step of the second prompt and the step's duration in seconds.
        clock: time in seconds.
    """
    max_prompt = min(config.context_len - MAX_NEW_TOKENS, config.num_pages * config.page_size // 4)
    embedding = None if generates else EmbeddingParams()
    params = SamplingParams(MAX_NEW_TOKENS if generates else 1, temperature=0.0, ignore_eos=True, embedding=embedding)
    core = Scheduler(replace(config, retract_interval=0, host_pages=0, reads_peers=False), rules)

    def serve(number: int, length: int, on_step: OnStep) -> None:
        ids = ((np.arange(max(1, min(length, max_prompt))) + number) % config.vocab_size).astype(np.int32)
        core.submit(Submit(0, number, "first-steps", ids, params), 0.0)
        _run(core, executor, on_step, clock)

    try:
        began = clock()
        serve(0, SHORT_TOKENS, lambda plan, seconds: None)
        serve(1, SHORT_TOKENS if clock() - began > SLOW_S else LONG_TOKENS, on_step)
    except ExecutorError as error:
        logger.warning("the first steps failed, so the time limit of a step is not measured yet: %s", error)


def _run(core: Scheduler, executor: Executor, on_step: OnStep, clock: Callable[[], float]) -> None:
    while (plan := core.plan(0.0)) is not None:
        began = clock()
        run = executor.forward(plan)
        executor.sample(run, {})
        core.commit(executor.wait(run), 0.0)
        core.take_output()
        on_step(plan, clock() - began)
