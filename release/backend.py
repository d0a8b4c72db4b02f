"""The build backend of pyproject.toml: setuptools, with links to the source folders in rootstock_llm.

A wheel also gets the modules of protos/. An editable installation generates no modules, because `make env` writes them into the
source tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import package  # type: ignore[import-not-found]  # beside this file, on the path of a build
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # the other hooks of PEP 517 and PEP 660
from setuptools.command.build_py import build_py

# The generated modules need at least the generator's versions of grpcio and protobuf. pyproject.toml requires this grpcio.
GENERATOR = "grpcio-tools==1.76.0"
package.link(Path.cwd())  # a build runs in the project's root, and setuptools looks for packages there


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), GENERATOR]


class BuildWithProtos(build_py):  # type: ignore[misc]  # setuptools has no types here
    """The command build_py, which also generates the modules of protos/ in the folder that becomes the wheel."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            package.generate(Path.cwd(), Path(self.build_lib) / package.PACKAGE / "protos")
