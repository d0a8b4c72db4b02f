"""Kubernetes' own HPA with prometheus-adapter and the chart's rules scales workers and gateways.

The adapter replaces KEDA as the server of the external metrics API, so tests with KEDA must run before these.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.adapter import by_adapter, start_adapter
from tests.cluster.conftest import Install
from tests.cluster.kubernetes import Cluster, until
from tests.cluster.load import load_on
from tests.cluster.values import FAKE, MONITORED

PACED = {"scaleDownSeconds": 15, "scaleDownPeriodSeconds": 15}
SLOW = {**FAKE, "fake_step_s": 0.1, "max_running_requests": 2}
ANSWER_TOKENS = 60  # output tokens per request, which take six seconds
STREAMS = 16
WITHIN_S = 300.0
pytestmark = [pytest.mark.alone, pytest.mark.local, pytest.mark.timeout(1500)]  # HPAs scale down slowly


def test_hpa_scales_workers_and_gateways_up_and_down(install: Install, cluster: Cluster, proved: Callable[[str], None]) -> None:
    """Scales to two or more workers and four gateways under load, and back to one of each.

    Each client waits for its response, so the load stops growing at two or three workers. Sixteen streams need four gateways.
    """
    scaled = {"enabled": True, "minReplicas": 1, "maxReplicas": 4, **PACED}
    release = install(
        {
            "autoscaling": by_adapter(cluster),
            "monitoring": MONITORED,
            "worker": {"replicas": 1, "settings": SLOW, "autoscaling": {**scaled, "coldStartSeconds": 15}},
            "gateway": {"replicas": 1, "queueTimeoutSeconds": 300, "autoscaling": {**scaled, "targetStreams": 4}},
        }
    )
    release.cluster.addon("metrics-server")
    start_adapter(release)
    with load_on(release, STREAMS, max_tokens=ANSWER_TOKENS) as load:
        workers_s = until(lambda: len(release.ready("worker", "demo")) >= 2, "a second worker", WITHIN_S)
        gateways_s = workers_s + until(lambda: len(release.ready("gateway")) == 4, "four gateways", WITHIN_S)
    down_s = until(lambda: release.replicas("worker", "demo") == release.replicas("gateway") == 1, "the scale-down", WITHIN_S)
    up = f"a second worker after {workers_s:.0f} s, four gateways after {gateways_s:.0f} s"
    proved(f"HPA by prometheus-adapter, {STREAMS} streams, 2 per worker: {up}; one of each {down_s:.0f} s later; {load.check()}")
