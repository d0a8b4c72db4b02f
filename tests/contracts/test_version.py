"""The wheel, the chart, the images and the command-line client have the version in `services.__version__`."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from rootstock_llm.services import __version__

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/tutorials/first-cluster.md", "docs/how-to/kubernetes/install-gpu.md")
IMAGE_TAG = re.compile(r"(?:rootstock/(?:\w+|\$\w+|\{[\w,]+\})|\bservice|\bworker):(\d+\.\d+\.\d+)")


def test_version_of_the_wheel_comes_from_the_constant() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert pyproject["project"]["dynamic"] == ["version"]
    assert pyproject["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "services.__version__"}


def test_chart_has_the_version_of_the_services() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "rootstock" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_images_are_labelled_and_tagged_with_the_version() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert set(re.findall(r"^ARG VERSION=(.*)$", dockerfile, re.MULTILINE)) == {__version__}
    for name in ("docker/Dockerfile", "compose.yaml", *PAGES):
        tags = IMAGE_TAG.findall((ROOT / name).read_text())
        assert tags and set(tags) == {__version__}, name


def test_only_one_file_of_the_services_contains_the_version() -> None:
    files = [path for path in (ROOT / "services").rglob("*.py") if f'"{__version__}"' in path.read_text()]
    assert files == [ROOT / "services" / "__init__.py"]


def test_client_prints_the_version() -> None:
    command = [sys.executable, "-m", "rootstock_llm.services.cli", "--version"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed == f"rootstock {__version__}\n"
