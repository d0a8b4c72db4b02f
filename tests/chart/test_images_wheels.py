"""Tests docker/wheels.py with pip and a folder of wheels instead of a package index."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

COMMAND = Path(__file__).resolve().parents[2] / "docker/wheels.py"
WHEELS = (
    "anywhere-1.0-py3-none-any.whl",
    "both-1.0-cp311-cp311-manylinux_2_28_aarch64.whl",
    "both-1.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    "elsewhere-1.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    "newer-1.0-cp313-cp313-manylinux_2_17_aarch64.whl",
    "stable-1.0-cp39-abi3-manylinux2014_aarch64.whl",
)


def wheel(folder: Path, name: str) -> None:
    distribution, version, tag = name.removesuffix(".whl").split("-", 2)
    info = f"{distribution}-{version}.dist-info"
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    for name in WHEELS:
        wheel(tmp_path, name)
    (tmp_path / "list.txt").write_text(
        "# a list\n" + "".join(f"{name}==1.0\n" for name in dict.fromkeys(each.partition("-")[0] for each in WHEELS))
    )
    return tmp_path / "list.txt"


def run(pins: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")} | settings
    env = {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1"}
    command = [sys.executable, str(COMMAND), "--machine", "aarch64", str(pins)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_pins_without_a_wheel_are_listed(pins: Path) -> None:
    done = run(pins, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(pins.parent))
    assert done.stdout.splitlines() == [
        f"{pins}: 3 of 5 pins have a wheel: 2 for aarch64 only, 1 for every machine type",
        "  no wheel: elsewhere==1.0",
        "  no wheel: newer==1.0",
    ]
    assert done.returncode == 1, done.stderr


def test_exit_status_is_2_when_the_package_index_is_unreachable(pins: Path) -> None:
    done = run(pins, PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert done.returncode == 2 and "no wheel:" not in done.stdout, done.stdout
