"""What workers have read of each other and of their tiers, as their metrics have it."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.kubernetes import Release

# Tests look at metrics from this machine; the KV port stays shut.
METRICS_OPEN = {"monitoring": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}


def worker_metric(release: Release, name: str) -> float:
    """The sum of a counter over the workers that are there."""
    total = 0.0
    for pod in release.ready("worker", "demo"):
        with urllib.request.urlopen(f"http://{pod.ip}:9103/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        total += sum(sample.value for sample in samples if sample.name == name)
    return total


def pulled(release: Release) -> float:
    """Tokens whose KV the decode workers that are there have read."""
    return worker_metric(release, "rootstock_worker_pulled_tokens_total")
