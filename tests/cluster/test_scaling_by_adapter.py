"""Kubernetes's own HPA on prometheus-adapter with the chart's rules: of workers and of gateways. After the tests of KEDA: the
adapter takes external metrics over."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import Install
from tests.cluster.kubernetes import Release, until
from tests.cluster.load import Load

MONITORED = {"podMonitor": {"enabled": True, "interval": "5s"}, "rules": {"enabled": True}}
PACED = {"scaleDownSeconds": 15, "scaleDownPeriodSeconds": 15}
FEW = {"max_total_tokens": 16384, "max_running_requests": 2, "grammar_workers": 1}
SLOW = {"executor": "fake", "fake_step_s": 0.1, "max_total_tokens": 16384}  # an answer in twenty seconds
WITHIN_S = 300.0
pytestmark = pytest.mark.timeout(1200)  # up, and down again at the pace of HPAs
EXTERNAL = "v1beta1.external.metrics.k8s.io"


def values(**more: Any) -> dict[str, Any]:
    return {"autoscaling": {"engine": "hpa", "adapterRules": True}, "monitoring": MONITORED, **more}


def rules_for_adapter(release: Release) -> None:
    """The chart's ConfigMap becomes the adapter's, as docs/kubernetes/autoscaling.md has it."""
    cluster = release.cluster
    rules = release.get("configmap", f"{release.name}-adapter-rules")["data"]["config.yaml"]
    named = yaml.safe_load(rules)
    assert named["rules"] and named["externalRules"]
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "adapter-config"}, "data": {"config.yaml": rules}}
    cluster.kubectl("-n", "monitoring", "apply", "-f", "-", given=json.dumps(made))
    if not cluster.local:
        pytest.fail("the adapter of a cluster that is somebody's keeps its rules")
    cluster.kubectl("delete", "apiservice", EXTERNAL, "--ignore-not-found")  # KEDA's, with its own authority
    cluster.addon("prometheus", "prometheus-adapter")
    cluster.kubectl("-n", "monitoring", "rollout", "restart", "deployment/prometheus-adapter")
    cluster.kubectl("-n", "monitoring", "rollout", "status", "deployment/prometheus-adapter", "--timeout=120s")


def test_workers_with_what_runs_and_back(install: Install, proved: Callable[[str], None]) -> None:
    """Clients that wait for each answer send no more than workers take: two do, or three, whatever waits."""
    scaled = {"enabled": True, "minReplicas": 1, "maxReplicas": 4, "coldStartSeconds": 15, **PACED}
    release = install(values(worker={"replicas": 1, "settings": FEW, "autoscaling": scaled}))
    rules_for_adapter(release)
    with Load(16, release.urls) as load:
        up = until(lambda: len(release.ready("worker", "demo")) >= 2, "a second worker", WITHIN_S)
    down = until(lambda: release.replicas("worker", "demo") == 1, "one worker again", WITHIN_S)
    line = load.check()
    proved(f"HPA by prometheus-adapter, 16 streams on workers of two: a second after {up:.0f} s, one {down:.0f} s later; {line}")


def test_gateways_with_their_streams(install: Install, proved: Callable[[str], None]) -> None:
    """Twelve streams are three gateways' at four each."""
    scaled = {"enabled": True, "minReplicas": 1, "maxReplicas": 4, "targetStreams": 4, **PACED}
    release = install(values(worker={"replicas": 1, "settings": SLOW}, gateway={"replicas": 1, "autoscaling": scaled}))
    release.cluster.addon("metrics-server")
    rules_for_adapter(release)
    with Load(12, release.urls) as load:
        up = until(lambda: len(release.ready("gateway")) == 3, "three gateways", WITHIN_S)
    down = until(lambda: release.replicas("gateway") == 1, "one gateway again", WITHIN_S)
    proved(
        f"HPA by prometheus-adapter, 12 streams at 4 a gateway: three after {up:.0f} s, one {down:.0f} s later; {load.check()}"
    )
