"""python -m tests.benchmarks.step_cost [--rows 1 64 256]: CPU time of decode steps on host streams, summed over all threads.

The model is random and tiny, so that most of the time is the executor's work around the kernels. For each number of rows, prints
the user plus system time per step in microseconds: the minimum and the median of several runs. Other work on the machine disturbs
CPU time less than wall time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.contracts.protocol import Executor
from tests.exec.driver import Driver, Sequence
from tests.exec.tiny_models import MODELS

PAGE_SIZE, CONTEXT = 16, 480
STEPS = 50  # steps of a run
PROMPT = list(range(20, 40))
KINDS = {
    "greedy": SamplingParams(CONTEXT, temperature=0.0),
    "drawn": SamplingParams(CONTEXT, temperature=0.8, top_p=0.9, seed=1),
    "penalties": SamplingParams(CONTEXT, temperature=0.8, seed=1, frequency_penalty=0.3),
    "logprobs": SamplingParams(CONTEXT, temperature=0.0, top_logprobs=5),
}


def microseconds(executor: Executor, rows: int, runs: int, params: SamplingParams) -> list[float]:
    """Returns the microseconds per step of each run."""
    driver, nothing = Driver(executor, PAGE_SIZE), np.empty(0, dtype=np.int32)
    sequences = [Sequence(PROMPT, slot, params) for slot in range(rows)]
    driver.prefill(sequences)
    found = []
    for _ in range(runs):
        plans = [replace(driver.plan([(each, 1) for each in sequences]), num_extend=0, input_ids=nothing) for _ in range(STEPS)]
        began = time.process_time()
        for plan in plans:
            run = executor.forward(plan)
            executor.sample(run, {})
            executor.wait(run)
        found.append((time.process_time() - began) / STEPS * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--runs", type=int, default=8, help="runs of 50 steps each, per number of rows")
    parser.add_argument("--kind", choices=list(KINDS), default="greedy")
    options = parser.parse_args()
    slots = max(options.rows)
    with tempfile.TemporaryDirectory() as folder:
        MODELS["qwen3"].build(Path(folder))
        made = DeviceOptions(device="cpu", max_tokens=slots * len(PROMPT))
        pages = slots * (CONTEXT // PAGE_SIZE + 1)
        executor, _ = build_device_executor(folder, "float32", PAGE_SIZE, slots, pages, 0.5, CONTEXT, made, lambda _: None)
    for rows in options.rows:
        found = microseconds(executor, rows, min(options.runs, (CONTEXT - len(PROMPT)) // STEPS), KINDS[options.kind])
        print(f"{rows:5} rows: least {min(found):8.0f} us, median {statistics.median(found):8.0f} us", flush=True)
    executor.close()


if __name__ == "__main__":
    main()
