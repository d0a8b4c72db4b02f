"""Cost of the scheduler's decisions on one core: python -m tests.benchmarks.core_scheduler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from services.worker.core.config import SchedulerConfig
from services.worker.core.messages import Submit
from services.worker.core.plan import StepResult
from services.worker.core.radix_cache import RadixCache
from services.worker.core.sampling import SamplingParams
from services.worker.core.scheduler import Scheduler


class NoText:
    def decode(self, ids: object, skip_special_tokens: bool) -> str:
        return ""


def decode_step_us(rows: int, page_size: int, steps: int = 300) -> float:
    """Median microseconds of plan + commit + take_output for `rows` decode rows that all stream."""
    config = SchedulerConfig(
        num_pages=rows * 1024 // page_size, page_size=page_size, context_len=4096, vocab_size=151936, max_running_requests=rows
    )
    core = Scheduler(config, NoText())
    for handle in range(rows):
        prompt = np.full(128, handle, dtype=np.int32)
        core.submit(Submit(0, handle, "", prompt, SamplingParams(max_new_tokens=800, ignore_eos=True)), 0.0)
    times = []
    while len(times) < steps:
        begun = time.perf_counter()
        plan = core.plan(0.0)
        assert plan is not None
        middle = time.perf_counter()
        result = StepResult(plan.step_id, np.full(plan.num_rows, 5, dtype=np.int32), {}, {})
        resumed = time.perf_counter()
        core.commit(result, 0.0)
        core.take_output()
        if plan.num_extend == 0:
            times.append(middle - begun + time.perf_counter() - resumed)
    return statistics.median(times) * 1e6


def match_us(tokens: int, page_size: int) -> float:
    """Median microseconds of matching a prompt that is wholly in the tree, in nodes of 2048 tokens."""
    tree = RadixCache(page_size)
    key = np.arange(tokens, dtype=np.int32).tobytes()
    pages = np.arange(tokens // page_size, dtype=np.int32)
    for end in range(2048, tokens + 1, 2048):
        tree.insert(tree.root(""), key[: end * 4], pages[: end // page_size])
    return median_us(lambda: tree.match("", key))


def median_us(call: Callable[[], object], repeat: int = 500) -> float:
    times = []
    for _ in range(repeat):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def main() -> None:
    print("| what | median µs |\n| --- | --- |")
    for page_size in (1, 16):
        print(f"| plan + commit, 256 decode rows, page size {page_size} | {decode_step_us(256, page_size):.0f} |")
    print(f"| match a cached prompt of 32,768 tokens, page size 16 | {match_us(32768, 16):.0f} |")


if __name__ == "__main__":
    main()
