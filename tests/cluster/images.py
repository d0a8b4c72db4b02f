"""The images that a cluster without a registry is given: ours by buildah from the Dockerfile as it is, and a Redis."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.kubernetes import CHART, ROOT, run

SERVICES = ("gateway", "tokenizer", "detokenizer", "worker")  # targets of docker/Dockerfile: all but that for GPUs
DOCKERFILE = "docker/Dockerfile"
REGISTRY = "localhost"  # of cpu-demo-values.yaml: for images that are loaded into the nodes
REDIS_PROGRAMS = ("redis-server", "redis-cli", "sh", "grep", "mv", "touch", "tail")  # what the chart and its values files call


def release() -> str:
    found = re.search(r'^appVersion: "(.+)"$', (CHART / "Chart.yaml").read_text(), re.M)
    assert found
    return found[1]


def redis_image(component: str = "redis") -> str:
    """That of the index, or of the store of `state`."""
    wanted = rf"^{component}:.*?image: \{{.*?repository: (\S+), tag: (\S+?)[,}}]"
    found = re.search(wanted, (CHART / "values.yaml").read_text(), re.M | re.S)
    assert found
    return f"docker.io/{found[1] if '/' in found[1] else f'library/{found[1]}'}:{found[2]}"


@dataclass(frozen=True)
class Built:
    """archive: in docker's layout. seconds: that it took."""

    name: str
    archive: Path
    seconds: float


def base() -> str:
    """The name that FROM asks for."""
    found = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / DOCKERFILE).read_text(), re.M)
    assert found
    return f"docker.io/library/{found[1]}"


def has_base() -> bool:
    """Layers that were built on it before are good for as long as it stays."""
    return subprocess.run(["buildah", "inspect", "--type", "image", base()], capture_output=True, check=False).returncode == 0


def build(service: str, folder: Path) -> Built:
    """What else runs on this machine comes first."""
    begun = time.monotonic()
    name, archive = f"rootstock/{service}:{release()}", folder / f"{service}.tar"
    archive.unlink(missing_ok=True)
    env, mildly = {"BUILDAH_ISOLATION": "chroot"}, ("nice", "-n", "5", "buildah")
    fixed = ["--layers", "--pull-never", "--network=host", *_wheel_folders()]
    arguments = _torch_index() if service == "worker" else []
    command = [*mildly, "bud", *fixed, "-f", DOCKERFILE, "--target", service, *arguments, "-t", name, str(ROOT)]
    run(*command, env=env, limit_s=1800)
    run(*mildly, "push", f"localhost/{name}", f"docker-archive:{archive}:{REGISTRY}/{name}", env=env)
    return Built(name, archive, time.monotonic() - begun)


def _torch_index() -> list[str]:
    """ROOTSTOCK_TEST_TORCH_INDEX_URL: a URL, a folder of wheels, or nothing, which asks none but pip's own. Where that is not
    said and torch's wheel lies in a folder, none is asked either: one that is not reached costs minutes."""
    index = os.environ.get("ROOTSTOCK_TEST_TORCH_INDEX_URL")
    if index is None:
        if not any(any(Path(folder).glob("torch-*.whl")) for folder in _folders()):
            return []
        index = ""
    return ["--build-arg", f"TORCH_INDEX_URL={f'file://{index}' if os.path.isdir(index) else index}"]


def _wheel_folders() -> list[str]:
    """Where pip of this machine takes wheels from folders, builds see them too."""
    return [word for folder in _folders() for word in ("--volume", f"{folder}:{folder}:ro")]


def _folders() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
    )
    return [word for word in done.stdout.split() if os.path.isdir(word)]


def redis_archives(cluster: str, folder: Path) -> list[Path]:
    """This machine's own by the names of the chart's, with the libraries that it takes, by the local cluster's command."""
    files: dict[str, str] = {}
    for program in REDIS_PROGRAMS:
        path = shutil.which(program)
        assert path, f"{program} is not on PATH"
        into = f"/usr/local/bin/{program}" if program.startswith("redis") else f"/bin/{program}"
        files[os.path.realpath(path)] = into
        for library in re.findall(r"(/\S+) \(0x", run("ldd", path)):
            files[os.path.realpath(library)] = library
    flags = [word for origin, target in files.items() for word in ("--file", f"{origin}={target}")]
    archives = [folder / "redis.tar", folder / "state.tar"]
    for archive in archives:
        archive.unlink(missing_ok=True)
        image = redis_image(archive.stem)
        run(cluster, "image", image, str(archive), *flags, "--entrypoint", "/usr/local/bin/redis-server")
    return archives
