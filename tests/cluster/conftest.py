"""Tests on a real Kubernetes. `make cluster-test` starts it, with ROOTSTOCK_CLUSTER_ENV, and has them collected."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kubernetes import CHART, BrokenNodes, Cluster, Release, namespace

HANDLE, PROOF = "ROOTSTOCK_CLUSTER_ENV", "ROOTSTOCK_CLUSTER_PROOF"
collect_ignore_glob = [] if os.environ.get(HANDLE) else ["test_*.py"]
BASE = (CHART / "ci" / "cpu-demo-values.yaml",)
Install = Callable[..., Release]


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """As `python -m tests.cluster` has started it."""
    told = json.loads(os.environ[HANDLE])
    return Cluster(told["env"], told["local"])


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A restricted namespace of the test's own. It goes with the test."""
    name = request.node.name.partition("[")[0].removeprefix("test_").replace("_", "-")[:40].strip("-")
    with namespace(cluster, name) as made:
        yield made


@pytest.fixture
def install(cluster: Cluster, space: str) -> Install:
    """install(values): a release of the demo model in the test's namespace."""

    def start(values: dict[str, Any] | None = None, wait: bool = True) -> Release:
        release = Release(cluster, "rootstock", space, BASE)
        release.install(values or {}, wait)
        return release

    return start


@pytest.fixture
def broken_nodes(cluster: Cluster) -> Iterator[BrokenNodes]:
    """They are whole again after the test."""
    if not cluster.local and not os.environ.get("CLUSTER_TEST_DISRUPT"):
        pytest.fail("a cluster that is somebody's is broken only with CLUSTER_TEST_DISRUPT=1")
    nodes = BrokenNodes(cluster)
    yield nodes
    nodes.mend()


@pytest.fixture
def proved(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """proved(line): what has happened, for the page that the run writes."""

    def write(line: str) -> None:
        print(line)
        path = os.environ.get(PROOF)
        if path:
            entry = {"test": request.node.nodeid.partition("::")[2], "file": Path(str(request.node.path)).name, "line": line}
            with Path(path).open("a") as file:
                file.write(json.dumps(entry) + "\n")

    return write
