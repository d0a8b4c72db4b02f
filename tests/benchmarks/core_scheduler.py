"""Cost of the scheduler's decisions on one core: python -m tests.benchmarks.core_scheduler [--against OTHER] [--pairs N]

Prints medians in microseconds. With --against, this checkout and OTHER (a checkout with its own .venv) are measured in
alternating order, each in its own process. The output then has the ratio of this checkout's time to OTHER's: the median over the
pairs, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.config import SchedulePolicy
from rootstock_llm.services.worker.core.contracts.messages import SessionTurn, Submit
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, SamplingParams, StepResult
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.core.kv.radix_cache import RadixCache
from rootstock_llm.services.worker.core.scheduler import Scheduler
from tests.benchmarks.intervals import interval
from tests.benchmarks.pinned_config import pinned_config
from tests.benchmarks.server_process import ROOT


class NoText:
    def decode(self, ids: object, skip_special_tokens: bool) -> str:
        return ""

    def search(self, pattern: str, text: str) -> bool:
        return False


def commit(core: Scheduler, plan: BatchPlan) -> None:
    core.commit(StepResult(plan.step_id, np.full(plan.num_rows, 5, dtype=np.int32)), 0.0)
    core.take_output()


def decode_step_us(rows: int, page_size: int, waiting: int = 0, sessions: bool = False, steps: int = 300) -> float:
    """Returns the median microseconds of plan + commit + take_output for `rows` decode rows that all stream.

    Args:
        waiting: number of queued requests that cannot be admitted. If it is not 0, priority scheduling is on.
        sessions: whether each row is a turn of its own session.
    """
    config = pinned_config(
        num_pages=rows * 1024 // page_size,
        page_size=page_size,
        context_len=4096,
        vocab_size=151936,
        max_running_requests=rows,
        enable_priority_scheduling=waiting > 0,
    )
    core = Scheduler(config, NoText())
    for handle in range(rows + waiting):
        prompt = np.full(128, handle, dtype=np.int32)
        turn = SessionTurn(f"s{handle}") if sessions else None
        if sessions:
            core.open_session(f"s{handle}", 0, 0.0, 0.0)
        params = SamplingParams(max_new_tokens=800, ignore_eos=True)
        core.submit(Submit(0, handle, f"r{handle}", prompt, params, session=turn), 0.0)
    times: list[float] = []
    while len(times) < steps:
        begun = time.perf_counter()
        plan = core.plan(0.0)
        assert plan is not None
        middle = time.perf_counter()
        result = StepResult(plan.step_id, np.full(plan.num_rows, 5, dtype=np.int32))
        resumed = time.perf_counter()
        core.commit(result, 0.0)
        core.take_output()
        if plan.num_extend == 0:
            times.append(middle - begun + time.perf_counter() - resumed)
    return statistics.median(times) * 1e6


class Queue:
    """A scheduler with the policy lpm and `waiting` queued requests. Each prompt begins with one of 16 cached prefixes."""

    def __init__(self, waiting: int, num_pages: int, one_at_a_time: bool) -> None:
        config = pinned_config(
            num_pages=num_pages,
            page_size=16,
            context_len=1 << 15,
            vocab_size=151936,
            schedule_policy=SchedulePolicy.LPM,
            prefill_max_requests=int(one_at_a_time),
            chunked_prefill_size=0,
        )
        self.core = Scheduler(config, NoText())
        self._waiting = waiting
        self._handle = 0

    def submit(self, prompt: NDArray[np.int32], max_new: int) -> None:
        self._handle += 1
        params = SamplingParams(max_new_tokens=max_new)
        self.core.submit(Submit(0, self._handle, f"r{self._handle}", prompt, params), 0.0)

    def fill(self) -> None:
        while self.core.stats().num_waiting < self._waiting:
            tail = np.random.default_rng(self._handle).integers(0, 151936, 256, dtype=np.int32)
            self.submit(np.concatenate([np.full(1024, self._handle % 16, dtype=np.int32), tail]), 1)

    def step(self) -> float:
        """Returns the seconds of a plan() and commits the plan without measuring it."""
        begun = time.perf_counter()
        plan = self.core.plan(0.0)
        taken = time.perf_counter() - begun
        assert plan is not None
        commit(self.core, plan)
        return taken


def admit_one_us(waiting: int, steps: int = 200) -> float:
    """Returns the median microseconds of a plan() that admits one of `waiting` requests."""
    queue = Queue(waiting, 1 << 14, one_at_a_time=True)
    times = []
    for step in range(steps + 20):
        queue.fill()
        taken = queue.step()
        assert queue.core.stats().num_waiting == waiting - 1
        if step >= 20:  # the first 20 steps cache all prefixes
            times.append(taken)
    return statistics.median(times) * 1e6


def admit_none_us(waiting: int, steps: int = 200) -> float:
    """Returns the median microseconds of a plan() that admits none of `waiting` requests.

    A running row has reserved all pages, so each pass checks the queue and admits no request.
    """
    queue = Queue(waiting, 300, one_at_a_time=False)
    queue.submit(np.ones(1024, dtype=np.int32), 16_000)
    first = queue.core.plan(0.0)
    assert first is not None
    commit(queue.core, first)
    queue.fill()
    times = []
    for _ in range(steps):
        SchedulerControl(queue.core).retune({"new_token_ratio": 1.0})
        queue.core.queues.batch_is_full = False
        times.append(queue.step())
        assert queue.core.stats().num_waiting == waiting
    return statistics.median(times) * 1e6


def all_wait_us(waiting: int, rounds: int = 20) -> tuple[float, float]:
    """Measures plan() when `waiting` queued requests share a prefix of 1,024 tokens that the step in flight computes.

    Returns:
        Median microseconds of the first pass over the queue, in which each request begins to wait for the prefix, and of the
        later passes.
    """
    first, later = [], []
    for _ in range(rounds):
        queue = Queue(0, 1 << 14, one_at_a_time=False)
        for handle in range(waiting + 1):
            queue.submit(np.concatenate([np.zeros(1024, dtype=np.int32), np.full(64, handle + 1, dtype=np.int32)]), 1)
        for number in range(6):
            begun = time.perf_counter()
            plan = queue.core.plan(0.0)
            (later if number else first).append(time.perf_counter() - begun)
            assert (plan is None) == (number > 0)
        assert queue.core.stats().num_waiting == waiting
    return statistics.median(first) * 1e6, statistics.median(later) * 1e6


def match_us(tokens: int, page_size: int) -> float:
    """Returns the median microseconds of matching a prompt that is completely in the radix tree, in nodes of 2,048 tokens."""
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


def measure() -> None:
    print("| what | median µs |\n| --- | --- |")
    for page_size in (1, 16):
        print(f"| plan + commit, 256 decode rows, page size {page_size} | {decode_step_us(256, page_size):.1f} |")
    print(f"| plan + commit, page size 16, each row a turn of its session | {decode_step_us(256, 16, sessions=True):.1f} |")
    print(f"| plan + commit, page size 16, priorities on, 1 waiting | {decode_step_us(256, 16, waiting=1):.1f} |")
    print(f"| plan + commit, page size 16, priorities on, 100 waiting | {decode_step_us(256, 16, waiting=100):.1f} |")
    print(f"| match a cached prompt of 32,768 tokens, page size 16 | {match_us(32768, 16):.1f} |")
    print(f"| plan, lpm with 128 waiting, admits one | {admit_one_us(128):.1f} |")
    print(f"| plan, lpm's fallback with 1,000 waiting, admits one | {admit_one_us(1000):.1f} |")
    print(f"| plan, lpm with 128 waiting, admits none | {admit_none_us(128):.1f} |")
    print(f"| plan, lpm's fallback with 1,000 waiting, admits none | {admit_none_us(1000):.1f} |")
    first, later = all_wait_us(1000)
    print(f"| plan, 1,000 waiting for the prefix that a step in flight computes: the first pass | {first:.1f} |")
    print(f"| the same, passes after it | {later:.1f} |")


def measured_by(checkout: Path) -> list[tuple[str, float]]:
    """Runs this benchmark in another checkout. Returns the name and the microseconds of each printed row."""
    command = [str(checkout / ".venv/bin/python"), "-m", "tests.benchmarks.core_scheduler"]
    printed = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines()[2:]]
    return [(what, float(us)) for what, us in rows]


def compare(other: Path, pairs: int) -> None:
    """Compares both checkouts row by row. Both must print the same rows in the same order; the names of rows may differ."""
    ratios: dict[str, list[float]] = {}
    for number in range(pairs):
        order = (other, ROOT) if number % 2 else (ROOT, other)
        measured = {checkout: measured_by(checkout) for checkout in order}
        for (what, us), (_, others) in zip(measured[ROOT], measured[other], strict=True):
            ratios.setdefault(what, []).append(us / others)
    print(f"| what | this / other, {pairs} pairs |\n| --- | --- |")
    for what, values in ratios.items():
        low, high = interval(values)
        print(f"| {what} | {statistics.median(values):.3f} [{low:.3f}, {high:.3f}] |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="OTHER")
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    if args.against is None:
        measure()
    else:
        compare(args.against.resolve(), args.pairs)


if __name__ == "__main__":
    main()
