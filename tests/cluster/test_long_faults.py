"""Random faults in sequence under many streams: no request fails, texts are equal and pauses are short.

ROOTSTOCK_CLUSTER_SEEDS (default 0:10) is the range of seeds. ROOTSTOCK_CLUSTER_MINUTES (default 5) is the duration for each seed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest

from tests.cluster.conftest import Install
from tests.cluster.connections import known
from tests.cluster.kubernetes import BrokenNodes, Release, until
from tests.cluster.load import load_on
from tests.cluster.pulls import METRICS_OPEN

FIRST, _, LAST = os.environ.get("ROOTSTOCK_CLUSTER_SEEDS", "0:10").partition(":")
MINUTES = float(os.environ.get("ROOTSTOCK_CLUSTER_MINUTES", "5"))
STREAMS = 24
pytestmark = pytest.mark.timeout(MINUTES * 60 + 900)
TOKENIZERS, DETOKENIZERS, WORKERS = "tokenizer", "detokenizer", "worker"
FAULTS = ("power", "network", "kill", "kill", "delete", "restart")
BEYOND_QUIET_S, WITH_REDIS_S = 2.0, 3.0


def ready(release: Release) -> bool:
    return all(len(release.ready(component, "demo")) == 2 for component in (TOKENIZERS, DETOKENIZERS, WORKERS)) and bool(
        release.ready("redis")
    )


def on_both_nodes(release: Release) -> bool:
    """Whether each service has pods on both nodes, so that it survives the loss of one node."""
    return all(
        len({pod.node for pod in release.ready(component, "demo")}) == 2 for component in (TOKENIZERS, DETOKENIZERS, WORKERS)
    )


@pytest.mark.parametrize("seed", range(int(FIRST), int(LAST)))
def test_streams_survive_random_faults(
    install: Install, broken_nodes: BrokenNodes, seed: int, proved: Callable[[str], None]
) -> None:
    rng = random.Random(seed)
    replicas = {name: {"replicas": 2} for name in (TOKENIZERS, DETOKENIZERS, WORKERS)}
    lives, goes = rng.sample(broken_nodes.names(), 2)
    there = {"key": "kubernetes.io/hostname", "operator": "In", "values": [lives]}
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [there]}]}}
    }
    gateway = {"replicas": 2, "affinity": affinity, "topologySpread": False}
    release = install({**replicas, "gateway": gateway, "drainSeconds": 20, "networkPolicy": METRICS_OPEN})
    urls = release.urls()
    until(lambda: known(release), "all gateways to be connected to all services")
    done: list[str] = []
    with load_on(release, STREAMS, lambda: urls) as load:
        until(lambda: load.ended >= 2 * STREAMS, "the completed requests of the quiet run")
        quiet, until_s = load.longest_pause_s, time.monotonic() + MINUTES * 60
        while time.monotonic() < until_s:
            fault = rng.choice([each for each in FAULTS if each not in ("power", "network") or on_both_nodes(release)])
            redis = {pod.node for pod in release.ready("redis")}
            load.longest_pause_s, before = 0.0, load.ended
            event = commit(rng, fault, release, broken_nodes, goes)
            until(lambda: load.ended >= before + STREAMS, "completed requests after the fault")  # noqa: B023
            broken_nodes.mend()
            until(lambda: ready(release) and known(release), f"all pods to be ready and connected after the fault: {event}", 240)
            more = WITH_REDIS_S if goes in redis or "redis" in event else BEYOND_QUIET_S
            done.append(f"{event} {load.longest_pause_s:.1f} s")
            print(f"seed {seed}: {done[-1]} (quiet {quiet:.1f} s)", flush=True)
            assert load.longest_pause_s <= quiet + more, (seed, done)
    proved(f"seed {seed}, {STREAMS} streams, {len(done)} faults, quiet {quiet:.1f} s: {load.check()}; {', '.join(done)}")


def commit(rng: random.Random, fault: str, release: Release, nodes: BrokenNodes, goes: str) -> str:
    """Causes a fault and returns its description."""
    if fault in ("power", "network"):
        nodes.take(*(("stop", goes, "start") if fault == "power" else ("cut", goes, "join")))
        return f"{fault} of {goes}"
    component = rng.choice(
        (TOKENIZERS, DETOKENIZERS, WORKERS, "redis") if fault != "restart" else (TOKENIZERS, DETOKENIZERS, WORKERS)
    )
    model = "" if component == "redis" else "demo"
    if fault == "restart":
        release.restart(component, model)
        return f"rollout of the {component}s"
    pod = rng.choice(release.ready(component, model))
    if fault == "delete":
        release.kubectl("delete", "pod", pod.name, "--wait=false")
        return f"{component} deleted"
    release.kubectl("delete", "pod", pod.name, "--grace-period=0", "--force")
    return f"{component} killed"
