"""Compares scheduling policies, caching and retraction by simulation at full size."""

from __future__ import annotations

import numpy as np
import pytest

from rootstock_llm.services.sim.core.report.report import Report, make_report
from rootstock_llm.services.sim.core.run.simulation import Outcome, Simulation
from rootstock_llm.services.sim.core.run.time_models import PRESETS
from rootstock_llm.services.sim.core.trace.arrivals import ClosedLoop
from rootstock_llm.services.sim.core.trace.trace import Trace
from rootstock_llm.services.sim.core.trace.workloads import shared_prefix, storm
from rootstock_llm.services.worker.core.contracts.config import SchedulePolicy, SchedulerConfig
from rootstock_llm.services.worker.exec.fake import TimeModel
from tests.all_pairs import each_value
from tests.sim.deployed_worker import on_gpu

PAGE_SIZE = 16
LPM_FALLBACK = 128  # with more waiting requests, lpm behaves like fcfs


def run(trace: Trace, config: SchedulerConfig, concurrency: int, times: TimeModel) -> Outcome:
    return Simulation(config, trace, ClosedLoop(trace, concurrency), times).run()


@pytest.fixture(scope="module")
def reports() -> dict[SchedulePolicy, Report]:
    """Reports by policy for 64 groups of 16 requests, each with 2048 shared and 128 own prompt tokens and 256 output tokens.

    The KV pool has space for a quarter of the distinct prompt tokens.
    """
    trace = shared_prefix(groups=64, per_group=16, prefix=2048, suffix=128, output=256, rate=0.0, seed=0)
    out = {}
    for policy in (SchedulePolicy.FCFS, SchedulePolicy.LPM, SchedulePolicy.DFS_WEIGHT):
        num_pages = trace.unique_block_tokens // 4 // PAGE_SIZE
        config = on_gpu(num_pages, 4096, page_size=PAGE_SIZE, schedule_policy=policy)
        out[policy] = make_report(run(trace, config, LPM_FALLBACK, PRESETS["h200-like"]), 1.0)
        assert out[policy].finished == 1024 and out[policy].max_queue <= LPM_FALLBACK
    return out


def test_lpm_hits_more_often_than_fcfs(reports: dict[SchedulePolicy, Report]) -> None:
    assert reports[SchedulePolicy.LPM].hit_rate >= 1.5 * reports[SchedulePolicy.FCFS].hit_rate > 0


def test_dfs_weight_hits_as_often_as_lpm(reports: dict[SchedulePolicy, Report]) -> None:
    """The order of evictions changes the hit rate by an amount that depends on the trace. The margin of 0.01 allows for this."""
    assert reports[SchedulePolicy.DFS_WEIGHT].hit_rate >= reports[SchedulePolicy.LPM].hit_rate - 0.01


@pytest.mark.by_day(one_in=2, seed=6)
@each_value(
    settings={
        "a large GPU's defaults": {},
        "a CPU's defaults": {"chunked_prefill_size": 2048, "max_running_requests": 64},
        "prompts first": {"max_extend_steps": 0, "adaptive_chunk_rows": 0},
    },
    policy=[SchedulePolicy.LPM, SchedulePolicy.FCFS],
)
def test_radix_cache_does_not_raise_ttft_of_adjacent_pairs(settings: dict[str, int], policy: SchedulePolicy) -> None:
    """64 pairs arrive at once. The requests of a pair share 128 tokens and have 128 further tokens each.

    The second request of a pair waits for the prefix of the first one."""
    trace = shared_prefix(groups=64, per_group=2, prefix=128, suffix=128, output=64, rate=0.0, seed=0, adjacent=True)
    p99 = {}
    for cached in (True, False):
        config = on_gpu(50_000, 4096, page_size=PAGE_SIZE, schedule_policy=policy, enable_radix_cache=cached, **settings)
        report = make_report(run(trace, config, len(trace.requests), PRESETS["h200-like"]), 1.0)
        p99[cached] = report.ttft.p99
        # If a chunk ends within a shared prefix, the rest of the prefix may be too short to wait for.
        assert report.hit_rate == pytest.approx(0.25 if cached else 0, abs=0.001)
    assert p99[True] <= p99[False]


def test_throughput_recovers_within_a_minute_of_a_retraction_storm() -> None:
    """The requests of a saturated worker use a tenth of max_new_tokens, then all of it for a while, then a tenth again."""
    slow = TimeModel(base=20e-3, per_prefill_token=100e-6, per_row=40e-6, per_context_token=100e-9)
    trace = storm(requests=2600, input_len=512, output=64, factor=10, begin=0.46, end=0.52, rate=0.0, seed=0)
    outcome = run(trace, on_gpu(2048, 2048, page_size=PAGE_SIZE, max_running_requests=64), 96, slow)
    stormy = np.array([request.output_len > 64 for request in trace.requests])
    begin, end = float(outcome.requests.sent[stormy].min()), float(outcome.requests.ended[stormy].max())
    assert outcome.requests.finished.all()
    assert begin > 60 and outcome.seconds > end + 60, "the run lasts a minute before and after the storm"
    assert outcome.stats.retractions_total > 10, "the storm causes retractions"
    before, after = outcome.steps.throughput(begin - 60, begin), outcome.steps.throughput(end, end + 60)
    assert after >= 0.8 * before
