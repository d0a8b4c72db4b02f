"""Reads workers' metrics: the numbers of tokens whose KV came from remote workers or from tiers."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.kubernetes import Release

# Value of networkPolicy that lets this machine read metrics. The KV port stays closed.
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
    """Returns the number of tokens whose KV the ready decode workers have read from prefill workers."""
    return worker_metric(release, "rootstock_worker_pulled_tokens_total")
