"""Separate prefill and decode workers on a real network: KV is read between pods, and no request fails if pods are lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.conftest import Install
from tests.cluster.kubernetes import BrokenNodes, Release, until
from tests.cluster.load import QUESTIONS, load_on
from tests.cluster.pulls import METRICS_OPEN, pulled

STREAMS = 8
CUT_S = 10.0
LONG = tuple(f"Repeat: {'the garden of stone and coral ' * 12}{question}" for question in QUESTIONS)
VALUES: dict[str, Any] = {
    **{name: {"replicas": 2} for name in ("tokenizer", "detokenizer")},
    "gateway": {"replicas": 2, "settings": {"disaggregation_min_tokens": 48}},
    "worker": {"replicas": 2, "prefill": {"replicas": 2}},
    "drainSeconds": 20,
    "networkPolicy": METRICS_OPEN,
}


def gateways(release: Release, node: str) -> Callable[[], list[str]]:
    """Returns a function that returns the URLs of the ready gateways on this node."""
    return lambda: [f"http://{pod.ip}:8000" for pod in release.ready("gateway") if pod.node == node]


def test_prefill_and_decode_workers_roll_out_under_load(install: Install, proved: Callable[[str], None]) -> None:
    release = install(VALUES)
    with load_on(release, STREAMS, questions=LONG) as load:
        until(lambda: load.ended >= STREAMS, "the first completed requests", 120)
        read = pulled(release)
        assert read > 0, "decode workers must read KV from prefill workers"
        for component in ("prefill", "worker"):
            release.restart(component, "demo")
            before = load.ended
            until(lambda: load.ended >= before + STREAMS, "completed requests after the rollout", 120)  # noqa: B023
        assert pulled(release) > 0
    proved(f"prefill and decode rolled out under {STREAMS} streams: {load.check()}; {read:.0f} tokens of KV read before")


@pytest.mark.parametrize(("action", "remedy"), [("stop", "start"), ("cut", "join")], ids=["power", "network"])
def test_prefill_and_decode_survive_loss_of_a_node(
    install: Install, broken_nodes: BrokenNodes, proved: Callable[[str], None], action: str, remedy: str
) -> None:
    """Both nodes have workers of both roles. The clients use the gateways on the remaining node, which also has the Redis."""
    release = install(VALUES)
    (redis,) = release.ready("redis")
    (node,) = [name for name in release.cluster.nodes() if name != redis.node]
    for component in ("prefill", "worker"):
        assert len({pod.node for pod in release.ready(component, "demo")}) == 2, component
    with load_on(release, STREAMS, gateways(release, redis.node), questions=LONG) as load:
        until(lambda: load.ended >= STREAMS, "the first completed requests", 120)
        read = pulled(release)
        assert read > 0, "decode workers must read KV from prefill workers"
        broken_nodes.take(action, node, remedy)
        begun, before = time.monotonic(), load.ended
        until(lambda: time.monotonic() - begun > CUT_S and load.ended >= before + STREAMS, "completed requests meanwhile", 180)
        broken_nodes.mend()
        before = load.ended
        until(lambda: load.ended >= before + STREAMS, "completed requests afterwards", 180)
    what = "power" if action == "stop" else "network"
    proved(
        f"prefill and decode: a node without {what} under {STREAMS} streams: {load.check()}; {read:.0f} tokens of KV read before"
    )
