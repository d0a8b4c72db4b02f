"""The build backend of pyproject.toml: setuptools, with the modules of protos/ generated into the wheel.

An editable installation generates nothing, because `make env` writes the modules into the source tree.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # the other hooks of PEP 517 and PEP 660
from setuptools.command.build_py import build_py

# Generated modules need the grpcio and protobuf of their generator or newer. pyproject.toml allows this grpcio and no older one.
GENERATOR = "grpcio-tools==1.76.0"
PROTOS = Path("protos")  # below the project's root, where a build runs


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), GENERATOR]


class BuildWithProtos(build_py):  # type: ignore[misc]  # setuptools has no types here
    """The command build_py, which fills the folder that becomes the wheel."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            _generate(Path(self.build_lib))


def _generate(folder: Path) -> None:
    """Raises CalledProcessError if protoc refuses a file."""
    files = sorted(str(path) for path in PROTOS.rglob("*.proto"))
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *files], check=True)
