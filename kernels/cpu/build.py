"""Builds the C++ kernels into a shared library on first use and keeps it, keyed by sources, compiler, flags and CPU.

What kernels.cpu.prebuild has made from the same sources for this class of CPU is taken instead, and needs no compiler.
Two processes may build at once: each compiles into a folder of its own and renames the result into place.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kernels.cpu.variants import Variant, cpu_features, runnable

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
PROJECT = Path(__file__).parents[2]
COMPILERS = ("g++", "c++", "clang++")
PACKAGE = "build-essential"  # of Debian, with a compiler
# No -ffast-math: NaN and infinity must survive. The last two warnings are false ones from GCC's own vector headers.
FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=default",
    "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
COMPILE_TIMEOUT_S = 300  # of one file


class BuildFailed(RuntimeError):
    """The kernels cannot be built: there is no compiler, or it failed. The message has the fault and, without one, the remedy."""


def _cpu_identity() -> str:
    """What native code depends on: architecture and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    model = next((line for line in lines if line.startswith(("model name", "CPU part"))), "")
    return f"{platform.machine()} {model} {flags}"


def _native_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _torch_openmp() -> Path | None:
    """The OpenMP runtime that torch loads: ours must be the same, or two thread pools would fight for the cores."""
    folder = Path(torch.__file__).parent
    found = sorted([*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")])
    return found[0] if found else None


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildFailed(f"{command[0]} exited with {done.returncode}: {done.stderr[-2000:]}")


def _cache_folders() -> list[Path]:
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rootstock" / "kernels"
    return [PROJECT / "build" / "kernels", user] if (PROJECT / "pyproject.toml").is_file() else [user]


def _writable(folders: list[Path]) -> Path:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise BuildFailed(f"no folder for built kernels can be written: {', '.join(map(str, folders))}")


def _compile(compiler: str, options: tuple[str, ...], target: Path) -> None:
    openmp = _torch_openmp()
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work = Path(name)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for done in [pool.submit(_run, [compiler, *FLAGS, *options, "-c", source], work) for source in sources]:
                done.result()
        objects = [path.name for path in sorted(work.glob("*.o"))]
        runtime = [str(openmp), f"-Wl,-rpath,{openmp.parent}"] if openmp else ["-fopenmp"]
        _run([compiler, "-shared", "-o", target.name, *objects, *runtime], work)
        (work / target.name).rename(target)


def _key(options: tuple[str, ...], cpu: str, openmp: str) -> str:
    sources = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h"))
    described = "\n".join([*FLAGS, *options, cpu, openmp]).encode()
    return hashlib.sha256(sources + described).hexdigest()[:16]


def _variant_name(variant: Variant) -> str:
    """By the OpenMP runtime's file name: torch has loaded it before the library asks for it, wherever it lies."""
    openmp = _torch_openmp()
    return f"rootstock-{variant.name}-{_key(variant.options, variant.name, openmp.name if openmp else '')}.so"


def _compiler() -> str:
    found = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if found is None:
        raise BuildFailed(f"no C++ compiler ({', '.join(COMPILERS)}) is installed; Debian's and Ubuntu's package is {PACKAGE}")
    return found


def prebuild(variant: Variant, folder: Path) -> Path:
    """Compiles the variant into folder, which exists. Raises BuildFailed."""
    target = folder / _variant_name(variant)
    if not target.is_file():
        _compile(_compiler(), variant.options, target)
    return target


def _prebuilt() -> Path | None:
    candidates = runnable(platform.machine(), cpu_features()) if PREBUILT.is_dir() else []
    return next((path for variant in candidates if (path := PREBUILT / _variant_name(variant)).is_file()), None)


def built_library() -> Path:
    """Path of the shared library for this machine, compiled if need be. Raises BuildFailed."""
    if (prebuilt := _prebuilt()) is not None:
        return prebuilt
    options = (_native_flag(),)
    name = f"rootstock-{_key(options, _cpu_identity(), str(_torch_openmp()))}.so"
    folders = _cache_folders()
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    compiler = _compiler()
    target, begun = _writable(folders) / name, time.monotonic()
    _compile(compiler, options, target)
    logger.info("built CPU kernels with %s in %.1f s: %s", compiler, time.monotonic() - begun, target)
    return target
