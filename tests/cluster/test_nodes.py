"""Where pods stand, and what becomes of requests when they go."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from tests.cluster.conftest import Install
from tests.cluster.kubernetes import BrokenNodes, until
from tests.cluster.load import Load

STREAMS = 12
ROLLOUTS = int(os.environ.get("ROOTSTOCK_CLUSTER_ROLLOUTS", "3"))


def test_installed_it_answers_and_holds_to_the_restricted_standard(install: Install, proved: Callable[[str], None]) -> None:
    begun = time.monotonic()
    release = install()
    took = time.monotonic() - begun
    with Load(4, release.urls) as load:
        until(lambda: load.ended >= 8, "answers")
    release.cluster.helm("test", release.name, "-n", release.namespace, "--logs", "--timeout", "120s")
    line = load.check()
    release.uninstall()
    release.kubectl("delete", "pod", "-l", "app.kubernetes.io/component=test")
    until(lambda: not release.kubectl("get", "all", "-o", "name").split(), "the end of all pods")
    proved(f"cpu-demo installed in {took:.0f} s; {line}; helm test passed; uninstalled, nothing is left")


def test_a_rollout_leaves_its_pods_on_several_nodes(install: Install, proved: Callable[[str], None]) -> None:
    release = install({"gateway": {"replicas": 2}, "tokenizer": {"replicas": 2}, "worker": {"replicas": 1}})
    for _ in range(ROLLOUTS):
        for component, model in (("tokenizer", "demo"), ("gateway", "")):
            release.restart(component, model)
            until(lambda: len(release.pods(component, model)) == 2, "the old pods' end")  # noqa: B023
            assert len({pod.node for pod in release.ready(component, model)}) == 2, component
    proved(f"{ROLLOUTS} rollouts of two gateways and of two tokenizers: each time on two nodes")


def test_requests_wait_for_the_only_tokenizer_and_detokenizer(install: Install, proved: Callable[[str], None]) -> None:
    release = install({"gateway": {"replicas": 1}, "worker": {"replicas": 1}})
    with Load(6, release.urls) as load:
        until(lambda: load.ended > 6, "the load")
        for component in ("tokenizer", "detokenizer"):
            (old,) = release.ready(component, "demo")
            release.kubectl("delete", "pod", old.name, "--grace-period=0", "--force")
            until(lambda: [pod for pod in release.ready(component, "demo") if pod.name != old.name], "its successor")  # noqa: B023
            before = load.ended
            until(lambda: load.ended > before + 6, "answers again")  # noqa: B023
    proved(f"the only tokenizer and the only detokenizer killed by force under 6 streams: {load.check()}")


@pytest.mark.parametrize(("action", "remedy"), [("stop", "start"), ("cut", "join")], ids=["power", "network"])
def test_a_node_goes(
    install: Install, broken_nodes: BrokenNodes, proved: Callable[[str], None], action: str, remedy: str
) -> None:
    """Not the one of the gateway that is asked, nor that of the Redis."""
    release = install(
        {**{name: {"replicas": 2} for name in ("gateway", "tokenizer", "detokenizer", "worker")}, "drainSeconds": 20}
    )
    (redis,) = release.ready("redis")
    (gateway,) = [pod for pod in release.ready("gateway") if pod.node == redis.node]
    for component in ("tokenizer", "detokenizer", "worker"):
        assert len({pod.node for pod in release.ready(component, "demo")}) == 2, component
    (node,) = [name for name in release.cluster.nodes() if name != redis.node]
    with Load(STREAMS, lambda: [f"http://{gateway.ip}:8000"]) as quiet:
        until(lambda: quiet.ended >= 3 * STREAMS, "the quiet run")
    with Load(STREAMS, lambda: [f"http://{gateway.ip}:8000"]) as load:
        until(lambda: load.ended >= STREAMS, "the load")
        broken_nodes.take(action, node, remedy)
        before = load.ended
        until(lambda: load.ended >= before + 3 * STREAMS, "answers afterwards")
    line = load.check()
    until(lambda: len(release.ready("tokenizer", "demo")) == 2, "replacements", 120)
    assert load.longest_pause_s <= quiet.longest_pause_s + 2
    what = "power" if action == "stop" else "network"
    proved(f"a node's {what} gone under {STREAMS} streams: {line} (undisturbed {quiet.longest_pause_s:.1f} s)")
