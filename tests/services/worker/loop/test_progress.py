"""Tests of the watchdog, which reports a hung loop once, and of the time limit of a step.

The limit must be longer than every step that the settings allow, and shorter than a hung step.
"""

from __future__ import annotations

import concurrent.futures
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import Submit
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, SamplingParams
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.exec.fake import FakeExecutor, TimeModel
from rootstock_llm.services.worker.loop.first_steps import run_first_steps
from rootstock_llm.services.worker.loop.inbox import Barrier, Command, Pace, PendingCommands
from rootstock_llm.services.worker.loop.progress import FLOOR_S, Pulse, StepLimit, Watchdog
from tests.core.deployed_config import deployed_config
from tests.core.harness import LetterDecoder

CAP_S = 300.0  # seconds; limit of the watchdog
CONFIG = deployed_config(
    num_pages=600, page_size=16, context_len=8192, vocab_size=1000, chunked_prefill_size=512, max_running_requests=8
)
POSITIONS_PER_TOKEN = 2000.0  # attended positions that cost as much as one token


class TimedWorker:
    """The real core with a fake executor on a virtual clock."""

    def __init__(self, config: SchedulerConfig = CONFIG, base: float = 0.0, per_token: float = 0.0) -> None:
        self.now, self.per_token = 0.0, per_token
        self.config = config
        self.model = TimeModel(base=base)
        pages = config.max_pages_per_request
        self.executor = FakeExecutor(
            config.num_pages, config.page_size, config.max_running_requests, pages, config.vocab_size,
            time_model=self.model, clock=lambda: self.now, sleep=self._sleep,
        )  # fmt: skip
        self.limit = StepLimit(lambda: self.config, POSITIONS_PER_TOKEN, CAP_S)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def seconds(self, plan: BatchPlan) -> float:
        """Returns the modelled seconds: costs per step, per token and per attended position."""
        attended = float((plan.num_tokens * (plan.starts + plan.num_tokens / 2)).sum())
        return self.model.base + self.per_token * (float(plan.num_tokens.sum()) + attended / POSITIONS_PER_TOKEN)

    def first_steps(self) -> None:
        def record_step(plan: BatchPlan, _: float) -> None:
            self.limit.record_step(plan, self.seconds(plan))

        run_first_steps(self.executor, self.config, LetterDecoder(), True, record_step, lambda: self.now)

    def serve(self, prompt_tokens: int, max_new_tokens: int = 2) -> list[tuple[float, float]]:
        """Serves a prompt. Returns, for each step, its seconds and the step limit at its start."""
        core = Scheduler(self.config, LetterDecoder())
        ids = np.arange(prompt_tokens, dtype=np.int32) % 900
        core.submit(Submit(1, 1, "r", ids, SamplingParams(max_new_tokens, ignore_eos=True)), 0.0)
        out = []
        while (plan := core.plan(0.0)) is not None:
            run = self.executor.forward(plan)
            self.executor.sample(run, {})
            core.commit(self.executor.wait(run), 0.0)
            out.append((self.seconds(plan), self.limit.seconds))
            self.limit.record_step(plan, self.seconds(plan))
        return out


def test_step_limit_is_the_watchdog_limit_before_the_first_step() -> None:
    assert TimedWorker().limit.seconds == CAP_S


def test_step_limit_is_floor_s_when_the_model_is_fast() -> None:
    timed = TimedWorker(base=0.005, per_token=2e-5)
    timed.first_steps()
    assert timed.limit.seconds == FLOOR_S


@pytest.mark.by_day(one_in=3)
@pytest.mark.parametrize("per_token", [5e-4, 3e-3, 2e-2])
def test_slow_chunks_of_a_long_prompt_stay_within_the_step_limit(per_token: float) -> None:
    timed = TimedWorker(base=0.01, per_token=per_token)
    timed.first_steps()
    steps = timed.serve(8000)
    assert sum(took for took, _ in steps) > 9000 * per_token
    late = [(took, allowed) for took, allowed in steps if took > allowed]
    assert not late and len(steps) > 16


def test_step_limit_grows_when_settings_allow_larger_steps() -> None:
    timed = TimedWorker(per_token=2e-3)
    timed.first_steps()
    before = timed.limit.seconds
    timed.config = replace(CONFIG, chunked_prefill_size=2048)
    assert timed.limit.seconds == pytest.approx(4 * before)
    timed.config = replace(CONFIG, chunked_prefill_size=0)
    assert timed.limit.seconds == CAP_S, "without chunks, a step may have 16,384 tokens"


def test_step_limit_recovers_after_one_stall() -> None:
    timed = TimedWorker(per_token=1e-3)
    timed.serve(2048)
    usual = timed.limit.seconds
    timed.per_token = 5e-2
    timed.serve(512)
    assert timed.limit.seconds == CAP_S
    timed.per_token = 1e-3
    for _ in range(60):
        timed.serve(4096)
    assert timed.limit.seconds <= 2 * usual


def test_step_limit_stays_at_the_watchdog_limit_when_the_first_steps_fail() -> None:
    failing = TimedWorker()
    failing.executor.fail_steps |= {0, 1}
    failing.first_steps()
    assert failing.limit.seconds == CAP_S


def test_watchdog_reports_a_hang_once_and_the_recovery_once() -> None:
    now = 0.0
    reports: list[str] = []
    pulse = Pulse(lambda: now)
    watchdog = Watchdog(pulse, 10.0, lambda: reports.append("hang"), lambda: reports.append("recover"))
    now = 9.0
    watchdog.check()
    assert reports == []
    now = 11.0
    watchdog.check()
    watchdog.check()
    assert reports == ["hang"]
    pulse.beat()
    watchdog.check()
    assert reports == ["hang", "recover"]


def test_watchdog_counts_the_limit_from_the_deadline_of_a_running_command() -> None:
    now = 0.0
    reports: list[str] = []
    pulse = Pulse(lambda: now)
    watchdog = Watchdog(pulse, 10.0, lambda: reports.append("hang"), lambda: reports.append("recover"))
    pulse.begin_command(until=100.0)
    now = 109.0
    watchdog.check()
    assert reports == [] and pulse.age_s == 109.0, "load reports have the time of the operation"
    now = 111.0
    watchdog.check()
    assert reports == ["hang"]
    pulse.beat()
    pulse.begin_command(until=200.0)
    pulse.beat()
    watchdog.check()
    now = 122.0
    watchdog.check()
    assert reports == ["hang", "recover", "hang"], "the deadline of an ended operation does not count"


def test_watchdog_ignores_a_loop_that_waits_for_messages() -> None:
    now = 0.0
    reports: list[str] = []
    pulse = Pulse(lambda: now)
    watchdog = Watchdog(pulse, 10.0, lambda: reports.append("hang"), lambda: reports.append("recover"))
    pulse.rest()
    now = 100.0
    watchdog.check()
    assert reports == [] and pulse.age_s == 0


def test_begin_of_a_command_is_reported_with_its_deadline_and_the_end_with_none() -> None:
    reports: list[Any] = []

    def fails(*_: Any) -> None:
        reports.append("runs")
        raise ValueError

    commands = PendingCommands(None, None, None, Pace(), reports.append)  # type: ignore[arg-type]
    for action in (lambda *_: reports.append("runs"), fails):
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        commands.add(Command(Barrier.NONE, action, future, deadline=9.0), now=1.0)
        assert future.done()
    assert reports == [9.0, "runs", None] * 2
