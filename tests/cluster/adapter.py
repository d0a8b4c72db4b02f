"""Runs prometheus-adapter with the rules that the chart renders."""

from __future__ import annotations

from typing import Any

import yaml

from tests.cluster.kubernetes import Cluster, Release

EXTERNAL = "v1beta1.external.metrics.k8s.io"
NAMESPACE, RULES = "monitoring", "adapter-config"  # the ConfigMap that the addon's Deployment mounts


def by_adapter(cluster: Cluster) -> dict[str, Any]:
    """Returns chart values with which a release writes the adapter's ConfigMap. Deletes the ConfigMap of an earlier release."""
    cluster.addon("prometheus")
    cluster.kubectl("delete", "configmap", RULES, "-n", NAMESPACE, "--ignore-not-found")
    return {"engine": "hpa", "adapterRules": {"enabled": True, "namespace": NAMESPACE, "name": RULES}}


def start_adapter(release: Release) -> None:
    """Starts or restarts the adapter. A restart is needed because the adapter reads its ConfigMap only at the start."""
    cluster = release.cluster
    config = yaml.safe_load(cluster.get("configmap", RULES, "-n", NAMESPACE)["data"]["config.yaml"])
    assert config["rules"] and config["externalRules"]
    cluster.kubectl("delete", "apiservice", EXTERNAL, "--ignore-not-found")  # the APIService of KEDA, which has KEDA's authority
    cluster.addon("prometheus-adapter")
    cluster.kubectl("-n", NAMESPACE, "rollout", "restart", "deployment/prometheus-adapter")
    cluster.kubectl("-n", NAMESPACE, "rollout", "status", "deployment/prometheus-adapter", "--timeout=120s")
