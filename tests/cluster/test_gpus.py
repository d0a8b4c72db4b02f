"""Workers with GPUs are scheduled on nodes with GPUs. A number in the node's status simulates the GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.conftest import Install
from tests.cluster.kubernetes import Cluster, run, until

GPUS = 2


@pytest.fixture
def node_with_gpus(cluster: Cluster) -> str:
    node = cluster.nodes()[-1]
    run(cluster.local, "gpus", node, str(GPUS))
    return node


@pytest.mark.local
def test_worker_waits_for_a_node_with_a_free_gpu(install: Install, node_with_gpus: str, proved: Callable[[str], None]) -> None:
    small = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "2Gi"}}
    models = [{"name": "demo", "path": "/app/models/demo"}]
    worker = {"gpus": 1, "replicas": GPUS + 1, "resources": small, "topologySpread": True}
    release = install({"models": models, "worker": worker}, wait=False)
    until(lambda: len(release.pods("worker", "demo")) == GPUS + 1, "the workers' pods")
    until(lambda: sum(bool(pod.node) for pod in release.pods("worker", "demo")) == GPUS, "as many scheduled workers as GPUs")
    pods = release.pods("worker", "demo")
    assert {pod.node for pod in pods} == {node_with_gpus, ""}
    (left,) = [pod.name for pod in pods if not pod.node]
    conditions = release.get("pod", left)["status"]["conditions"]
    assert any("Insufficient nvidia.com/gpu" in each.get("message", "") for each in conditions), conditions
    proved(f"{GPUS + 1} workers with a GPU each, a node with {GPUS} GPUs: {GPUS} workers scheduled there, one waits for a GPU")
