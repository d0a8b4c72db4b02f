"""python -m tests.cluster [ARGUMENTS OF PYTEST]: runs tests on a Kubernetes cluster, either a new local one or an existing one.

Local cluster:

- CLUSTER names a command that starts and stops the cluster. tests/cluster/kubernetes.py lists the actions of the command.
- CLUSTER_TEST_NODES is the number of nodes, by default 2. test_long_far_pools.py needs 3.
- BASE_IMAGE names a command that makes the base image if it is missing. The variable is needed only without an image registry.
- CLUSTER_TEST_UPGRADE_FROM names a commit for test_long_upgrade.py. The images of this commit are built too.

Existing cluster:

- CLUSTER_TEST_KUBECONFIG names the cluster's kubeconfig.
- CLUSTER_TEST_LOAD names a command that loads an image archive into the cluster.
- Tests that disturb the whole cluster run only with CLUSTER_TEST_DISRUPT=1.

Buildah builds the images of docker/Dockerfile while the cluster starts. As root, apt-get installs missing Debian packages. A run
without arguments has two passes. First, tests that use only their own namespaces run in parallel (CLUSTER_TEST_LANES, default 3).
Then tests that disturb the cluster or measure run in sequence. Then docs/reference/kubernetes gets proof.md and proof.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.cluster import images, packages, proof
from tests.cluster.conftest import HANDLE, PROOF, UPGRADE_FROM
from tests.cluster.kubernetes import ROOT, Cluster, run, start, until

NODES = int(os.environ.get("CLUSTER_TEST_NODES", "2"))
ADDONS = ("prometheus", "metrics-server", "keda")  # installed at the start of a whole run
IN_ORDER = ("--no-loadscope-reorder", "--max-worker-restart=0")
WHOLE = ("tests/cluster", "--ignore-glob=*/test_long_*")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "asked",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENT",
        help="arguments of pytest; without any, all tests run except test_long_*",
    )
    asked: list[str] = parser.parse_args().asked
    local, kubeconfig = os.environ.get("CLUSTER", ""), os.environ.get("CLUSTER_TEST_KUBECONFIG", "")
    if not local and not kubeconfig:
        sys.exit("set CLUSTER=COMMAND or CLUSTER_TEST_KUBECONFIG=FILE to select a cluster (tests/cluster/__main__.py)")
    packages.provide(local=bool(local))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rootstock-cluster-") as name:
        folder, record = Path(name), proof.Proof()
        lines = folder / "proof.jsonl"
        try:
            cluster = _cluster(local, kubeconfig, folder, record, () if asked else ADDONS)
            record.versions(cluster)
            record.ready(time.monotonic() - begun)
            status = _test(cluster, asked, lines) if asked else _test_whole(cluster, lines)
        finally:
            if local:
                run(local, "down")
        if not asked:
            record.write(ROOT / "docs" / "reference" / "kubernetes", lines, time.monotonic() - begun, status)
    return status


def _cluster(local: str, kubeconfig: str, folder: Path, record: proof.Proof, addons: Sequence[str]) -> Cluster:
    """Starts or finds the cluster and loads all images into it. The images are built while the cluster starts."""
    base_image = os.environ.get("BASE_IMAGE", "")
    if base_image and not images.has_base():
        run(base_image, limit_s=1800)
    pool = ThreadPoolExecutor(1)
    try:
        building = [pool.submit(images.build, service, folder) for service in images.SERVICES]
        if commit := os.environ.get(UPGRADE_FROM):
            old = images.checkout(commit, folder / "old")
            building += [pool.submit(images.build, service, folder, old, images.tag_of(commit)) for service in images.SERVICES]
        cluster = _local(local, folder, addons) if local else Cluster({"KUBECONFIG": kubeconfig, "PATH": os.environ["PATH"]})
        load = [local, "load"] if local else [os.environ.get("CLUSTER_TEST_LOAD", "")]
        for built in building:
            _load(built, record, load)
    finally:
        pool.shutdown(cancel_futures=True)
    return cluster


def _load(built: Future[images.Built], record: proof.Proof, load: list[str]) -> None:
    image = built.result()
    record.built(image.name, image.archive.stat().st_size, image.seconds)
    if load[0]:
        run(*load, str(image.archive))


def _local(command: str, folder: Path, addons: Sequence[str]) -> Cluster:
    soon = "--controllers-flag=--horizontal-pod-autoscaler-sync-period=5s"
    flags = ["--policies", soon, "--apiserver-flag=--feature-gates=ImageVolume=true"]
    cluster = start(command, NODES, flags)
    run(command, "load", *map(str, images.redis_archives(command, folder)))
    cluster.addon(*addons)
    return Cluster(cluster.env, command, tuple(addons))


def _test_whole(cluster: Cluster, lines: Path) -> int:
    """Runs the first pass and, if the cluster may be disturbed, the second pass. Returns the first exit status that is not 0."""
    lanes = os.environ.get("CLUSTER_TEST_LANES", "3")
    beside = _test(cluster, [*WHOLE, "-m", "not alone", "-n", lanes, "--dist", "loadfile", *IN_ORDER], lines)
    if not cluster.local and not os.environ.get("CLUSTER_TEST_DISRUPT"):
        print("tests that disturb the whole cluster are skipped; set CLUSTER_TEST_DISRUPT=1 to run them", flush=True)
        return beside
    _settle(cluster)
    alone = _test(cluster, [*WHOLE, "-m", "alone"], lines)  # runs even if the first pass has failed
    return beside or alone


def _settle(cluster: Cluster) -> None:
    """Waits up to 120 s until the namespaces of earlier tests are deleted, because measurements need an idle machine."""

    def is_quiet() -> bool:
        return all(each["status"]["phase"] == "Active" for each in cluster.get("namespaces")["items"])

    try:
        until(is_quiet, "the end of earlier tests' namespaces", 120)
    except AssertionError as error:
        print(error, flush=True)


def _test(cluster: Cluster, asked: Sequence[str], lines: Path) -> int:
    handle = {"env": dict(cluster.env), "local": cluster.local, "addons": cluster.addons}
    env = {**os.environ, HANDLE: json.dumps(handle), PROOF: str(lines)}
    return subprocess.run([sys.executable, "-m", "pytest", *asked], cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
