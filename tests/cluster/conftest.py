"""Tests on a real Kubernetes. `make cluster-test` starts it, with ROOTSTOCK_CLUSTER_ENV, and has them collected.

Those that are marked `alone` disturb the whole cluster, or measure; the others keep to namespaces of their own, some at a time.
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
collect_ignore_glob = [] if os.environ.get(HANDLE) else ["test_*.py"]
DEMO = CHART / "ci" / "cpu-demo-values.yaml"
BASE = (DEMO, Path(__file__).with_name("little-values.yaml"))
LONGEST_FIRST = ("scaling", "nodes", "admission", "mtls", "diagnosis", "disruptions", "scaling_taken_over", "monitoring")  # files
TEST_S = 900.0  # of a test that says nothing else: others may run beside it
Install = Callable[..., Release]
seconds = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: disturbs the whole cluster, or measures: nothing else runs beside it")
    config.addinivalue_line("markers", "local: does what only a cluster takes that the tests have started; no other is asked")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests on a cluster; others may be collected beside them."""
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
    """A test that fails is told with what there is in its namespace; a skip fails, for a cluster was asked for."""
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
    """A line of what the run's page is made of."""
    if path := os.environ.get(PROOF):
        entry = {"test": item.nodeid.partition("::")[2], "file": item.path.name, **what}
        with Path(path).open("a") as file:
            file.write(json.dumps(entry) + "\n")


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """As `python -m tests.cluster` has started it."""
    told = json.loads(os.environ[HANDLE])
    return Cluster(told["env"], told["local"], tuple(told["addons"]))


def space_name(*names: str) -> str:
    """Of a namespace."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower().removeprefix("test_"))[:50].strip("-")


@pytest.fixture
def space(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A restricted namespace of the test's own. It goes with the test."""
    with namespace(cluster, space_name(request.node.name)) as made:
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
    nodes = BrokenNodes(cluster)
    yield nodes
    nodes.mend()


@pytest.fixture
def proved(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """proved(line): what has happened, for the page that the run writes."""

    def write(line: str) -> None:
        print(line)
        _write(request.node, line=line)

    return write
