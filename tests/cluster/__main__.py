"""python -m tests.cluster [ARGUMENTS OF PYTEST]: tests on a real Kubernetes, begun and ended here.

CLUSTER names a command that starts one on this machine (tests/cluster/kubernetes.py says what it must do), BASE_IMAGE another one
that is run where no image registry is reached. Images are built from docker/Dockerfile by buildah. Or CLUSTER_TEST_KUBECONFIG
names the kubeconfig of one that is there, and CLUSTER_TEST_LOAD a command that gives it an archive; no node of it is touched.
Of a whole run it writes docs/kubernetes/proof.md, and proof.json beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster import images, proof
from tests.cluster.conftest import HANDLE, PROOF
from tests.cluster.kubernetes import ROOT, Cluster, run, start

NODES = 2
PROGRAMS = ("buildah", "redis-server")
TOOLS = ("helm", "kubectl")  # which a local cluster brings along


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "asked", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="of pytest; none: all but test_long_*, and their page"
    )
    asked: list[str] = parser.parse_args().asked
    local, base_image = os.environ.get("CLUSTER", ""), os.environ.get("BASE_IMAGE", "")
    kubeconfig = os.environ.get("CLUSTER_TEST_KUBECONFIG", "")
    if not local and not kubeconfig:
        sys.exit("say which cluster: CLUSTER=COMMAND or CLUSTER_TEST_KUBECONFIG=FILE (tests/cluster/__main__.py)")
    programs = PROGRAMS if local else (*PROGRAMS, *TOOLS)
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        sys.exit(f"not on PATH: {', '.join(missing)} (buildah and redis-server are Debian's packages)")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rootstock-cluster-") as name:
        folder, told = Path(name), proof.Proof()
        if base_image:
            run(base_image)
        archives = []
        for image, archive, seconds in images.build_all(folder):
            told.built(image, archive.stat().st_size, seconds)
            archives.append(archive)
        cluster = _local(local, folder, archives) if local else _other(kubeconfig, archives)
        try:
            told.versions(cluster)
            status = _test(cluster, asked or ["tests/cluster", "--ignore-glob=*/test_long_*"], folder / "proof.jsonl")
        finally:
            if local:
                run(local, "down")
        if not asked:
            told.write(ROOT / "docs" / "kubernetes", folder / "proof.jsonl", time.monotonic() - begun, status)
    return status


def _local(command: str, folder: Path, archives: list[Path]) -> Cluster:
    soon = "--controllers-flag=--horizontal-pod-autoscaler-sync-period=5s"
    flags = ["--policies", soon, "--apiserver-flag=--feature-gates=ImageVolume=true"]
    cluster = start(command, NODES, flags)
    run(command, "load", *map(str, archives), *map(str, images.redis_archives(command, folder)))
    return cluster


def _other(kubeconfig: str, archives: list[Path]) -> Cluster:
    load = os.environ.get("CLUSTER_TEST_LOAD", "")
    for archive in archives if load else ():
        run(load, str(archive))
    return Cluster({"KUBECONFIG": kubeconfig, "PATH": os.environ["PATH"]})


def _test(cluster: Cluster, asked: list[str], lines: Path) -> int:
    env = {HANDLE: json.dumps({"env": dict(cluster.env), "local": cluster.local}), PROOF: str(lines)}
    return subprocess.run([sys.executable, "-m", "pytest", *asked], cwd=ROOT, env={**os.environ, **env}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
