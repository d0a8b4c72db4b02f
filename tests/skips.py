"""The permitted reasons for skipping a test, with folders and remedies. A skip for any other reason is a failure.

`needs("promtool")` marks a test that needs a program that README does not list. The test is skipped if the program is not on
PATH.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

PACKAGES = {  # Debian package by program
    "openssl": "openssl",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "redis-server": "redis-server",
}


@dataclass(frozen=True, slots=True)
class Skip:
    """A permitted reason for a skip."""

    reason: str
    folders: tuple[str, ...]  # folders below the repository in which the reason is permitted
    missing: str  # requirement that would let the test run


GPU, FLASHINFER = "a GPU that torch sees", "PyPI's flashinfer-python, which `make env` leaves out"
ALLOWED = (
    *(Skip(f"{program} is not on PATH", ("tests/",), f"Debian's package {package}") for program, package in PACKAGES.items()),
    Skip("torch sees no GPU", ("tests/gpu/",), GPU),
    Skip("counts a GPU's memory", ("tests/exec/",), GPU),
    Skip("there is a GPU", ("tests/exec/",), "a machine without one"),
    Skip("no GPU with flashinfer", ("tests/exec/",), f"{GPU}, and {FLASHINFER}"),
    Skip("flashinfer is not installed", ("tests/gpu/", "tests/exec/"), FLASHINFER),
    Skip(
        "flashinfer's modules are not compiled, and must not be (FLASHINFER_DISABLE_JIT)",
        ("tests/exec/",),
        "rootstock_llm.services.worker.exec.attention.flashinfer_prebuild with these head sizes and dtypes",
    ),
    Skip("flashinfer is not installed, or there is a GPU", ("tests/exec/",), f"{FLASHINFER}; on GPUs tests/gpu has more"),
    Skip("there is a GPU", ("tests/exec/", "tests/kernels/"), "a machine without a GPU, because the test checks its messages"),
    Skip("nixl is not installed", ("tests/exec/",), "PyPI's nixl, which `make env` leaves out"),
    Skip(
        "gcp-storage-emulator is not installed", ("tests/services/",), "PyPI's package of that name, which `make env` leaves out"
    ),
    Skip(
        "sphinx is not installed", ("tests/contracts/",), "PyPI's furo, myst-parser and sphinx, which `make docs-site` installs"
    ),
    Skip("moto is not installed", ("tests/services/",), "PyPI's moto[s3,server] and boto3, which `make env` leaves out"),
    Skip("sentence-transformers is not installed", ("tests/exec/",), "PyPI's sentence-transformers, which `make env` leaves out"),
    Skip(
        "takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1",
        ("tests/kernels/", "tests/e2e/", "tests/benchmarks/", "tests/contracts/", "tests/chart/"),
        "`make nightly`",
    ),
    Skip(
        "FUSE file systems cannot be mounted on this machine",
        ("tests/exec/",),
        "root, Debian's package fuse3, and PyPI's mfusepy, which `make env` leaves out",
    ),
    Skip("no network namespace can be made here", ("tests/e2e/",), "root, and Debian's package iproute2"),
    Skip("no memory cgroup can be made here", ("tests/e2e/",), "root, and cgroups with the memory controller"),
    Skip("no chroot can be made here", ("tests/e2e/",), "root, and Debian's package debootstrap"),
    Skip("takes minutes; runs only with ROOTSTOCK_TEST_NIGHTLY=1", ("tests/services/", "tests/kernels/"), "`make nightly`"),
    Skip("takes half an hour; runs only with ROOTSTOCK_TEST_NIGHTLY=1", ("tests/e2e/",), "`make nightly`"),
)


def missing_program(programs: tuple[str, ...]) -> str:
    """Returns the reason to skip a test that needs these programs; "" if all are on PATH.

    Raises:
        ValueError: PACKAGES lacks a program, or `programs` is empty.
    """
    if not programs or not PACKAGES.keys() >= set(programs):
        raise ValueError(f"the mark needs{programs} must name one or more of: {', '.join(PACKAGES)}")
    return next((f"{program} is not on PATH" for program in programs if shutil.which(program) is None), "")


def allowed(reason: str, path: str) -> Skip | None:
    """Returns the entry of ALLOWED for a reason in a test file, or None.

    Args:
        path: test file, relative to the repository.
    """
    return next((each for each in ALLOWED if each.reason == reason and path.startswith(each.folders)), None)
