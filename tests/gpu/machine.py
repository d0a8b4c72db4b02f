"""Prints the device and the versions of the packages of a check as one JSON object: python -m tests.gpu.machine.

It runs as a separate process, so that the check itself does not allocate memory on the device.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
from typing import Any

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numpy", "safetensors", "pytest", "hypothesis")
ABSENT = "not installed"


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def describe() -> dict[str, Any]:
    """Returns the machine's facts. If torch finds no GPU, `device` is "", and `reason` states why."""
    facts: dict[str, Any] = {"device": "", "reason": "", "python": platform.python_version(), "system": platform.platform()}
    facts["versions"] = {package: version_of(package) for package in PACKAGES}
    try:
        import torch
    except ImportError as error:
        return {**facts, "reason": f"torch cannot be imported: {error}"}
    facts["versions"]["cuda"] = torch.version.cuda or ABSENT
    if not torch.cuda.is_available():
        return {**facts, "reason": f"torch {torch.__version__} sees no GPU"}
    properties = torch.cuda.get_device_properties(0)
    facts["device"] = properties.name
    facts["memory_gib"] = round(properties.total_memory / 2**30, 1)
    facts["multiprocessors"] = properties.multi_processor_count
    facts["capability"] = f"{properties.major}.{properties.minor}"
    facts["driver"] = _driver()
    return facts


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"


if __name__ == "__main__":
    print(json.dumps(describe()))
