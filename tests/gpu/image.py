"""Compares the package versions of a check with the versions that the worker's GPU image pins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PINS = "docker/requirements/worker-cuda.txt"
DECISIVE = ("torch", "triton", "flashinfer-python")  # packages whose kernels and compilers determine the figures


def pins_of(root: Path) -> dict[str, str]:
    """Returns the pinned versions by package; an empty dict if the file does not exist."""
    path = root / PINS
    lines = path.read_text().splitlines() if path.is_file() else []
    found = (re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)", line) for line in lines)
    return {match[1].lower(): match[2] for match in found if match is not None}


def differing(versions: Mapping[str, str], pins: Mapping[str, str]) -> list[str]:
    """Returns a phrase for each package in DECISIVE whose version differs from the image's. Local labels (+cu130) are ignored."""
    return [
        f"{name} {versions[name]}, not {pins[name]}"
        for name in DECISIVE
        if name in pins and name in versions and versions[name].partition("+")[0] != pins[name].partition("+")[0]
    ]
