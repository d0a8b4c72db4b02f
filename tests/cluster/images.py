"""Builds images for a cluster without a registry: the project's by buildah from the unchanged Dockerfile, and a Redis image."""

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

SERVICES = ("gateway", "tokenizer", "detokenizer", "worker")  # targets of docker/Dockerfile except the one for GPUs
DOCKERFILE = "docker/Dockerfile"
REGISTRY = "localhost"  # registry in cpu-demo-values.yaml, for images that are loaded into the nodes
REDIS_PROGRAMS = ("redis-server", "redis-cli", "sh", "grep", "mv", "touch", "tail")  # programs that the chart and its files call


def release() -> str:
    found = re.search(r'^appVersion: "(.+)"$', (CHART / "Chart.yaml").read_text(), re.M)
    assert found
    return found[1]


def redis_image(component: str = "redis") -> str:
    """Returns the name of a Redis image in the chart: the index's by default, the state store's if `component` is `state`."""
    wanted = rf"^{component}:.*?image: \{{.*?repository: (\S+), tag: (\S+?)[,}}]"
    found = re.search(wanted, (CHART / "values.yaml").read_text(), re.M | re.S)
    assert found
    return f"docker.io/{found[1] if '/' in found[1] else f'library/{found[1]}'}:{found[2]}"


@dataclass(frozen=True)
class Built:
    """A built image."""

    name: str
    archive: Path  # in docker's archive format
    seconds: float  # duration of the build


def checkout(commit: str, folder: Path, *paths: str) -> Path:
    """Writes the files of a commit to a new folder and returns the folder.

    Args:
        paths: files and folders to write; all files if no path is given.
    """
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    run("git", "-C", str(ROOT), "archive", "--output", str(archive), commit, *paths)
    shutil.unpack_archive(archive, folder)
    return folder


def tag_of(commit: str) -> str:
    """Returns the tag of the images of a commit."""
    return f"at-{commit}"


def base() -> str:
    """Returns the full name of the base image in the Dockerfile."""
    found = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / DOCKERFILE).read_text(), re.M)
    assert found
    return f"docker.io/library/{found[1]}"


def has_base() -> bool:
    """Whether the base image exists on this machine. Buildah reuses layers only if their base image is unchanged."""
    return subprocess.run(["buildah", "inspect", "--type", "image", base()], capture_output=True, check=False).returncode == 0


def build(service: str, folder: Path, source: Path = ROOT, tag: str = "") -> Built:
    """Builds the image of a service and writes its archive, at a low priority because the cluster starts at the same time.

    Args:
        source: the checkout.
        tag: tag of the image; empty for the version of this checkout.
    """
    begun = time.monotonic()
    name, archive = f"rootstock/{service}:{tag or release()}", folder / f"{service}{tag}.tar"
    archive.unlink(missing_ok=True)
    env, mildly = {"BUILDAH_ISOLATION": "chroot"}, ("nice", "-n", "5", "buildah")
    fixed = ["--layers", "--pull-never", "--network=host", *_wheel_folders()]
    arguments = _torch_index() if service == "worker" else []
    command = [*mildly, "bud", *fixed, "-f", str(source / DOCKERFILE), "--target", service, *arguments, "-t", name, str(source)]
    run(*command, env=env, limit_s=1800)
    run(*mildly, "push", f"localhost/{name}", f"docker-archive:{archive}:{REGISTRY}/{name}", env=env)
    return Built(name, archive, time.monotonic() - begun)


def _torch_index() -> list[str]:
    """Returns buildah flags for torch's package index; no flags for the index in the Dockerfile.

    ROOTSTOCK_TEST_TORCH_INDEX_URL is a URL or a folder of wheels; empty means pip's default index. If the variable is unset and
    one of pip's wheel folders has torch, pip's default index is used too, because an unreachable index costs minutes.
    """
    index = os.environ.get("ROOTSTOCK_TEST_TORCH_INDEX_URL")
    if index is None:
        if not any(any(Path(folder).glob("torch-*.whl")) for folder in _folders()):
            return []
        index = ""
    return ["--build-arg", f"TORCH_INDEX_URL={f'file://{index}' if os.path.isdir(index) else index}"]


def _wheel_folders() -> list[str]:
    """Returns buildah flags that mount the wheel folders of this machine's pip into a build."""
    return [word for folder in _folders() for word in ("--volume", f"{folder}:{folder}:ro")]


def _folders() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
    )
    return [word for word in done.stdout.split() if os.path.isdir(word)]


def redis_archives(cluster: str, folder: Path) -> list[Path]:
    """Builds archives of Redis images from this machine's programs and libraries. The images have the names in the chart."""
    files: dict[str, str] = {}
    for program in REDIS_PROGRAMS:
        path = shutil.which(program)
        assert path, f"the Redis image needs the program {program}, which is not on PATH"
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
