"""Installs wheels from a folder in addition to the interpreter's packages, without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIST = ".wheels"


def install(wheels: Path, site: Path) -> str:
    """Installs the wheels into `site`, unless they were installed there before.

    Returns:
        Console line with the result.

    Raises:
        ValueError: the folder has no wheels.
        CalledProcessError: pip failed.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise ValueError(f"{wheels} has no wheels")
    listed = "\n".join(f"{wheel.name} {wheel.stat().st_size}" for wheel in found)
    if (site / LIST).is_file() and (site / LIST).read_text() == listed:
        return f"{len(found)} wheels are already installed in {site}"
    flags = ["--no-index", "--no-deps", "--upgrade", "--disable-pip-version-check", "--quiet", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, *map(str, found)], check=True)
    (site / LIST).write_text(listed)
    return f"installed {', '.join(wheel.name for wheel in found)} in {site}"
