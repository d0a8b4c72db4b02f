"""An autoscaler that is switched on for a running release keeps the current number of workers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from tests.cluster.conftest import Install
from tests.cluster.kubernetes import CHART, Cluster, until
from tests.cluster.load import load_on
from tests.cluster.test_scaling import keda
from tests.cluster.values import FAKE, MONITORED

CHECKS = 12  # checks of the number of replicas, one per second


@pytest.fixture(scope="module", autouse=True)
def engine(cluster: Cluster) -> None:
    if cluster.local:
        cluster.addon("prometheus", "keda")


@pytest.mark.parametrize("engine_name", ["keda", "hpa"])
def test_autoscaler_keeps_replicas_when_switched_on(install: Install, engine_name: str, proved: Callable[[str], None]) -> None:
    """Switches the autoscaler on under load. No worker may be removed, so no request fails."""
    release = install({"worker": {"replicas": 3, "settings": FAKE}, "monitoring": MONITORED})
    values = keda() if engine_name == "keda" else keda(minReplicas=1) | {"autoscaling": {"engine": "hpa"}}
    values["worker"] |= {"settings": FAKE}
    values["worker"]["autoscaling"]["scaleDownSeconds"] = 120
    seen: set[int] = set()
    with load_on(release, 4) as load:
        until(lambda: load.ended > 4, "the first completed requests")
        release.install(values)
        for _ in range(CHECKS):
            seen.add(release.replicas("worker", "demo"))
            time.sleep(1)
    assert seen == {3}
    proved(f"{engine_name} switched on over 3 workers: always 3; {load.check()}")


def test_server_side_apply_in_two_steps_keeps_the_replicas(install: Install, proved: Callable[[str], None]) -> None:
    """Follows docs/how-to/kubernetes/autoscaling.md. Without the first step, Kubernetes would set the replicas to 1."""
    release = install({"worker": {"replicas": 3, "settings": FAKE}})
    name = release.object_name("worker", "demo")
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {"replicas": 3}}
    release.kubectl(
        "apply", "--server-side", "--force-conflicts", "--field-manager=autoscaler", "-f", "-", given=json.dumps(owner)
    )
    values = {"worker": {"settings": FAKE, "autoscaling": {"enabled": True, "minReplicas": 1}}}
    files = [word for path in release.base for word in ("-f", str(path))]
    version = release.cluster.get("--raw", "/version")["gitVersion"]
    template = ["template", release.name, str(CHART), "-n", release.namespace, "--kube-version", version, *files, "-f", "-"]
    rendered = release.cluster.helm(*template, "--no-hooks", given=json.dumps(values))
    release.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=rendered)
    for _ in range(CHECKS):
        assert release.replicas("worker", "demo") == 3
        time.sleep(1)
    proved("helm template and server-side apply, HPA switched on over 3 workers: always 3")
