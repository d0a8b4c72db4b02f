"""Checks whether every pin of docker/requirements/ has a wheel for a machine type. The exit status is 1 if a wheel is missing.

    .venv/bin/python docker/wheels.py [--machine aarch64] [service.txt ...]

Runs pip with its configured indexes: PIP_INDEX_URL, and PIP_EXTRA_INDEX_URL for torch's index. Nothing is installed. Pip before
version 23.3 downloads the wheels; newer versions read only their metadata. An unreachable index is an error (status 2), not
a missing wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "requirements"
PYTHON = "3.11"  # Python version of the images' base
GLIBC_MINOR = 36  # the base has glibc 2.36
LISTS = ("service.txt", "build.txt", "worker-cpu.txt", "worker-cuda.txt", "cuda-compiler.txt")
# pip's error for a pin without a wheel, and its messages about an unreachable index.
_ABSENT = re.compile(r"No matching distribution found for (\S+)")
_NOT_REACHED = ("Retrying (", "Could not fetch URL")


def find_wheels(pins: list[str], machine: str, folder: Path) -> tuple[list[str], str]:
    """Returns the wheels' file names for these pins, or the first pin without a wheel. Raises SystemExit on other errors."""
    listed, report = folder / "pins.txt", folder / "report.json"
    listed.write_text("\n".join(pins))
    minors = range(GLIBC_MINOR, 4, -1)
    tags = [*(f"manylinux_2_{minor}_{machine}" for minor in minors), f"manylinux2014_{machine}", f"linux_{machine}"]
    options = ["--dry-run", "--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    options += ["--target", str(folder / "none"), "--report", str(report), "--requirement", str(listed)]
    options += ["--implementation", "cp", "--python-version", PYTHON, *(f"--platform={tag}" for tag in tags)]
    env = {**os.environ, "PIP_CONSTRAINT": os.devnull}  # so that only the pins choose versions
    command = [sys.executable, "-m", "pip", "install", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return [each["download_info"]["url"].rpartition("/")[2] for each in json.loads(report.read_text())["install"]], ""
    absent = _ABSENT.search(done.stderr)
    if absent is None or absent[1] not in pins or any(word in done.stderr for word in _NOT_REACHED):
        print(done.stderr, file=sys.stderr)
        raise SystemExit(2)
    return [], absent[1]


def split(pins: list[str], machine: str) -> tuple[list[str], list[str]]:
    """Returns the wheels that exist and the pins without a wheel. Raises SystemExit on other errors."""
    absent: list[str] = []
    while True:
        with tempfile.TemporaryDirectory() as folder:
            wheels, missing = find_wheels([pin for pin in pins if pin not in absent], machine, Path(folder))
        if not missing:
            return wheels, absent
        absent.append(missing)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="wheels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--machine", default="aarch64", help="output of uname -m on the target; default %(default)s")
    parser.add_argument(
        "lists", nargs="*", default=LISTS, help="files in docker/requirements, or paths. Default: all but cuda-kernels.txt"
    )
    options = parser.parse_args(arguments)
    lacking = False
    for name in options.lists:
        pins = [line for line in (FOLDER / name).read_text().splitlines() if "==" in line]
        wheels, absent = split(pins, options.machine)
        specific = [wheel for wheel in wheels if not wheel.endswith("-any.whl")]
        kinds = f"{len(specific)} for {options.machine} only, {len(wheels) - len(specific)} for every machine type"
        print(f"{name}: {len(wheels)} of {len(pins)} pins have a wheel: {kinds}")
        print("".join(f"  no wheel: {pin}\n" for pin in absent), end="", flush=True)
        lacking |= bool(absent)
    return int(lacking)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
