"""Description of the machine that ran a benchmark, for its results."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Returns the number of cores that this process may use; taskset and containers can exclude cores of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_names() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.returncode == 0 else []


def describe() -> dict[str, Any]:
    """Describes the client's machine, which is also the server's if the URL is local."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "gpus": gpu_names(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }
