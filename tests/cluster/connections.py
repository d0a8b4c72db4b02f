"""Checks the connections from gateways to services by the gateways' metrics."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.kubernetes import Release

SERVICES = ("tokenizer", "detokenizer", "worker")


def known(release: Release) -> bool:
    """Whether both gateways are connected to two tokenizers, two detokenizers and two workers.

    Gateways connect a few seconds after the services are ready, because finding a service takes up to two DNS lookups. The
    release must have METRICS_OPEN (tests/cluster/pulls.py).
    """
    seen = [_connected(f"http://{pod.ip}:9104/metrics") for pod in release.ready("gateway")]
    return len(seen) == 2 and all(each[service] == 2 for each in seen for service in SERVICES)


def _connected(url: str) -> dict[str, float]:
    """Returns the number of connections by service."""
    families = text_string_to_metric_families(httpx.get(url, timeout=10).text)
    found = [each for family in families for each in family.samples if each.name == "rootstock_gateway_connected"]
    return {each.labels["service"]: each.value for each in found}
