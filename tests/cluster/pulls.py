"""Reads from the workers' metrics the KV that they have read from remote workers and from tiers."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.kubernetes import Release

# Lets tests read metrics from this machine. The KV port stays closed.
METRICS_OPEN = {"monitoring": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}


def worker_metric(release: Release, name: str) -> float:
    """Returns the sum of a counter over the ready workers."""
    total = 0.0
    for pod in release.ready("worker", "demo"):
        with urllib.request.urlopen(f"http://{pod.ip}:9103/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        total += sum(sample.value for sample in samples if sample.name == name)
    return total


def pulled(release: Release) -> float:
    """Returns the tokens whose KV the ready decode workers have read."""
    return worker_metric(release, "rootstock_worker_pulled_tokens_total")
