"""The images that a cluster without a registry is given: ours by buildah from the Dockerfile as it is, and a Redis."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.kubernetes import CHART, ROOT, run

FRONT = ("gateway", "tokenizer", "detokenizer")
REDIS_PROGRAMS = ("redis-server", "redis-cli", "sh", "grep", "touch", "tail")  # what the chart and its values files call


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


def build_all(folder: Path) -> Iterator[tuple[str, Path, float]]:
    """(image, archive, seconds) of each of ours but that for GPUs."""
    for service in FRONT:
        yield _build(service, [], folder)
    arguments: list[str] = []
    index = os.environ.get("ROOTSTOCK_TEST_TORCH_INDEX_URL")
    if index is not None:
        arguments += ["--build-arg", f"TORCH_INDEX_URL={f'file://{index}' if os.path.isdir(index) else index}"]
    yield _build("worker", arguments, folder)


def _build(service: str, arguments: list[str], folder: Path) -> tuple[str, Path, float]:
    begun = time.monotonic()
    name, archive = f"rootstock/{service}:{release()}", folder / f"{service}.tar"
    archive.unlink(missing_ok=True)
    env = {"BUILDAH_ISOLATION": "chroot"}
    fixed = ["--layers", "--pull-never", "--network=host", *_wheel_folders()]
    command = ["buildah", "bud", *fixed, "-f", "docker/Dockerfile", "--target", service, *arguments, "-t", name, str(ROOT)]
    run(*command, env=env, limit_s=1800)
    run("buildah", "push", f"localhost/{name}", f"docker-archive:{archive}:docker.io/{name}", env=env)
    return name, archive, time.monotonic() - begun


def _wheel_folders() -> list[str]:
    """Where pip of this machine takes wheels from folders, builds see them too."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
    )
    folders = [word for word in done.stdout.split() if os.path.isdir(word)]
    return [word for folder in folders for word in ("--volume", f"{folder}:{folder}:ro")]


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
