"""Fixtures of the tests on a real Kubernetes, which are collected only if `make cluster-test` sets ROOTSTOCK_CLUSTER_ENV.

Tests with the mark `alone` disturb the whole cluster or measure. Other tests use only their own namespaces and run in parallel.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kubernetes import CHART, BrokenNodes, Cluster, Release
from tests.cluster.spaces import namespace, state_of

HANDLE, PROOF = "ROOTSTOCK_CLUSTER_ENV", "ROOTSTOCK_CLUSTER_PROOF"
UPGRADE_FROM = "CLUSTER_TEST_UPGRADE_FROM"
collect_ignore_glob = [] if os.environ.get(HANDLE) else ["test_*.py"]
if not os.environ.get(UPGRADE_FROM):
    collect_ignore_glob.append("test_long_upgrade.py")
DEMO = CHART / "ci" / "cpu-demo-values.yaml"
BASE = (DEMO, Path(__file__).with_name("little-values.yaml"))
LONGEST_FIRST = ("scaling", "nodes", "admission", "mtls", "diagnosis", "disruptions", "scaling_taken_over", "monitoring")  # files
TEST_S = 900.0  # time limit of a test without its own limit; other tests may run in parallel
Install = Callable[..., Release]
seconds = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: disturbs the whole cluster or measures, so no other test runs at the same time")
    config.addinivalue_line("markers", "local: needs a local cluster; deselected on an existing cluster")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sets time limits, starts long files first, and deselects tests with the mark `local` on an existing cluster."""
    mine = [item for item in items if item.nodeid.startswith("tests/cluster/")]
    for item in mine:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S))
    order = {f"test_{name}.py": place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    if mine and not json.loads(os.environ[HANDLE])["local"]:
        elsewhere = [item for item in mine if item.get_closest_marker("local")]
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in elsewhere]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the namespace's state to a failed test, and writes the result for the page of the run.

    A skipped test is reported as failed, because a run with a cluster must not skip tests.
    """
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"{report.nodeid} was skipped: {report.longrepr}"
    if report.failed and isinstance(item, pytest.Function) and isinstance(cluster := item.funcargs.get("cluster"), Cluster):
        releases = [each.namespace for each in item.funcargs.values() if isinstance(each, Release)]
        for space in {*releases, *filter(None, [str(item.funcargs.get("space", ""))])}:
            report.sections.append((f"namespace {space}", state_of(cluster, space)))
    took_s = item.stash.get(seconds, 0.0) + report.duration
    item.stash[seconds] = took_s
    if report.when == "call" or (report.when == "setup" and report.failed):
        _write(item, outcome=report.outcome)
    if report.when == "teardown":
        _write(item, seconds=round(took_s), **({"outcome": report.outcome} if report.failed else {}))
    return report


def _write(item: pytest.Item, **what: Any) -> None:
    """Appends a JSON line with the test and these fields to the file from which the page of the run is made."""
    if path := os.environ.get(PROOF):
        entry = {"test": item.nodeid.partition("::")[2], "file": item.path.name, **what}
        with Path(path).open("a") as file:
            file.write(json.dumps(entry) + "\n")


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster that `python -m tests.cluster` has started."""
    handle = json.loads(os.environ[HANDLE])
    return Cluster(handle["env"], handle["local"], tuple(handle["addons"]))


def space_name(*names: str) -> str:
    """Returns a name for a namespace, of at most 50 characters."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower().removeprefix("test_"))[:50].strip("-")


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """The test's own namespace with restricted Pod Security. It is deleted after the test."""
    with namespace(cluster, space_name(request.node.name)) as made:
        yield made


@pytest.fixture
def install(cluster: Cluster, space: str) -> Install:
    """install(values, wait): installs the demo model in the test's namespace and returns the release."""

    def start(values: dict[str, Any] | None = None, wait: bool = True) -> Release:
        release = Release(cluster, "rootstock", space, BASE)
        release.install(values or {}, wait)
        return release

    return start


@pytest.fixture
def broken_nodes(cluster: Cluster) -> Iterator[BrokenNodes]:
    """Breaks nodes for a test and repairs them after it."""
    nodes = BrokenNodes(cluster)
    yield nodes
    nodes.mend()


@pytest.fixture
def proved(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """proved(line): prints a test's result and adds it to the page of the run."""

    def write(line: str) -> None:
        print(line)
        _write(request.node, line=line)

    return write
