"""Tests the HPA model with documented cases, and over a day of load with a cold start of 180 s."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.chart import adapter
from tests.chart.autoscaling_day import DAY, MOST, PICTURE, hpa_spec, play, targets
from tests.chart.hpa import Autoscaler, External, Pods, Reading, wanted
from tests.chart.recorded import SCRAPE_S, Recorded
from tests.chart.release import BACKLOG, NAMESPACE, render
from tests.chart.test_monitoring_queries import adapter_rules
from tests.chart.test_monitoring_rules import run_tests
from tests.chart.worker_fleet import COLD_START_S, SERVICE_S, SLOTS, WorkerFleet

FOLLOWS_S = 600  # seconds for which a recommendation delays a scale-down
STEP_DOWN_S = 300  # seconds between two scale-downs


@pytest.mark.by_day(one_in=2, seed=6)
@pytest.mark.parametrize(
    ("reading", "replicas", "expected"),
    [
        pytest.param(External(10.9, 2), 5, 5, id="within the tolerance"),
        pytest.param(External(11.1, 2), 5, 6, id="above it"),
        pytest.param(External(0, 2), 5, 0, id="nothing"),
        pytest.param(Pods([60, 60], 0, 40), 2, 3, id="pods above the target"),
        pytest.param(Pods([43, 43], 0, 40), 2, 2, id="pods within the tolerance"),
        pytest.param(Pods([60, 60], 1, 40), 3, 3, id="starting pod cancels a scale-up"),
        pytest.param(Pods([60, 60], 2, 40), 4, 4, id="starting pods do not turn a scale-up into a scale-down"),
        pytest.param(Pods([90, 90], 1, 40), 3, 5, id="scale-up despite a starting pod"),
        pytest.param(Pods([10, 10], 2, 40), 4, 3, id="starting pods count as busy in a scale-down"),
        pytest.param(Pods([], 1, 40), 1, 1, id="no pod reports a value"),
    ],
)
def test_wanted_number_of_replicas_follows_from_one_metric(reading: Reading, replicas: int, expected: int) -> None:
    assert wanted(reading, replicas) == expected


def test_simulated_autoscaler_follows_the_scaling_behavior_of_the_chart() -> None:
    spec = hpa_spec()
    assert targets(spec) == {BACKLOG: 2, "rootstock_running_share": 0.7, "sglang_token_usage": 0.8}
    hpa = Autoscaler(spec)
    much, little = [External(1000, 2)], [External(0, 2)]
    assert hpa.replicas(0, 2, much) == 4  # doubles immediately
    assert hpa.replicas(165, 4, much) == 4  # no second scale-up during a cold start
    assert hpa.replicas(180, 4, much) == 8
    assert hpa.replicas(360, 8, much) == MOST
    assert hpa.replicas(945, MOST, little) == MOST  # recommendations count for ten minutes
    assert hpa.replicas(961, MOST, little) == MOST - 1
    assert hpa.replicas(1246, MOST - 1, little) == MOST - 1
    assert hpa.replicas(1261, MOST - 1, little) == MOST - 2


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("seed", [1, 3])
def test_autoscaling_over_a_day_has_no_overshoot_and_no_flapping(seed: int) -> None:
    moments = play(seed=seed)
    ups = [(before, after) for before, after in itertools.pairwise(moments) if after.replicas > before.replicas]
    downs = [(before, after) for before, after in itertools.pairwise(moments) if after.replicas < before.replicas]
    for _, after in ups:
        needed = max(moment.need for moment in moments if after.at - COLD_START_S <= moment.at <= after.at)
        assert after.replicas <= needed + 1, after
    for _, after in downs:
        assert after.replicas >= after.need, after
        assert not any(after.at < other.at <= after.at + FOLLOWS_S and other.need <= after.need for _, other in ups), after
    turns = sum(1 for first, second in itertools.pairwise(sorted([*ups, *downs], key=lambda each: each[1].at))
                if (first[1].replicas > first[0].replicas) != (second[1].replicas > second[0].replicas))  # fmt: skip
    assert turns == 3  # up with the ramp, down, up with the spike, down


def test_autoscaling_over_a_day_serves_every_level_of_load() -> None:
    moments = play()
    for (begin, low), (end, high) in itertools.pairwise(DAY):
        if low == high and end - begin >= 20:  # a constant load
            last = [moment for moment in moments if moment.at <= end * 60][-1]
            assert last.serving >= last.need, last
            assert last.waiting <= 2, last
    assert max(moment.replicas for moment in moments) <= max(moment.need for moment in moments) + 1
    assert moments[-1].replicas == 1


def test_autoscaling_overshoots_without_the_bounds_of_the_recording_rules() -> None:
    """The day must overshoot without the recording rules' bounds. Otherwise the other tests would not test the bounds."""
    assert max(moment.replicas for moment in play(plain=True)) >= max(moment.need for moment in play(plain=True)) + 4


