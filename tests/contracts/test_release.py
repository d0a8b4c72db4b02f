"""`python -m release` writes complete artifacts and pushes nothing. In these tests, a fake program builds the images."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from release.__main__ import IMAGES, ROOT, SUMS, ReleaseRefused, build_images, release
from rootstock_llm.services import __version__
from tests.chart.dockerfile import read

WHEEL, CHART = f"rootstock_llm-{__version__}-py3-none-any.whl", f"rootstock-{__version__}.tgz"
# A program that replaces buildah or docker. It records each call, and writes the archive if the call names one.
BUILDER = """#!/bin/sh
echo "$@" >> "$CALLS"
for word in "$@"; do
  case "$word" in
    docker-archive:*) word=${word#docker-archive:}; echo image > "${word%%:*}" ;;
    *.tar) echo image > "$word" ;;
  esac
done
"""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of the working tree without images, built without a network."""
    out = tmp_path_factory.mktemp("release") / "dist"
    command = [sys.executable, "-m", "release", "--out", str(out), "--images", "", "--allow-changes", "--no-build-isolation"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return out


def tracked(*folders: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def test_release_lists_each_artifact_with_a_checksum(artifacts: Path) -> None:
    sums = dict(reversed(line.split("  ")) for line in (artifacts / SUMS).read_text().splitlines())
    assert sums == {name: hashlib.sha256((artifacts / name).read_bytes()).hexdigest() for name in (WHEEL, CHART)}
    assert {path.name for path in artifacts.iterdir()} == {WHEEL, CHART, SUMS}


def test_wheel_has_every_file_of_the_services_and_the_generated_modules(artifacts: Path) -> None:
    with zipfile.ZipFile(artifacts / WHEEL) as wheel:
        names = set(wheel.namelist())
    sources = {f"rootstock_llm/{name}" for name in tracked("services", "kernels") if Path(name).name != "ruff.toml"}
    protos = [Path(name).stem for name in tracked("protos") if name.endswith(".proto")]
    modules = {f"{proto}_{kind}" for proto in protos for kind in ("pb2.py", "pb2.pyi", "pb2_grpc.py")}
    generated = {f"rootstock_llm/protos/{name}" for name in {*modules, "__init__.py"}} | {"rootstock_llm/__init__.py"}
    assert generated and sources and names >= sources | generated
    assert {name.partition("/")[0] for name in names - sources - generated} == {f"rootstock_llm-{__version__}.dist-info"}


def test_wheel_runs_the_client_and_imports_the_services_when_installed(artifacts: Path, tmp_path: Path) -> None:
    """The new environment has this environment's packages except its editable installation of the project."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, str(artifacts / WHEEL)], check=True, timeout=300)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    def output(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True).stdout

    assert output(str(python.with_name("rootstock")), "--help").startswith("usage: rootstock ")
    modules = ("rootstock_llm.services.gateway.gateway", "rootstock_llm.protos.worker_pb2")
    code = "; ".join(f"import {name}; print(sys.modules[{name!r}].__file__)" for name in modules)
    assert all(Path(path).is_relative_to(site) for path in output(str(python), "-c", f"import sys; {code}").splitlines())


def test_chart_package_has_the_charts_files_without_generators(artifacts: Path) -> None:
    with tarfile.open(artifacts / CHART) as archive:
        names = set(archive.getnames())
    assert {"rootstock/Chart.yaml", "rootstock/values.yaml", "rootstock/values.schema.json"} <= names
    assert not [name for name in names if "/ci/" in name]
    assert not [name for name in names if name.endswith(".py") and not name.startswith("rootstock/scripts/")]


@pytest.mark.parametrize("program", ["buildah", "docker"])
def test_images_are_written_to_archives_and_pushed_to_no_registry(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, calls, out = tmp_path / "bin" / program, tmp_path / "calls", tmp_path / "out"
    out.mkdir()
    stub.parent.mkdir()
    stub.write_text(BUILDER)
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:/bin" if program == "buildah" else f"{stub.parent}:{without_buildah()}")
    monkeypatch.setenv("CALLS", str(calls))
    build_images(ROOT, out, [*IMAGES, "worker-cuda"], "abc123", ["PIP_INDEX_URL=https://pypi.example"])
    lines = calls.read_text().splitlines()
    built = [line for line in lines if line.startswith("build ")]
    assert [line.split()[line.split().index("--target") + 1] for line in built] == [*IMAGES, "worker-cuda"]
    stages = {stage.name for stage in read(ROOT / "docker" / "Dockerfile").stages}
    assert {*IMAGES, "worker-cuda"} <= stages
    wanted = (
        f"--build-arg VERSION={__version__} ",
        "--build-arg REVISION=abc123 ",
        "--build-arg PIP_INDEX_URL=https://pypi.example ",
    )
    assert all(argument in line for line in built for argument in wanted)
    assert not [line for line in lines if line.startswith("push ") and " docker-archive:" not in line]
    tags = [*(f"{name}-{__version__}" for name in IMAGES), f"worker-{__version__}-cuda"]
    assert {path.name for path in out.iterdir()} == {f"rootstock-{tag}.tar" for tag in tags}


def without_buildah() -> str:
    """Returns PATH without the folders that contain buildah."""
    return os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if not (Path(each) / "buildah").exists())


@pytest.mark.parametrize(
    ("words", "flags"), [((), ""), (("IMAGES=gateway worker",), "--images 'gateway worker'"), (("IMAGES=",), "--images ''")]
)
def test_make_release_builds_all_images_unless_others_are_given(words: tuple[str, ...], flags: str) -> None:
    command = ["make", "--no-print-directory", "-n", "release", *words]
    around = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    printed = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1].partition("--out 'dist'")[2].strip() == flags


def test_release_refuses_an_output_folder_that_has_files(tmp_path: Path) -> None:
    (tmp_path / "old.whl").write_text("")
    with pytest.raises(ReleaseRefused, match=r"is not empty\. Remove its files"):
        release(tmp_path, (), (), isolated=False, allow_changes=True)


def test_release_refuses_uncommitted_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, out = tmp_path / "repository", tmp_path / "out"
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    (repository / "new.py").write_text("")
    monkeypatch.setattr("release.__main__.ROOT", repository)
    with pytest.raises(ReleaseRefused, match="uncommitted changes"):
        release(out, (), (), isolated=False, allow_changes=False)
    assert not out.exists()
