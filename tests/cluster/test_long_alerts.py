"""Alerts whose expressions cover windows of minutes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.cluster.conftest import Install
from tests.cluster.kubernetes import Cluster, until
from tests.cluster.load import load_on
from tests.cluster.test_monitoring import SOON_S, Prometheus, shorten_delays
from tests.cluster.test_scaling import keda
from tests.cluster.values import MONITORED

pytestmark = pytest.mark.timeout(1500)
BLIND_CHECKS = 30  # checks of the number of workers without metrics, five seconds apart


@pytest.fixture(scope="module", autouse=True)
def operator(cluster: Cluster) -> None:
    if cluster.local:
        cluster.addon("prometheus")


def test_queue_refused_alert_fires_and_clears(install: Install, cluster: Cluster, proved: Callable[[str], None]) -> None:
    """Sends more requests than fit into all queues, so that the gateways refuse some of them."""
    settings = {"max_total_tokens": 16384, "max_running_requests": 1, "max_queued_requests": 1, "grammar_workers": 1}
    values = {
        "worker": {"replicas": 1, "settings": settings},
        "gateway": {"settings": {"max_waiting_requests": 1}, "queueTimeoutSeconds": 1},
        "monitoring": MONITORED,
    }
    release = install(values)
    prometheus, space = Prometheus(cluster), release.namespace
    until(lambda: prometheus.all_up(space), "all targets to respond", SOON_S)
    shorten_delays(release)
    fired = "RootstockQueueRefused"
    with load_on(release, 12) as load:
        fires = until(lambda: fired in prometheus.firing(space), "the alert to fire", SOON_S)
    assert load.failures and all(failure.startswith("ValueError: 503") for failure in load.failures), load.failures
    clears = until(lambda: fired not in prometheus.firing(space), "the alert to clear", 2 * SOON_S)
    proved(f"a full queue: {fired} fired after {fires:.0f} s and cleared {clears:.0f} s after the last request (`for` of 5 s)")


def test_keda_keeps_workers_when_scraping_stops(install: Install, cluster: Cluster, proved: Callable[[str], None]) -> None:
    """Stops scraping under load. KEDA must keep the number of workers, and an alert must report the missing metrics."""
    if cluster.local:
        cluster.addon("keda")
    settings = {"max_total_tokens": 16384, "max_running_requests": 2, "grammar_workers": 1}
    values = keda(minReplicas=1, maxReplicas=3, scaleDownSeconds=60, scaleDownPeriodSeconds=15)
    values["worker"] |= {"settings": settings}
    release = install(values)
    prometheus, space = Prometheus(cluster), release.namespace
    fired, seen = "RootstockMetricsMissing", set[int]()
    with load_on(release, 12) as load:
        until(lambda: len(release.ready("worker", "demo")) == 3, "three workers", SOON_S)
        shorten_delays(release)
        release.kubectl("delete", "podmonitor", "--all")
        fires = until(lambda: fired in prometheus.alerts(), "the alert to fire", SOON_S)
        for _ in range(BLIND_CHECKS):
            seen.add(release.replicas("worker", "demo"))
            time.sleep(5)
    assert seen == {3}
    release.install(values)
    clears = until(lambda: fired not in prometheus.alerts() and prometheus.all_up(space), "the alert to clear", SOON_S)
    proved(
        f"no metrics for {BLIND_CHECKS * 5} s under 12 streams: always 3 workers; {fired} fired after {fires:.0f} s"
        f" and cleared {clears:.0f} s after the monitors were restored; {load.check()}"
    )
