"""Outages of the Redis, of cluster components and of a node while streams run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import BASE
from tests.cluster.kubernetes import Cluster, Release, until
from tests.cluster.load import load_on
from tests.cluster.spaces import namespace
from tests.cluster.values import SERVICES, TWO

STREAMS = 8
AWAY_S = 20.0
WITH_REDIS_S = 3.0  # seconds by which a pause may exceed the longest pause of the quiet run
VALUES = {**TWO, "drainSeconds": 20}
pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Release]:
    """A release for all tests of this file."""
    with namespace(cluster, "outages") as space:
        release = Release(cluster, "rootstock", space, BASE)
        release.install(VALUES)
        yield release


@pytest.fixture
def release(installed: Release) -> Release:
    """The release with all its pods ready again after the previous test."""

    def is_whole() -> bool:
        pods = [installed.pods(component, model) for component, model in (*SERVICES, ("redis", ""))]
        return all(pod.ready for several in pods for pod in several) and [len(each) for each in pods] == [2, 2, 2, 2, 1]

    until(is_whole, "all pods to be ready")
    return installed


@contextmanager
def api_server_stopped(cluster: Cluster) -> Iterator[None]:
    """Stops the API server's process by a signal: it sends no responses, and its connections stay open."""
    pid = int((Path(cluster.env["KUBECONFIG"]).parent / "pids" / "kube-apiserver").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def process_of(release: Release, component: str, model: str) -> psutil.Process:
    """Returns the main process of a pod's container. Nodes are on this machine, so the process is visible here."""
    (pod, *_) = release.ready(component, model)
    uid = release.get("pod", pod.name)["metadata"]["uid"]
    for process in psutil.process_iter():
        try:
            groups = Path(f"/proc/{process.pid}/cgroup").read_text()
            if uid in groups.replace("_", "-") and f"rootstock_llm.services.{component}" in " ".join(process.cmdline()):
                return process
        except (OSError, psutil.Error):  # the inspected process has ended
            continue
    raise AssertionError(f"this machine runs no process of the pod {pod.name}")


def test_streams_survive_the_kill_of_redis(release: Release, proved: Callable[[str], None]) -> None:
    (old,) = release.ready("redis")
    with load_on(release, STREAMS) as load:
        until(lambda: load.ended >= 2 * STREAMS, "the completed requests of the quiet run")
        quiet_s, load.longest_pause_s = load.longest_pause_s, 0.0
        release.kubectl("delete", "pod", old.name, "--grace-period=0", "--force")
        until(lambda: [pod for pod in release.ready("redis") if pod.name != old.name], "the new pod to be ready")
        before = load.ended
        until(lambda: load.ended >= before + STREAMS, "completed requests afterwards")
    line = load.check()
    assert load.longest_pause_s <= quiet_s + WITH_REDIS_S, f"{line} (undisturbed {quiet_s:.1f} s)"
    proved(f"the Redis killed: {line} (undisturbed {quiet_s:.1f} s)")


def test_streams_survive_an_outage_of_dns(release: Release, proved: Callable[[str], None]) -> None:
    """Stops CoreDNS for AWAY_S. Gateways must keep their connections."""
    urls = release.urls()
    dns = ("scale", "-n", "kube-system", "deployment/coredns")
    with load_on(release, STREAMS, lambda: urls) as load:
        until(lambda: load.ended >= STREAMS, "the first completed requests")
        release.cluster.kubectl(*dns, "--replicas=0")
        try:
            before = load.ended
            time.sleep(AWAY_S)
            until(lambda: load.ended >= before + STREAMS, "completed requests meanwhile")
        finally:
            release.cluster.kubectl(*dns, "--replicas=1")
        release.cluster.kubectl("rollout", "status", "-n", "kube-system", "deployment/coredns", "--timeout=120s")
    proved(f"CoreDNS stopped for {AWAY_S:.0f} s: {load.check()}")


@pytest.mark.local
def test_streams_survive_killed_processes_without_an_api_server(release: Release, proved: Callable[[str], None]) -> None:
    """Gateways discover services by EndpointSlices, so they get no update while the API server is stopped."""
    release.install({**VALUES, "gateway": {"replicas": 2, "discovery": "k8s"}})
    until(lambda: len(release.pods("gateway", leaving=True)) == 2, "the end of the gateways with DNS discovery")
    urls = release.urls()
    victims = [process_of(release, component, "demo") for component in ("worker", "tokenizer", "detokenizer")]
    with load_on(release, STREAMS, lambda: urls) as load:
        until(lambda: load.ended >= STREAMS, "the first completed requests")
        with api_server_stopped(release.cluster):
            before = load.ended
            for victim in victims:
                victim.kill()
                time.sleep(AWAY_S / 4)
            until(lambda: load.ended >= before + 2 * STREAMS, "completed requests meanwhile")
        until(lambda: len(release.ready("worker", "demo")) == 2, "the worker's container to be ready again")
    proved(f"API server stopped, a worker, a tokenizer and a detokenizer killed meanwhile: {load.check()}")


@pytest.fixture
def cordoned(cluster: Cluster) -> Iterator[Callable[[str], None]]:
    """cordoned(node): drains the node. After the test, the node is uncordoned."""
    done: list[str] = []

    def drain(node: str) -> None:
        done.append(node)
        cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=300s")

    yield drain
    for node in done:
        cluster.kubectl("uncordon", node)


def test_streams_survive_a_drained_node(release: Release, cordoned: Callable[[str], None], proved: Callable[[str], None]) -> None:
    """The drained node runs a gateway and the Redis. This test is the last one, because it leaves all pods on the other node."""
    (redis,) = release.ready("redis")
    with load_on(release, STREAMS) as load:
        until(lambda: load.ended >= STREAMS, "the first completed requests")
        cordoned(redis.node)
        before = load.ended
        until(lambda: load.ended >= before + STREAMS, "completed requests afterwards")
    line = load.check()
    assert {pod.node for component, model in SERVICES for pod in release.ready(component, model)} - {redis.node}
    proved(f"the node of the Redis drained: {line}")
