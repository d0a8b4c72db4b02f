"""Checks that every request of a fleet ends once with its tokens, that runs are reproducible, and that messages are delayed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.gateway.routing.config import RoutingConfig, RoutingPolicy
from rootstock_llm.services.gateway.routing.policies import SharingMeter, WorkerColumns
from rootstock_llm.services.sim.core.run.simulation import Simulation, SimulationError
from rootstock_llm.services.sim.core.run.time_models import PRESETS
from rootstock_llm.services.sim.core.run.worker import HostTimes
from rootstock_llm.services.sim.core.trace.arrivals import ClosedLoop, OpenLoop
from rootstock_llm.services.sim.core.trace.script import EOS_ID, VOCAB_SIZE
from rootstock_llm.services.sim.core.trace.trace import Trace, TraceRequest
from rootstock_llm.services.sim.core.trace.workloads import hot_prefix, multi_turn, random_lengths, shared_prefix, two_lengths
from rootstock_llm.services.sim.fleet.config import FleetConfig, Kill
from rootstock_llm.services.sim.fleet.event_queue import EventQueue
from rootstock_llm.services.sim.fleet.gateway import LoadView
from rootstock_llm.services.sim.fleet.report import FleetReport, make_report, worst_window
from rootstock_llm.services.sim.fleet.simulation import FleetOutcome, FleetSimulation
from rootstock_llm.services.sim.fleet.worker import WorkerLoad
from rootstock_llm.services.worker.core.contracts.messages import FinishReason
from rootstock_llm.services.worker.exec.fake import TimeModel
from tests.core.deployed_config import deployed_config

PREFIX_AWARE = str(RoutingPolicy.PREFIX_AWARE)
SCHEDULER = deployed_config(1024, 16, 4096, VOCAB_SIZE, eos_token_ids=(EOS_ID,), max_running_requests=16)
FLEET = FleetConfig(SCHEDULER, PRESETS["h200-like"], RoutingConfig(), workers=4)


def simulation(trace: Trace, policy: str = PREFIX_AWARE, concurrency: int = 0, **changes: Any) -> FleetSimulation:
    arrivals = ClosedLoop(trace, concurrency) if concurrency else OpenLoop(trace)
    return FleetSimulation(replace(FLEET, **changes), policy, trace, arrivals)


def run(trace: Trace, policy: str = PREFIX_AWARE, concurrency: int = 0, **changes: Any) -> FleetOutcome:
    return simulation(trace, policy, concurrency, **changes).run()


def report_of(outcome: FleetOutcome) -> FleetReport:
    return make_report("any", outcome, 10, 1.0)


def check_outputs(trace: Trace, outcome: FleetOutcome) -> None:
    log = outcome.log.requests
    assert log.finished.all(), log.errors()
    assert log.output_tokens.tolist() == [min(r.output_len, r.max_new_tokens) for r in trace.requests]
    assert (log.streamed_tokens == log.output_tokens).all(), "the tokens in the steps' outputs add up to the number in the finish"
    assert (log.sent <= log.first_token).all() and (log.first_token <= log.ended).all()


@pytest.mark.by_day(one_in=2, seed=24)
@pytest.mark.parametrize("policy", [str(policy) for policy in RoutingPolicy])
def test_fleet_ends_requests_with_scripted_tokens_under_every_policy(policy: str) -> None:
    trace = shared_prefix(8, 8, 256, 40, 20, 200.0, 1)
    outcome = run(trace, policy)
    check_outputs(trace, outcome)
    assert outcome.log.placements.reasons.total() == 64 and (outcome.log.placements.sends == 1).all()
    assert set(outcome.log.placements.worker.tolist()) == {0, 1, 2, 3}, "every worker gets requests"


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("overlap", [True, False])
def test_fleet_of_one_worker_gives_the_same_results_as_a_plain_simulation(overlap: bool) -> None:
    trace = shared_prefix(6, 6, 256, 40, 25, 100.0, 2)
    host = HostTimes(plan_s=1e-4, commit_s=1e-4)
    fleet = run(trace, workers=1, gateways=1, hop_s=0.0, overlap=overlap, host=host, slack=100.0).log.requests
    alone = Simulation(SCHEDULER, trace, OpenLoop(trace), FLEET.time_model, host, overlap).run().requests
    assert fleet.cached_tokens.tolist() == alone.cached_tokens.tolist() and alone.cached_tokens.any()
    assert fleet.first_token == pytest.approx(alone.first_token, abs=1e-9)
    assert fleet.ended == pytest.approx(alone.ended, abs=1e-9)


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("concurrency", [0, 20])
def test_fleet_is_reproducible_by_seed(concurrency: int) -> None:
    trace = multi_turn(16, 3, 128, 64, 20, 0.2, 40.0, 3)

    def once(seed: int) -> dict[str, Any]:
        return asdict(report_of(run(trace, str(RoutingPolicy.POWER_OF_TWO), concurrency, seed=seed)))

    assert once(0) == once(0)
    assert once(0) != once(1)


def test_fleet_sends_turns_of_a_session_in_sequence() -> None:
    trace = multi_turn(6, 3, 64, 64, 16, 1.0, 5.0, 4)
    log = run(trace).log.requests
    for session in {request.session for request in trace.requests}:
        first, second, third = (i for i, r in enumerate(trace.requests) if r.session == session)
        assert log.ended[first] + 1.0 <= log.sent[second] + 1e-9 and log.ended[second] + 1.0 <= log.sent[third] + 1e-9


def test_gateway_indexes_match_the_cached_blocks_when_all_messages_have_arrived() -> None:
    trace = shared_prefix(12, 6, 512, 60, 20, 200.0, 5)
    fleet = simulation(trace, scheduler=replace(SCHEDULER, num_pages=160), speculative_s=1.0)  # a small pool: many evictions
    fleet.run()
    settle(fleet)
    assert sum(len(held_by(worker)) for worker in fleet.workers) > 0
    for gateway in fleet.gateways:
        for worker in fleet.workers:
            owner = gateway.index.find(worker.name, worker.generation)
            assert gateway.index.blocks(owner) == held_by(worker)
        assert gateway.index.num_speculative == 0


def settle(fleet: FleetSimulation) -> None:
    """Runs the clock until all messages have arrived and all speculative blocks have expired."""
    until = fleet._clock.now + 2.0
    while fleet._clock.now < until:
        fleet._clock.step()


def held_by(worker: Any) -> set[bytes]:
    return {name for node in worker._sim.core.memory.tree.nodes() for name in node.blocks}


def test_load_columns_are_zero_when_all_requests_have_ended() -> None:
    fleet = simulation(shared_prefix(8, 8, 256, 40, 20, 200.0, 6), gateways=3)
    fleet.run()
    settle(fleet)
    for gateway in fleet.gateways:
        assert not gateway.columns.requests.any() and not gateway.columns.tokens.any()


def test_load_view_counts_own_requests_immediately_and_other_requests_after_a_report() -> None:
    columns = WorkerColumns()
    rows = [columns.add(name, number) for number, name in enumerate(("a", "b"))]
    view = LoadView(columns, peer=1)
    view.opened(rows[0], 100)
    view.grew(rows[0], 5)
    assert columns.requests[:2].tolist() == [1, 0] and columns.tokens[:2].tolist() == [105, 0]
    idle = WorkerLoad(Counter(), 0)
    view.reported([WorkerLoad(Counter({0: 3, 1: 1}), 1000), idle])
    assert columns.requests[:2].tolist() == [4, 0], "one own request and three of the other gateway"
    assert columns.tokens[:2].tolist() == [105 + 750, 0]
    view.ended(rows[0], 105)
    assert columns.requests[:2].tolist() == [3, 0] and columns.tokens[:2].tolist() == [750, 0]


def test_gateway_queues_requests_beyond_the_workers_limits() -> None:
    trace = random_lengths(120, 100, 20, 0.0, 0.0, 7)
    scheduler = replace(SCHEDULER, max_running_requests=8)
    outcome = run(trace, scheduler=scheduler, gateways=1, slack=0.25)
    check_outputs(trace, outcome)
    opened = outcome.log.loads.open_between(-1.0, np.inf)
    assert opened.max() == 10, "a worker accepts a quarter more than it runs"
    assert outcome.max_queue == 120 - 4 * 10


def test_gateway_counts_one_routing_decision_per_request_while_workers_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    matches: list[bool] = []
    monkeypatch.setattr(SharingMeter, "decided", lambda _, matched: matches.append(matched))
    run(random_lengths(60, 100, 20, 0.0, 0.0, 7), scheduler=replace(SCHEDULER, max_running_requests=4))
    assert len(matches) == 60


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        pytest.param({}, [], id="priorities off"),
        pytest.param({"enable_priority_scheduling": True}, [2, 1, 0], id="high first"),
        pytest.param({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, [0, 1, 2], id="low first"),
    ],
)
def test_gateway_queue_orders_requests_by_the_settings_of_priorities(settings: dict[str, Any], order: list[int]) -> None:
    plain = TraceRequest(0.0, (), 64, 20, 20)
    trace = Trace(64, tuple(replace(plain, priority=index % 3) for index in range(90)))
    outcome = run(trace, gateways=1, workers=1, scheduler=replace(SCHEDULER, max_running_requests=1, **settings))
    queued = np.argsort(outcome.log.requests.first_token, kind="stable")[3:]  # the first three never queue
    priorities = [trace.requests[index].priority for index in queued.tolist()]
    assert priorities == (sorted(priorities, key=order.index) if order else [index % 3 for index in range(3, 90)])


def test_gateway_queue_is_fair_by_prompt_and_output_tokens_of_routing_keys() -> None:
    """A request of key `long` counts as 64 + 2 x 200 tokens, and a request of `short` as 64 + 2 x 10."""
    lengths = {"long": 200, "short": 10}
    pairs = [TraceRequest(0.0, (), 64, lengths[key], lengths[key], routing_key=key) for _ in range(30) for key in lengths]
    outcome = run(Trace(64, tuple(pairs)), gateways=1, workers=1, scheduler=replace(SCHEDULER, max_running_requests=1))
    first = outcome.log.requests.first_token
    assert np.sort(first[1::2])[-1] < np.sort(first[0::2])[10], "30 short requests are served before 10 long ones"


@pytest.mark.parametrize(
    ("speculative_s", "index_delay_s", "predicts"),
    [
        pytest.param(0.0, 1000.0, False, id="no information"),
        pytest.param(1000.0, 1000.0, True, id="own requests"),
        pytest.param(0.0, 0.0, True, id="reports of workers"),
    ],
)
def test_gateway_predicts_cached_tokens_from_the_index_and_from_own_requests(
    speculative_s: float, index_delay_s: float, predicts: bool
) -> None:
    by_group = [TraceRequest(0.0, (group, group + 2, group + 4, group + 6), 288, 4, 4) for group in (0, 1)]
    trace = Trace(64, tuple(replace(by_group[at % 2], arrival=0.5 * at) for at in range(20)))  # requests do not overlap
    outcome = run(trace, gateways=1, speculative_s=speculative_s, index_delay_s=index_delay_s)
    prediction = report_of(outcome).prediction
    assert prediction.predicted_tokens == (18 * 256 if predicts else 0)
    if predicts:
        assert prediction.cached_tokens == 18 * 256 and prediction.mean_error == 0.0


def test_gateway_predicts_hits_on_prompts_of_other_gateways_only_from_events() -> None:
    same = TraceRequest(0.0, (1, 2, 3, 4), 300, 4, 4)
    trace = Trace(64, tuple(replace(same, arrival=0.5 * at) for at in range(12)))
    by_delay = [run(trace, index_delay_s=delay).log.placements.predicted for delay in (0.1, 1000.0)]
    assert (by_delay[0] > 0).sum() == 11
    assert (by_delay[1] > 0).sum() == 10, "each of the two gateways predicts its own prompts only"


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("back_after_s", [0.0, 0.3])
def test_fleet_resumes_requests_of_killed_workers(back_after_s: float) -> None:
    trace = shared_prefix(8, 8, 256, 40, 60, 60.0, 9)
    kills = (Kill(1, 0.4, back_after_s), Kill(2, 0.5, back_after_s))
    fleet = simulation(trace, kills=kills)
    outcome = fleet.run()
    check_outputs(trace, outcome)
    placements = outcome.log.placements
    assert (placements.sends > 1).sum() > 3, "the killed workers had requests"
    last = placements.worker[outcome.log.requests.sent > 0.85]
    assert np.isin(last, [1, 2]).any() == bool(back_after_s)
    for gateway in fleet.gateways:
        assert gateway.index.find("worker-1", 1) == -1, "the index has no blocks of a dead worker"


def test_fleet_resumes_a_request_before_the_last_token() -> None:
    """Steps take a second, so the worker dies between the ninth token and the tenth."""
    trace = Trace(64, (TraceRequest(0.0, (), 64, 10, 20),))
    times = TimeModel(base=1.0)
    undisturbed = run(trace, workers=2, gateways=1, time_model=times).log
    victim = int(undisturbed.placements.worker[0])
    log = run(trace, workers=2, gateways=1, time_model=times, kills=(Kill(victim, 9.5),)).log
    assert log.placements.worker[0] == 1 - victim and log.requests.output_tokens[0] == log.requests.streamed_tokens[0] == 10
    assert log.requests.reason[0] == undisturbed.requests.reason[0] == FinishReason.MATCHED_TOKEN


def test_fleet_raises_when_no_worker_is_alive() -> None:
    with pytest.raises(SimulationError, match="no output"):
        run(random_lengths(3, 64, 50, 0.0, 0.0, 10), workers=1, report_s=10.0, kills=(Kill(0, 0.01),))


@pytest.mark.by_day(one_in=2, seed=5)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"workers": 0}, id="no worker"),
        pytest.param({"gateways": 0}, id="no gateway"),
        pytest.param({"kills": (Kill(4, 1.0),)}, id="no such worker"),
        pytest.param({"kills": (Kill(0, 1.0, 0.01),)}, id="restart before detection"),
        pytest.param({"detect_s": 0.0}, id="death noticed before the last output"),
        pytest.param({"report_s": 0.0}, id="no time between reports"),
        pytest.param({"hop_s": float("nan")}, id="a time that is not a number"),
    ],
)
def test_fleet_config_rejects_impossible_values(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        replace(FLEET, **changes)


def test_event_queue_runs_actions_in_order_of_time_and_then_of_insertion() -> None:
    queue, seen = EventQueue(), []
    queue.at(2.0, seen.append, "late")
    queue.at(1.0, seen.append, "first")
    queue.at(1.0, seen.append, "second")
    queue.at(1.0, lambda: queue.at(0.5, seen.append, "no earlier than now"))
    for _ in range(5):
        queue.step()
    assert seen == ["first", "second", "no earlier than now", "late"] and queue.now == 2.0


def test_load_imbalance_of_the_worst_window_ignores_idle_windows() -> None:
    even, skewed, idle = [[10, 10]] * 4, [[15, 5]] * 4, [[1, 0]] * 4
    assert worst_window(np.array(even + skewed + idle, float), 4) == pytest.approx(1.5)
    assert worst_window(np.array(even + skewed, float), 8) == pytest.approx(1.25)
    assert worst_window(np.array(idle, float), 4) == 0.0


def test_given_share_of_prompts_begins_with_the_hot_prefix() -> None:
    trace = hot_prefix(requests=200, share=0.6, prefix=256, suffix=40, output=20, rate=10.0, seed=1)
    blocks = Counter(request.blocks for request in trace.requests)
    assert blocks == {(0, 1, 2, 3): 120, (): 80}
    assert {request.input_len for request in trace.requests} == {296}
    assert trace.unique_block_tokens == 256 + 120 * 40 + 80 * 296


def test_trace_of_two_lengths_mixes_long_and_short_requests() -> None:
    trace = two_lengths(requests=200, share=0.25, long=(4096, 64), short=(256, 128), spread=0.25, rate=10.0, seed=1)
    long = [request.input_len > 3000 for request in trace.requests]
    assert sum(long) == 50 and 0 < sum(long[:100]) < 50
    for is_long, request in zip(long, trace.requests, strict=True):
        prompt, said = (4096, 64) if is_long else (256, 128)
        assert abs(request.input_len - prompt) <= prompt / 4 and abs(request.output_len - said) <= said / 4
        assert not request.blocks
    with pytest.raises(ValueError, match="share"):
        two_lengths(10, 1.5, (8, 8), (4, 4), 0.0, 0.0, 0)
