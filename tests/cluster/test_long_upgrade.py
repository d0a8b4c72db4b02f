"""A rolling upgrade under load from the chart and the images of another commit: CLUSTER_TEST_UPGRADE_FROM=COMMIT."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.cluster.conftest import BASE, DEMO, UPGRADE_FROM
from tests.cluster.connections import known
from tests.cluster.images import checkout, tag_of
from tests.cluster.kubernetes import CHART, ROOT, Cluster, Release, until
from tests.cluster.load import load_on
from tests.cluster.pulls import METRICS_OPEN
from tests.cluster.test_disruptions import names
from tests.cluster.values import TWO

STREAMS = 24


def test_streams_survive_an_upgrade_from_another_commit(
    cluster: Cluster, space: str, tmp_path: Path, proved: Callable[[str], None]
) -> None:
    commit, chart = os.environ[UPGRADE_FROM], CHART.relative_to(ROOT)
    old = checkout(commit, tmp_path / "old", str(chart), "tests/cluster") / chart
    values = {**TWO, "drainSeconds": 20, "networkPolicy": METRICS_OPEN}
    release = Release(cluster, "rootstock", space, BASE)
    before = replace(release, chart=old, base=(old / DEMO.relative_to(CHART), *BASE[1:]))
    before.install({**values, "image": {"tag": tag_of(commit)}})
    until(lambda: known(release), "all gateways to be connected to all services")
    pods = names(release)
    with load_on(release, STREAMS) as load:
        until(lambda: load.ended >= STREAMS, "the first completed requests")
        release.install(values)
        until(lambda: not pods & names(release), "the old pods to end")
        ended = load.ended
        until(lambda: load.ended >= ended + 2 * STREAMS, "completed requests afterwards")
    proved(f"upgraded from {commit} under {STREAMS} streams: {load.check()}")
