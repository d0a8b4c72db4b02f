"""Alerts over windows of minutes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.conftest import Install
from tests.cluster.kubernetes import Cluster, until
from tests.cluster.load import Load
from tests.cluster.test_monitoring import MONITORED, SOON_S, Prometheus, hurry


@pytest.fixture(scope="module", autouse=True)
def operator(cluster: Cluster) -> None:
    if cluster.local:
        cluster.addon("prometheus")


def test_queue_refused_fires_and_clears(install: Install, cluster: Cluster, proved: Callable[[str], None]) -> None:
    """Every worker's queue is full, and who comes then is refused."""
    settings = {"max_total_tokens": 16384, "max_running_requests": 1, "max_queued_requests": 1, "grammar_workers": 1}
    values = {
        "worker": {"replicas": 1, "settings": settings},
        "gateway": {"settings": {"max_waiting_requests": 1}, "queueTimeoutSeconds": 1},
        "monitoring": MONITORED,
    }
    release = install(values)
    prometheus, space = Prometheus(cluster), release.namespace
    until(lambda: prometheus.all_up(space), "every target", SOON_S)
    hurry(release)
    fired = "RootstockQueueRefused"
    with Load(12, release.urls) as load:
        fires = until(lambda: fired in prometheus.firing(space), "the alert", SOON_S)
    assert load.failures and all(said.startswith("ValueError: 503") for said in load.failures), load.failures
    clears = until(lambda: fired not in prometheus.firing(space), "its end", 2 * SOON_S)
    proved(f"a full queue: {fired} after {fires:.0f} s, gone {clears:.0f} s after the last request (`for` of 5 s)")
