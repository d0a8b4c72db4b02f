"""What a cluster's own parts and the Redis do to streams when they go."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import Install
from tests.cluster.kubernetes import Cluster, Release, until
from tests.cluster.load import Load

TWO = {name: {"replicas": 2} for name in ("gateway", "tokenizer", "detokenizer", "worker")}
STREAMS = 8
AWAY_S = 20.0


@contextmanager
def api_server_stopped(cluster: Cluster) -> Iterator[None]:
    """It answers nobody, and holds its connections."""
    if not cluster.local:
        pytest.fail("an API server is stopped only where the tests have started it")
    pid = int((Path(cluster.env["KUBECONFIG"]).parent / "pids" / "kube-apiserver").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def process_of(release: Release, component: str, model: str) -> psutil.Process:
    """The first one of a pod's container: a process of this machine, in namespaces of its own."""
    (pod, *_) = release.ready(component, model)
    uid = release.get("pod", pod.name)["metadata"]["uid"]
    for process in psutil.process_iter():
        try:
            groups = Path(f"/proc/{process.pid}/cgroup").read_text()
            if uid in groups.replace("_", "-") and f"services.{component}" in " ".join(process.cmdline()):
                return process
        except (OSError, psutil.Error):  # it has ended meanwhile
            continue
    raise AssertionError(f"no process of {pod.name} is seen here")


def test_without_an_api_server_while_processes_die(install: Install, proved: Callable[[str], None]) -> None:
    release = install({**TWO, "gateway": {"replicas": 2, "discovery": "k8s"}})
    urls = release.urls()
    victims = [process_of(release, component, "demo") for component in ("worker", "tokenizer", "detokenizer")]
    with Load(STREAMS, lambda: urls) as load:
        until(lambda: load.ended >= STREAMS, "the load")
        with api_server_stopped(release.cluster):
            before = load.ended
            for victim in victims:
                victim.kill()
                time.sleep(AWAY_S / 4)
            until(lambda: load.ended >= before + 2 * STREAMS, "answers meanwhile")
        until(lambda: len(release.ready("worker", "demo")) == 2, "the worker's container again")
    proved(f"API server stopped, a worker, a tokenizer and a detokenizer killed meanwhile: {load.check()}")


def test_names_are_not_resolved(install: Install, proved: Callable[[str], None]) -> None:
    """CoreDNS gone for a while: who is known stays known."""
    release = install(TWO)
    dns = ("-n", "kube-system", "scale", "deployment/coredns")
    urls = release.urls()
    with Load(STREAMS, lambda: urls) as load:
        until(lambda: load.ended >= STREAMS, "the load")
        release.cluster.kubectl(*dns, "--replicas=0")
        try:
            before = load.ended
            time.sleep(AWAY_S)
            until(lambda: load.ended >= before + STREAMS, "answers meanwhile")
        finally:
            release.cluster.kubectl(*dns, "--replicas=1")
        release.cluster.kubectl("-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=120s")
    proved(f"CoreDNS away for {AWAY_S:.0f} s: {load.check()}")


def test_the_redis_is_killed(install: Install, proved: Callable[[str], None]) -> None:
    release = install(TWO)
    (old,) = release.ready("redis")
    with Load(STREAMS, release.urls) as load:
        until(lambda: load.ended >= STREAMS, "the load")
        release.kubectl("delete", "pod", old.name, "--grace-period=0", "--force")
        until(lambda: [pod for pod in release.ready("redis") if pod.name != old.name], "its successor")
        before = load.ended
        until(lambda: load.ended >= before + STREAMS, "answers afterwards")
    line = load.check()
    assert load.longest_pause_s <= 10
    proved(f"the Redis killed: {line}")