@pytest.mark.needs("promtool")
def test_recording_rules_equal_the_simulation(tmp_path: Path) -> None:
    """Simulates half an hour with a spike of load, during which a second worker starts."""
    fleet, recorded = WorkerFleet(1), Recorded()
    series: dict[str, list[str]] = {}
    expected = []
    for second in range(1, 30 * 60 + 1):
        fleet.second((0.7 if second < 600 or second > 1300 else 1.6) * SLOTS / SERVICE_S)
        if second == 700:
            fleet.scale(2)
        if second % SCRAPE_S:
            continue
        scrape, index = recorded.add(fleet), second // SCRAPE_S - 1
        values = {'rootstock_gateway_queue_length{namespace="n",pod="g",model="m"}': str(fleet.queue)}
        for worker in fleet.workers:
            labels = f'namespace="n",pod="w{worker.number}",model_name="m"'
            values[f'rootstock_worker_phase{{{labels},phase="loading"}}'] = str(int(not worker.serves(fleet.now)))
            if worker.serves(fleet.now):
                values[f"sglang:num_queue_reqs{{{labels}}}"] = str(worker.waiting)
                values[f"sglang:num_running_reqs{{{labels}}}"] = str(worker.running)
                values[f"sglang:e2e_request_latency_seconds_count{{{labels}}}"] = str(worker.ended)
                values[f"rootstock_worker_max_running_requests{{{labels}}}"] = str(SLOTS)
        for name, value in values.items():
            row = series.setdefault(name, [])
            row += ["_"] * (index - len(row)) + [value]
        if second > 300 and second % 60 == 0:
            assert scrape.at == second
            for name, figure in (("enough_workers", recorded.enough_workers), ("arrival_share", recorded.arrival_share)):
                expected.append((f"{second - SCRAPE_S}s", name, figure))
    checks = [
        {
            "expr": f"abs(rootstock:{name} - {figure!r}) < bool 0.01",
            "eval_time": at,
            "exp_samples": [{"labels": '{namespace="n",model="m"}', "value": 1}],
        }
        for at, name, figure in expected
    ]
    assert len({round(figure, 2) for _, _, figure in expected}) > 10
    world = {
        "interval": f"{SCRAPE_S}s",
        "input_series": [{"series": name, "values": " ".join(values)} for name, values in series.items()],
        "promql_expr_test": checks,
    }
    assert run_tests(tmp_path, world, every=f"{SCRAPE_S}s") == ""


@pytest.mark.needs("promtool")
def test_prefill_and_decode_workers_scale_by_separate_queues(tmp_path: Path) -> None:
    """Evaluates the scaling queries for two decode workers and one prefill worker, of which none has completed a request.

    Before a request has ended, `rootstock:enough_workers` is twice the number of workers. It bounds the backlog metric. Two of
    the three workers decode, so their metric has two thirds of this bound.

    A role's metrics omit the other role's requests and tokens. Running requests count as a share of their worker's slots. The
    second decode worker has twice as many slots as the first.
    """
    both = {"enabled": True}
    scaled = {"worker": {"autoscaling": both, "prefill": {"autoscaling": both}}}
    values = {"autoscaling": {"engine": "keda"}, **scaled}
    triggers = [each for scaler in render(values).kind("ScaledObject") for each in scaler["spec"]["triggers"]]
    queries = {each["name"]: each["metadata"]["query"] for each in triggers}
    thresholds = {each["name"]: each["metadata"]["threshold"] for each in triggers}
    assert (thresholds["running"], thresholds["token-usage"]) == ("0.7", "0.8")
    (rule,) = [each for each in adapter_rules(scaled)["rules"] if each["name"]["as"] == "rootstock_running_share"]
    series = {f'rootstock_gateway_queue_length{{namespace="{NAMESPACE}",pod="g",model="demo"}}': 100}
    for pod, role, running, usage in (("d0", "decode", 40, 0.5), ("d1", "decode", 20, 0.25), ("p0", "prefill", 3, 1)):
        labels = f'namespace="{NAMESPACE}",pod="{pod}",model_name="demo",engine_type="{role}"'
        series[f"rootstock_worker_max_running_requests{{{labels}}}"] = SLOTS if pod != "d1" else 2 * SLOTS
        series[f"sglang:num_queue_reqs{{{labels}}}"] = 0 if role == "decode" else 7
        series[f"rootstock_worker_waiting_tokens{{{labels}}}"] = 500 if role == "decode" else 20_000
        series[f"sglang:num_running_reqs{{{labels}}}"] = running
        series[f"sglang:token_usage{{{labels}}}"] = usage
    world = {
        "interval": f"{SCRAPE_S}s",
        "input_series": [{"series": name, "values": f"{value}x40"} for name, value in series.items()],
        "promql_expr_test": [
            {"expr": queries[name], "eval_time": "9m", "exp_samples": [{"labels": "{}", "value": value}]}
            for name, value in (
                ("backlog", 2 * 2 * (2 + 1) * 2 / 3),
                ("running", 40 / SLOTS + 20 / (2 * SLOTS)),
                ("token-usage", 0.75),
                ("waiting-tokens", 20_000),
            )
        ]
        + [
            {
                "expr": adapter.pods_query(rule, NAMESPACE, ["d0", "d1"]),
                "eval_time": "9m",
                "exp_samples": [
                    {"labels": '{pod="d0"}', "value": 40 / SLOTS},
                    {"labels": '{pod="d1"}', "value": 20 / (2 * SLOTS)},
                ],
            }
        ],
    }
    assert run_tests(tmp_path, world, every=f"{SCRAPE_S}s") == ""


def test_picture_of_the_simulated_day_exists() -> None:
    assert PICTURE.read_text().startswith("<?xml")
