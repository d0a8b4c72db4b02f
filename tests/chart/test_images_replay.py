"""Tests each image: replays its build into a folder, and runs its service with only the files of the image.

By day, the worker's image is not built, and the packages of gateway, tokenizer and detokenizer are copied from this environment.
With ROOTSTOCK_TEST_NIGHTLY=1, pip installs the packages, and the worker's image is built too. ROOTSTOCK_TEST_TORCH_INDEX_URL then
sets the build argument TORCH_INDEX_URL: a URL, a folder of wheels, or "" for pip's default index.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.local.reference import SERVICES
from tests.chart.copied_packages import copy_packages
from tests.chart.dockerfile import read
from tests.chart.image_build import Builder, Image
from tests.night import NIGHTLY

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker/Dockerfile"
FRONT = ["gateway", "tokenizer", "detokenizer"]
START_S = 120


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Returns the builder of the images without torch. Only nightly runs install the packages by pip, which takes long."""
    dockerfile, work = read(DOCKERFILE), tmp_path_factory.mktemp("service")
    return Builder(dockerfile, ROOT, work) if NIGHTLY else Builder(dockerfile, ROOT, work, instead=copy_packages)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    arguments, folder = torch_index(os.environ.get("ROOTSTOCK_TEST_TORCH_INDEX_URL"))
    dockerfile, work = read(DOCKERFILE, arguments), tmp_path_factory.mktemp("worker")
    with pytest.MonkeyPatch.context() as patch:
        if folder:
            patch.setenv("PIP_FIND_LINKS", folder, prepend=" ")
        yield Builder(dockerfile, ROOT, work)


def torch_index(asked: str | None) -> tuple[dict[str, str], str]:
    """Returns the build arguments, and the path of a folder with additional wheels or "".

    Args:
        asked: value of ROOTSTOCK_TEST_TORCH_INDEX_URL; None keeps the Dockerfile's default.
    """
    if asked is None:
        return {}, ""
    folder = asked if os.path.isdir(asked) else ""
    return {"TORCH_INDEX_URL": "" if folder else asked}, folder


def environment(image: Image, python: Path, tmp: Path, ports: dict[str, int]) -> dict[str, str]:
    """Returns the image's environment variables with this machine's paths. The PATH has no compiler."""
    settings = {f"ROOTSTOCK_{name.upper()}": str(port) for name, port in ports.items()}
    return {
        **{key: image.here(value) for key, value in image.env.items()},
        "PATH": str(python.parent),
        "HOME": str(tmp),
        **settings,
    }


@contextmanager
def running(
    service: str, image: Image, python: Path, tmp: Path, **settings: str
) -> Iterator[tuple[list[str], dict[str, str], Path]]:
    """Runs the image's entry point as a process on free ports. Yields its health check, its environment and its log."""
    names = [name for name in SERVICES[service].model_fields if name in ("port", "health_port", "metrics_port")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    env = environment(image, python, tmp, ports) | {f"ROOTSTOCK_{name.upper()}": value for name, value in settings.items()}
    own = SERVICES[service].model_fields
    probe = [_with_port(word, {own[name].default: port for name, port in ports.items()}) for word in image.healthcheck]
    log = tmp / f"{service}.log"
    command = [str(python), *image.entrypoint[1:]]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=image.place("."), env=env, stdout=sink, stderr=sink)
    try:
        yield [str(python), *probe[1:]], env, log
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def _with_port(word: str, ports: dict[int, int]) -> str:
    host, _, port = word.rpartition(":")
    return f"{host}:{ports[int(port)]}" if host == HOST else word


def healthy(probe: list[str], env: dict[str, str], folder: Path, log: Path) -> bool:
    deadline = time.monotonic() + START_S
    while True:
        done = subprocess.run(probe, cwd=folder, env=env, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0:
            return True
        assert done.returncode == 1 and done.stderr, f"a failing probe must print the reason and exit with 1: {done}"
        assert time.monotonic() < deadline, f"{done.stderr}\n{log.read_text()}"
        time.sleep(0.3)


@pytest.mark.parametrize("service", FRONT)
def test_service_runs_from_its_image(service: str, front: Builder, tmp_path: Path) -> None:
    image = front.build(service)
    python = image.place("/opt/venv/bin/python")
    others = {"gateway": {}, "tokenizer": {"model": "models/demo"}, "detokenizer": {"model": "models/demo"}}
    with running(service, image, python, tmp_path, **others[service]) as (probe, env, log):
        assert healthy(probe, env, image.place("."), log)


def test_service_image_lacks_worker_packages(front: Builder) -> None:
    python = front.build("gateway").place("/opt/venv/bin/python")
    heavy = (
        "torch",
        "triton",
        "transformers",
        "xgrammar",
        "grpc_tools",
        "pip",
        "rootstock_llm.services.worker",
        "rootstock_llm.kernels",
    )
    code = f"import importlib.util as u; print([n for n in {heavy!r} if u.find_spec(n)])"
    done = subprocess.run(
        [python, "-c", code], cwd=front.build("gateway").place("."), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("service", FRONT)
def test_service_image_has_only_its_own_service(service: str, front: Builder) -> None:
    folders = {path.name for path in front.build(service).place("rootstock_llm/services").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == {service, "shared"}


def test_image_has_bytecode_of_every_source(front: Builder) -> None:
    app = front.build("gateway").place("/app")
    sources = [*app.glob("rootstock_llm/services/*/**/*.py"), *app.glob("rootstock_llm/protos/*.py")]
    assert len(sources) > 50
    for source in sources:
        assert list((source.parent / "__pycache__").glob(f"{source.stem}.cpython-*.pyc")), source


def test_replayed_build_skips_only_the_listed_commands(front: Builder) -> None:
    front.build("gateway")
    assert [text.split()[0] for text in front.skipped] == ["python", "groupadd"]


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        (None, ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]),
        ("", []),
        ("https://mirror.example/whl", ["--extra-index-url", "https://mirror.example/whl"]),
        (str(ROOT), []),
    ],
    ids=["the default", "none", "another", "a folder"],
)
def test_pip_gets_the_torch_index_option_only_when_the_build_argument_is_set(
    asked: str | None, options: list[str], tmp_path: Path
) -> None:
    """Runs the build step with a pip that prints its arguments."""
    arguments, folder = torch_index(asked)
    assert folder == (asked if asked == str(ROOT) else "")
    stage = read(DOCKERFILE, arguments).stage("cpu-libraries")
    (step,) = [each.text for each in stage.all("RUN") if "worker-cpu.txt" in each.text]
    (tmp_path / "pip").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    env = {"PATH": str(tmp_path), **dict(each.text.split("=", 1) for each in stage.all("ARG"))}
    output = subprocess.run(["/bin/sh", "-euc", step], env=env, capture_output=True, text=True, check=True).stdout.split()
    expected = ["--python", "/opt/venv/bin/python", "install", "--no-deps", "--prefix", "/opt/worker", *options, "--requirement"]
    assert output[: len(expected)] == expected


@pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1")
def test_worker_runs_from_its_image(worker: Builder, tmp_path: Path) -> None:
    image = worker.build("worker")
    python = image.place("/opt/venv/bin/python")
    with running("worker", image, python, tmp_path, max_total_tokens="4096", num_threads="1") as (probe, env, log):
        healthy([*probe, "--service", "worker"], env, image.place("."), log)
        assert "plain torch" not in log.read_text(), "the image's kernels were not used"
    assert not (tmp_path / ".cache").exists(), "kernels were built at start"
