"""Checks that every simulated request ends once with its scripted tokens, and that runs are reproducible.

Figures that follow from the trace by arithmetic are compared exactly.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.sim.core.report.report import Report, make_report
from rootstock_llm.services.sim.core.run.simulation import HostTimes, Outcome, Simulation
from rootstock_llm.services.sim.core.run.time_models import PRESETS
from rootstock_llm.services.sim.core.trace.arrivals import Arrivals, ClosedLoop, OpenLoop
from rootstock_llm.services.sim.core.trace.script import EOS_ID, VOCAB_SIZE, Script
from rootstock_llm.services.sim.core.trace.trace import Trace, TraceRequest
from rootstock_llm.services.sim.core.trace.workloads import multi_turn, random_lengths, scores, shared_prefix, storm
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason
from rootstock_llm.services.worker.exec.fake import TimeModel
from tests.all_pairs import each_value
from tests.core.deployed_config import deployed_config

TIMES = PRESETS["h200-like"]


def config_of(num_pages: int = 4096, **fields: Any) -> SchedulerConfig:
    defaults: dict[str, Any] = {"page_size": 16, "context_len": 8192, "max_running_requests": 32}
    return deployed_config(num_pages, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,), **{**defaults, **fields})


def simulate(
    trace: Trace,
    config: SchedulerConfig | None = None,
    concurrency: int = 0,
    overlap: bool = True,
    times: TimeModel = TIMES,
    host: HostTimes | None = None,
) -> Outcome:
    arrivals: Arrivals = ClosedLoop(trace, concurrency) if concurrency else OpenLoop(trace)
    return Simulation(config or config_of(), trace, arrivals, times, host, overlap).run()


def report_of(outcome: Outcome) -> Report:
    return make_report(outcome, 1.0)


def scripted(trace: Trace) -> np.ndarray:
    return np.array([min(r.output_len, r.max_new_tokens) for r in trace.requests])


def check_outputs(trace: Trace, outcome: Outcome) -> None:
    log = outcome.requests
    assert log.finished.all(), log.errors()
    assert (log.output_tokens == scripted(trace)).all()
    assert (log.streamed_tokens == log.output_tokens).all(), "the tokens in the steps' outputs add up to the number in the finish"
    assert (log.sent <= log.first_token).all() and (log.first_token <= log.ended).all()


@pytest.mark.by_day(one_in=2, seed=2)
@each_value(
    trace={
        "random": random_lengths(200, 300, 40, 0.9, 50.0, 1),
        "shared prefix": shared_prefix(8, 8, 256, 40, 30, 100.0, 2),
        "multi-turn": multi_turn(20, 4, 100, 50, 30, 0.5, 10.0, 3),
        "storm": storm(150, 64, 20, 10, 0.3, 0.6, 100.0, 4),
    },
    overlap=[True, False],
)
def test_simulation_ends_requests_with_scripted_tokens(trace: Trace, overlap: bool) -> None:
    check_outputs(trace, simulate(trace, overlap=overlap))


@pytest.mark.by_day(one_in=2, seed=1)
@pytest.mark.parametrize(
    ("num_pages", "fields", "overlap"),
    [
        pytest.param(200, {"schedule_conservativeness": 0.3}, True, id="for lack of memory"),
        pytest.param(4096, {"retract_interval": 5}, False, id="by the test hook"),
        pytest.param(300, {"schedule_conservativeness": 0.3, "enable_mixed_chunk": True}, True, id="with mixed chunks"),
        pytest.param(300, {"schedule_conservativeness": 0.3}, False, id="for lack of memory without overlap"),
    ],
)
def test_retraction_does_not_change_the_output_length_of_a_request(num_pages: int, fields: dict[str, Any], overlap: bool) -> None:
    trace = storm(120, 64, 30, 10, 0.2, 0.8, 40.0, 5)
    outcome = simulate(trace, config_of(num_pages=num_pages, **fields), overlap=overlap)
    assert outcome.stats.retractions_total > 5, "the run has retractions"
    check_outputs(trace, outcome)


def test_request_ends_by_eos_or_by_length() -> None:
    by_eos = TraceRequest(0.0, (), 20, output_len=7, max_new_tokens=50)
    by_length = replace(by_eos, output_len=50, max_new_tokens=9)
    outcome = simulate(Trace(64, (by_eos, by_length)))
    assert outcome.requests.reason.tolist() == [FinishReason.MATCHED_TOKEN, FinishReason.LENGTH]
    assert outcome.requests.output_tokens.tolist() == [7, 9]


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("concurrency", [0, 12])
def test_simulation_is_reproducible(concurrency: int) -> None:
    def once() -> dict[str, Any]:
        trace = storm(100, 100, 25, 10, 0.3, 0.7, 40.0, 6)
        return asdict(report_of(simulate(trace, config_of(num_pages=200), concurrency)))

    assert once() == once()


def test_overlap_changes_times_and_keeps_tokens() -> None:
    trace = random_lengths(100, 200, 30, 0.5, 30.0, 7)
    host = HostTimes(plan_s=1e-3, commit_s=1e-3)
    with_overlap, without = (simulate(trace, overlap=overlap, host=host) for overlap in (True, False))
    assert (with_overlap.requests.output_tokens == without.requests.output_tokens).all()
    assert with_overlap.seconds < without.seconds, "the host works while the device runs"


def test_virtual_time_is_the_sum_of_the_time_model() -> None:
    """A single request runs one step for the prompt and one per further token. Host work precedes and follows each step."""
    times = TimeModel(base=0.01, per_prefill_token=0.001, per_row=0.002, per_context_token=0.0001)
    host = HostTimes(plan_s=0.003, commit_s=0.004)
    outcome = simulate(Trace(64, (TraceRequest(2.0, (), 100, 3, 3),)), times=times, host=host, overlap=False)
    prefill = 0.01 + 100 * 0.001 + 0.002 + 100 * 0.0001 + 0.007
    decodes = sum(0.01 + 0.002 + length * 0.0001 + 0.007 for length in (101, 102))
    log = outcome.requests
    assert log.sent[0] == 2.0
    assert log.first_token[0] == pytest.approx(2.0 + prefill)
    assert log.ended[0] == pytest.approx(2.0 + prefill + decodes)


def test_overlap_hides_host_work_when_steps_are_longer() -> None:
    trace = Trace(64, (TraceRequest(0.0, (), 64, 101, 101),))
    times = TimeModel(base=0.01)
    busy = simulate(trace, times=times, host=HostTimes(plan_s=0.002, commit_s=0.002))
    assert busy.seconds == pytest.approx(101 * 0.01, rel=0.01)


def test_equal_prompts_in_sequence_hit_all_pages_except_the_last() -> None:
    trace = Trace(64, tuple(TraceRequest(0.0, (1, 2, 3, 4), 256, 5, 5) for _ in range(10)))
    outcome = simulate(trace, concurrency=1)
    assert outcome.requests.cached_tokens.tolist() == [0] + [240] * 9
    assert report_of(outcome).hit_rate == pytest.approx(9 * 240 / 2560)


def test_salts_separate_equal_prompts() -> None:
    request = TraceRequest(0.0, (1, 2, 3, 4), 256, 5, 5)
    trace = Trace(64, tuple(replace(request, salt=salt) for salt in ("a", "b", "a", "b")))
    assert simulate(trace, concurrency=1).requests.cached_tokens.tolist() == [0, 0, 240, 240]


def test_scheduler_queue_is_ordered_by_the_priorities_of_the_trace() -> None:
    plain = random_lengths(80, 64, 20, 0.0, 0.0, 12)
    trace = Trace(64, tuple(replace(request, priority=index % 2) for index, request in enumerate(plain.requests)))
    outcome = simulate(trace, config_of(max_running_requests=4, enable_priority_scheduling=True))
    queue = outcome.requests.queue
    assert queue[1::2].max() <= queue[0::2].min(), "requests with a higher priority value run first"
    assert queue[0::2].min() > 0


def test_later_turn_hits_the_pages_of_the_earlier_prompt_and_completion() -> None:
    trace = multi_turn(1, 3, system=64, user=32, output=64, think_s=1.0, rate=0.0, seed=0)
    outcome = simulate(trace)
    assert [r.input_len for r in trace.requests] == [96, 192, 288]
    # The last token of each completion is never computed, so its page is not cached.
    assert outcome.requests.cached_tokens.tolist() == [0, 144, 240]


def test_turn_waits_for_the_previous_turn_and_the_think_time() -> None:
    trace = multi_turn(3, 4, system=64, user=32, output=16, think_s=2.0, rate=1.0, seed=1)
    log = simulate(trace).requests
    for session in ("s0", "s1", "s2"):
        turns = [i for i, r in enumerate(trace.requests) if r.session == session]
        for before, after in itertools.pairwise(turns):
            assert log.sent[after] == pytest.approx(log.ended[before] + 2.0, abs=0.05)


def test_closed_loop_limits_open_requests() -> None:
    trace = random_lengths(60, 64, 20, 0.5, 0.0, 8)
    log = simulate(trace, concurrency=7).requests
    for at in log.sent:
        assert ((log.sent <= at) & (log.ended > at)).sum() <= 7
    assert ((log.sent <= log.ended[0]) & (log.ended >= log.ended[0])).sum() >= 7


def test_report_counts_refused_requests_by_error() -> None:
    trace = random_lengths(20, 64, 50, 0.0, 0.0, 9)
    outcome = simulate(trace, config_of(max_queued_requests=5))
    assert outcome.requests.errors() == {ErrorCode.QUEUE_FULL.name.lower(): 15}
    report = report_of(outcome)
    assert report.finished == 5 and report.requests == 20 and report.output_tokens == 250


def test_request_times_out_by_virtual_time() -> None:
    trace = random_lengths(2, 64, 1000, 0.0, 0.0, 10)
    outcome = simulate(trace, config_of(max_running_requests=1, waiting_timeout_s=0.5))
    assert outcome.requests.errors() == {"timeout": 1}
    assert outcome.requests.ended[1] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("overlap", [True, False])
def test_means_over_time_count_idle_time_as_zero(overlap: bool) -> None:
    trace = Trace(64, tuple(TraceRequest(at, (), 100, 10, 10) for at in (0.0, 100.0)))
    outcome = simulate(trace, overlap=overlap)
    report, busy = report_of(outcome), float((outcome.requests.ended - outcome.requests.sent).sum())
    assert report.mean_running == pytest.approx(busy / report.seconds)
    assert 0 < report.mean_kv < report.max_kv * 2 * busy / report.seconds
    assert report.mean_queue == 0


def test_throughput_is_computed_for_the_given_interval() -> None:
    outcome = simulate(random_lengths(200, 64, 50, 0.0, 20.0, 11))
    steps = outcome.steps
    begin, end = float(steps.gauge("at")[0]), float(steps.gauge("at")[-1])
    said = steps.gauge("generated")[-1]
    assert steps.throughput(begin, end) * (end - begin) == pytest.approx(said)
    middle = (begin + end) / 2
    halves = [steps.throughput(begin, middle), steps.throughput(middle, end)]
    assert sum(halves) / 2 == pytest.approx(steps.throughput(begin, end))


def test_script_gives_equal_tokens_only_for_equal_blocks() -> None:
    request = TraceRequest(0.0, (5, 6), 100, 60, 60)
    script = Script(Trace(64, (request, request, replace(request, blocks=(5, 7)), replace(request, blocks=()))))
    one, same, other, loose = (script.prompt(i) for i in range(4))
    assert (one == same).all()
    assert (one[:64] == other[:64]).all() and not (one[64:] == other[64:]).any()
    assert not (one == loose).any()
    assert (script.output(0)[:28] == script.output(1)[:28]).all(), "the second block covers a part of the output"
    assert not (script.output(0)[28:-1] == script.output(1)[28:-1]).any()
    assert script.output(0)[-1] == EOS_ID and len(script.output(0)) == 60
    assert min(one.min(), loose.min()) > EOS_ID and max(one.max(), loose.max()) < VOCAB_SIZE


@pytest.mark.parametrize("overlap", [True, False])
def test_score_requests_share_the_query_and_have_no_output(overlap: bool) -> None:
    """The first item of each query computes the query; the others find all of its pages."""
    outcome = simulate(scores(queries=3, items=20, query=512, item=40, rate=0.0, seed=1), overlap=overlap)
    report = report_of(outcome)
    assert (report.finished, report.output_tokens) == (60, 0)
    assert (outcome.requests.reason == FinishReason.LENGTH).all()
    assert report.cached_tokens == 3 * 19 * 512
    assert report.ttft.p99 == 0 < report.e2e.p50, "there is no first token"
