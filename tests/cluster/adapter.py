"""prometheus-adapter with the chart's own rules."""

from __future__ import annotations

import json

import yaml

from tests.cluster.kubernetes import Release

EXTERNAL = "v1beta1.external.metrics.k8s.io"


def rules_for_adapter(release: Release) -> None:
    """The chart's ConfigMap becomes the adapter's, as docs/kubernetes/autoscaling.md has it."""
    cluster = release.cluster
    rules = release.get("configmap", f"{release.name}-adapter-rules")["data"]["config.yaml"]
    named = yaml.safe_load(rules)
    assert named["rules"] and named["externalRules"]
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "adapter-config"}, "data": {"config.yaml": rules}}
    cluster.kubectl("-n", "monitoring", "apply", "-f", "-", given=json.dumps(made))
    cluster.kubectl("delete", "apiservice", EXTERNAL, "--ignore-not-found")  # KEDA's, with its own authority
    cluster.addon("prometheus", "prometheus-adapter")
    cluster.kubectl("-n", "monitoring", "rollout", "restart", "deployment/prometheus-adapter")
    cluster.kubectl("-n", "monitoring", "rollout", "status", "deployment/prometheus-adapter", "--timeout=120s")
