"""What the worker's image for GPUs pins, to be held against what a check was run with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PINS = "docker/requirements/worker-cuda.txt"
DECISIVE = ("torch", "triton", "flashinfer-python")  # whose kernels and compilers the figures are of


def pins_of(root: Path) -> dict[str, str]:
    """Versions by package; none where the file is not there."""
    path = root / PINS
    lines = path.read_text().splitlines() if path.is_file() else []
    found = (re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)", line) for line in lines)
    return {match[1].lower(): match[2] for match in found if match is not None}


def differing(versions: Mapping[str, str], pins: Mapping[str, str]) -> list[str]:
    """A phrase for each decisive package whose version is not the image's; a local label (+cu130) makes none."""
    return [
        f"{name} {versions[name]}, not {pins[name]}"
        for name in DECISIVE
        if name in pins and name in versions and versions[name].partition("+")[0] != pins[name].partition("+")[0]
    ]
