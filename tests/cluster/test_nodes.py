"""Distribution of pods over nodes, and requests whose pods or nodes are lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from tests.cluster.conftest import DEMO, Install
from tests.cluster.connections import known
from tests.cluster.kubernetes import BrokenNodes, Cluster, Release, until
from tests.cluster.load import load_on
from tests.cluster.overlays import LOADED
from tests.cluster.pulls import METRICS_OPEN
from tests.cluster.values import FAKE, TWO

STREAMS = 12
ROLLOUTS = int(os.environ.get("ROOTSTOCK_CLUSTER_ROLLOUTS", "3"))
BEYOND_QUIET_S = 2.0


def test_cpu_demo_installs_serves_and_uninstalls(cluster: Cluster, space: str, proved: Callable[[str], None]) -> None:
    begun = time.monotonic()
    release = Release(cluster, "rootstock", space, (DEMO,))
    release.install(LOADED)
    took = time.monotonic() - begun
    with load_on(release, 4) as load:
        until(lambda: load.ended >= 8, "completed requests")
    cluster.helm("test", release.name, "-n", space, "--logs", "--timeout", "300s")
    line = load.check()
    release.uninstall()
    release.kubectl("delete", "pod", "-l", "app.kubernetes.io/component=test")
    until(lambda: not release.kubectl("get", "all", "-o", "name").split(), "the deletion of all objects")
    proved(f"cpu-demo installed in {took:.0f} s; {line}; helm test passed; uninstalled, no object is left")


def test_default_values_start_on_nodes_of_two_cores(cluster: Cluster, space: str, proved: Callable[[str], None]) -> None:
    release = Release(cluster, "rootstock", space, ())
    begun = time.monotonic()
    release.install(LOADED)
    took = time.monotonic() - begun
    with load_on(release, 2) as load:
        until(lambda: load.ended >= 2, "completed requests")
    cores = {each["metadata"]["name"]: each["status"]["capacity"]["cpu"] for each in cluster.get("nodes")["items"]}
    proved(f"only the registry set: ready after {took:.0f} s on nodes of {' and '.join(cores.values())} cores; {load.check()}")


def test_rollout_keeps_pods_on_several_nodes(install: Install, proved: Callable[[str], None]) -> None:
    two = {"replicas": 2}
    release = install({"gateway": two, "tokenizer": two, "worker": {"replicas": 1, "settings": FAKE}})
    for _ in range(ROLLOUTS):
        for component, model in (("tokenizer", "demo"), ("gateway", "")):
            release.restart(component, model)
            until(lambda: len(release.pods(component, model)) == 2, "the old pods to end")  # noqa: B023
            assert len({pod.node for pod in release.ready(component, model)}) == 2, component
    proved(f"{ROLLOUTS} rollouts of two gateways and of two tokenizers: each time on two nodes")


def test_requests_wait_for_the_only_tokenizer_and_detokenizer(install: Install, proved: Callable[[str], None]) -> None:
    release = install({"gateway": {"replicas": 1, "queueTimeoutSeconds": 240}, "worker": {"replicas": 1, "settings": FAKE}})
    with load_on(release, 6) as load:
        until(lambda: load.ended > 6, "the first completed requests")
        for component in ("tokenizer", "detokenizer"):
            (old,) = release.ready(component, "demo")
            release.kubectl("delete", "pod", old.name, "--grace-period=0", "--force")
            until(lambda: [pod for pod in release.ready(component, "demo") if pod.name != old.name], "a ready pod")  # noqa: B023
            before = load.ended
            until(lambda: load.ended > before + 6, "completed requests after the kill")  # noqa: B023
    proved(f"the only tokenizer and the only detokenizer killed by force under 6 streams: {load.check()}")


@pytest.mark.alone
@pytest.mark.local
@pytest.mark.parametrize(("action", "remedy"), [("stop", "start"), ("cut", "join")], ids=["power", "network"])
def test_streams_survive_loss_of_a_node(
    install: Install, broken_nodes: BrokenNodes, proved: Callable[[str], None], action: str, remedy: str
) -> None:
    """The lost node runs neither the Redis nor the gateway that the clients use."""
    release = install({**TWO, "drainSeconds": 20, "networkPolicy": METRICS_OPEN})
    (redis,) = release.ready("redis")
    (gateway,) = [pod for pod in release.ready("gateway") if pod.node == redis.node]
    for component in ("tokenizer", "detokenizer", "worker"):
        assert len({pod.node for pod in release.ready(component, "demo")}) == 2, component
    (node,) = [name for name in release.cluster.nodes() if name != redis.node]
    # This takes longer if the node that an earlier test broke ran the DNS server.
    until(lambda: known(release), "all gateways to be connected to all services")
    with load_on(release, STREAMS, lambda: [f"http://{gateway.ip}:8000"]) as load:
        until(lambda: load.ended >= 3 * STREAMS, "the completed requests of the quiet run")
        quiet_s, load.longest_pause_s = load.longest_pause_s, 0.0
        broken_nodes.take(action, node, remedy)
        before = load.ended
        until(lambda: load.ended >= before + 3 * STREAMS, "completed requests after the loss")
    line = load.check()
    until(lambda: len(release.ready("tokenizer", "demo")) == 2, "a replacement of the lost tokenizer", 180)
    assert load.longest_pause_s <= quiet_s + BEYOND_QUIET_S, f"{line} (undisturbed {quiet_s:.1f} s)"
    what = "power" if action == "stop" else "network"
    proved(f"a node's {what} gone under {STREAMS} streams: {line} (undisturbed {quiet_s:.1f} s)")
