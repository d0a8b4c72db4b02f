"""Prefill workers on one node, decode workers on another and all other pods on a third: KV is read between nodes over TCP.

Tests cut the network or the power of a node, roll out each pool, and let the HPA scale each pool by its own metrics. No request
may fail, and equal prompts must give equal texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster.adapter import by_adapter, start_adapter
from tests.cluster.conftest import Install
from tests.cluster.kubernetes import BrokenNodes, Cluster, Object, Release, until
from tests.cluster.load import QUESTIONS, Load, load_on
from tests.cluster.pulls import METRICS_OPEN, pulled
from tests.cluster.values import MONITORED

STREAMS = 8  # concurrent clients with long prompts
CROWD = 24  # concurrent clients with short prompts; they need more than one decode worker
CUT_S, WITHIN_S = 10.0, 300.0
# Together, the prompts have more tokens than all KV pools, so that no prompt stays cached until its next use.
PROMPTS = tuple(f"{number}. Repeat: {'the garden of stone and coral ' * 60}{QUESTIONS[number % 8]}" for number in range(200))
PACED = {"coldStartSeconds": 15, "scaleDownSeconds": 15, "scaleDownPeriodSeconds": 15}
pytestmark = [pytest.mark.alone, pytest.mark.local, pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class NodeNames:
    """Names of the nodes for the prefill workers, the decode workers and all other pods."""

    front: str
    prefill: str
    decode: str

    def values(self, **worker: Any) -> Object:
        """Returns values with one prefill and one decode worker. `worker` overrides the worker's values."""
        front = {"nodeSelector": on(self.front)}
        prefill = {"replicas": 1, "nodeSelector": on(self.prefill), **worker.pop("prefill", {})}
        return {
            **{name: {"replicas": 2, **front} for name in ("tokenizer", "detokenizer")},
            "gateway": {"replicas": 2, **front, "queueTimeoutSeconds": 300, "settings": {"disaggregation_min_tokens": 48}},
            "redis": {"pod": front},
            "worker": {"replicas": 1, "nodeSelector": on(self.decode), **worker, "prefill": prefill},
            "networkPolicy": METRICS_OPEN,
            "drainSeconds": 20,
        }


def on(node: str) -> dict[str, str]:
    return {"kubernetes.io/hostname": node}


@pytest.fixture
def node_names(cluster: Cluster) -> NodeNames:
    nodes = cluster.nodes()
    assert len(nodes) == 3, f"these tests need three nodes; the cluster has {nodes}. Set CLUSTER_TEST_NODES=3."
    return NodeNames(*nodes)


def flowing(release: Release, load: Load) -> float:
    """Waits until STREAMS requests have completed. Returns the number of tokens whose KV was read between nodes."""
    until(lambda: load.ended >= STREAMS, "the first completed requests", 120)
    read = pulled(release)
    assert read > 0, "decode workers must read KV from the other node"
    return read


@pytest.mark.parametrize(("action", "remedy"), [("cut", "join"), ("stop", "start")], ids=["network", "power"])
def test_streams_survive_loss_of_the_prefill_node(
    install: Install, node_names: NodeNames, broken_nodes: BrokenNodes, proved: Callable[[str], None], action: str, remedy: str
) -> None:
    """The prefill node is lost for at least ten seconds. Decode workers compute the prompts whose KV they cannot read."""
    release = install(node_names.values())
    with load_on(release, STREAMS, questions=PROMPTS) as load:
        read = flowing(release, load)
        broken_nodes.take(action, node_names.prefill, remedy)
        begun, before = time.monotonic(), load.ended
        until(lambda: time.monotonic() - begun > CUT_S and load.ended >= before + STREAMS, "completed requests meanwhile", 180)
        broken_nodes.mend()
        until(lambda: release.ready("prefill", "demo"), "a ready prefill worker", WITHIN_S)
        again = pulled(release)
        until(lambda: pulled(release) > again, "KV reads between nodes after the loss", 180)
    what = "network" if action == "cut" else "power"
    proved(
        f"far pools: the prefill node without {what} under {STREAMS} streams: {load.check()}; {read:.0f} tokens of KV read before"
    )


@pytest.mark.parametrize("component", ["prefill", "worker"])
def test_pools_on_two_nodes_roll_out_under_load(
    install: Install, node_names: NodeNames, proved: Callable[[str], None], component: str
) -> None:
    release = install(node_names.values())
    with load_on(release, STREAMS, questions=PROMPTS) as load:
        read = flowing(release, load)
        release.restart(component, "demo")
        before = load.ended
        until(lambda: load.ended >= before + STREAMS and pulled(release) > 0, "completed requests afterwards", 180)
    proved(f"far pools: {component} rolled out under {STREAMS} streams: {load.check()}; {read:.0f} tokens of KV read before")


def test_hpa_scales_each_pool_by_its_own_metrics(
    install: Install, node_names: NodeNames, cluster: Cluster, proved: Callable[[str], None]
) -> None:
    """Long prompts add a prefill worker only. Many short prompts add a decode worker only."""
    scaled = {"enabled": True, "minReplicas": 1, "maxReplicas": 2}
    prefill = {"autoscaling": {**scaled, "waitingTokens": 128, "busyShare": 0.2}}
    settings = {"max_total_tokens": 32768, "max_running_requests": 16}
    values = node_names.values(prefill=prefill, autoscaling={**scaled, **PACED}, settings=settings)
    cluster.addon("metrics-server")
    release = install(values | {"autoscaling": by_adapter(cluster), "monitoring": MONITORED})
    start_adapter(release)

    def asked() -> tuple[int, int]:
        return release.replicas("prefill", "demo"), release.replicas("worker", "demo")

    with load_on(release, STREAMS, questions=PROMPTS, max_tokens=8) as prompts:
        first_s = until(lambda: asked() == (2, 1), "two prefill workers and one decode worker", WITHIN_S)
        until(lambda: len(release.ready("prefill", "demo")) == 2, "both prefill workers to be ready", WITHIN_S)
        read = flowing(release, prompts)
    with load_on(release, CROWD, questions=QUESTIONS) as crowd:
        second_s = until(lambda: asked() == (1, 2), "one prefill worker and two decode workers", WITHIN_S)
        until(lambda: len(release.ready("worker", "demo")) == 2, "both decode workers to be ready", WITHIN_S)
    up = f"2 prefill and 1 decode workers after {first_s:.0f} s of long prompts ({prompts.check()}; {read:.0f} tokens of KV read)"
    proved(f"far pools by the HPA: {up}, 1 prefill and 2 decode after {second_s:.0f} s of short prompts ({crowd.check()})")
