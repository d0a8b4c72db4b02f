"""Builds the C++ kernels into a shared library on first use.

The name of a library has a digest of sources, compiler flags and CPU. If prebuild.py has built a library from the same sources
for this class of CPUs, this library is used, and no compiler is needed. Two processes may build at the same time, because each of
them compiles in a separate folder and renames the result.

The instruction set levels are those of the x86-64 psABI; feature names are those of /proc/cpuinfo.
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
from dataclasses import dataclass
from pathlib import Path

import torch

import rootstock_llm

_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4_VNNI = _V4 | {"avx512_vnni"}


@dataclass(frozen=True, slots=True)
class Variant:
    """A class of CPUs for which the kernels can be built ahead of time."""

    name: str  # part of the library's file name
    machine: str  # architecture, as platform.machine() names it
    options: tuple[str, ...]  # compiler options
    needs: frozenset[str]  # features in /proc/cpuinfo that a CPU must have


VARIANTS = (  # for each architecture, the fastest variant first; CPUs below x86-64-v2 have no variant
    Variant("x86-64-v4-bf16", "x86_64", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), _V4_VNNI | {"avx512_bf16"}),
    Variant("x86-64-v4-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _V4_VNNI),
    Variant("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Variant("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Variant("x86-64-v2", "x86_64", ("-march=x86-64-v2",), _V2),
    Variant("armv8-a", "aarch64", ("-march=armv8-a",), frozenset()),
)


def cpu_features() -> frozenset[str]:
    """Returns the features of the first CPU in /proc/cpuinfo; empty if this file does not exist."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.lower().startswith(("flags", "features"))), ":")
    return frozenset(found.partition(":")[2].split())


def runnable(machine: str, features: frozenset[str]) -> list[Variant]:
    """Returns the variants that a CPU can run, best first."""
    return [variant for variant in VARIANTS if variant.machine == machine and variant.needs <= features]


def buildable() -> list[Variant]:
    """Returns the variants of this machine's architecture.

    A compiler on this machine can build them, even if the CPU cannot run them.
    """
    return [variant for variant in VARIANTS if variant.machine == platform.machine()]


logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
PROJECT = Path(rootstock_llm.__file__).parents[1]  # the root of a checkout, or the folder of an installation
COMPILERS = ("g++", "c++", "clang++")
PACKAGE = "build-essential"  # Debian package with a compiler
# -ffast-math is not used, because kernels must handle NaN and infinity. The last two options suppress false warnings in GCC's
# vector headers.
FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=default",
    "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
COMPILE_TIMEOUT_S = 300  # seconds for each source file


class BuildFailed(RuntimeError):
    """Raised if the kernels cannot be built: there is no compiler, the compiler failed, or no folder is writable.

    The message has the reason, and names the package to install if there is no compiler.
    """


def _cpu_identity() -> str:
    """Returns the parts of /proc/cpuinfo on which native code depends: architecture, model and instruction sets."""
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
    """Returns the OpenMP runtime in torch's folder, or None.

    The library must link the same runtime, because two runtimes would have two thread pools that compete for the cores.
    """
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
    """Returns the folders for built libraries: that of a checkout, then the user's cache folder unless its path is relative."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # "~/.cache" for a user without a home folder
    folders = [PROJECT / "build" / "kernels"] if (PROJECT / "pyproject.toml").is_file() else []
    return [*folders, user / "rootstock" / "kernels"] if user.is_absolute() else folders


def _writable(folders: list[Path]) -> Path:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    names = ", ".join(map(str, folders)) or "none is known"
    raise BuildFailed(f"no folder for built kernels is writable ({names}); set XDG_CACHE_HOME to a writable folder")


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
    """Returns the file name of a prebuilt library.

    Its digest covers the file name of the OpenMP runtime. The runtime's folder has no influence, because torch has already
    loaded the runtime when the library is loaded.
    """
    openmp = _torch_openmp()
    return f"rootstock-{variant.name}-{_key(variant.options, variant.name, openmp.name if openmp else '')}.so"


def _compiler() -> str:
    found = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if found is None:
        raise BuildFailed(f"no C++ compiler ({', '.join(COMPILERS)}) is installed; on Debian or Ubuntu install {PACKAGE}")
    return found


def prebuild(variant: Variant, folder: Path) -> Path:
    """Compiles the variant into an existing folder, unless the folder already has the library. Raises BuildFailed."""
    target = folder / _variant_name(variant)
    if not target.is_file():
        _compile(_compiler(), variant.options, target)
    return target


def _prebuilt() -> Path | None:
    candidates = runnable(platform.machine(), cpu_features()) if PREBUILT.is_dir() else []
    return next((path for variant in candidates if (path := PREBUILT / _variant_name(variant)).is_file()), None)


def built_library() -> Path:
    """Returns the shared library for this machine, compiling it if necessary. Raises BuildFailed."""
    if (prebuilt := _prebuilt()) is not None:
        return prebuilt
    options = (_native_flag(),)
    name = f"rootstock-{_key(options, _cpu_identity(), str(_torch_openmp()))}.so"
    folders = _cache_folders()
    for folder in folders:
        if os.path.isfile(folder / name):  # Path.is_file() would raise PermissionError for the home folder of another user
            return folder / name
    compiler = _compiler()
    target, begun = _writable(folders) / name, time.monotonic()
    _compile(compiler, options, target)
    logger.info("built CPU kernels with %s in %.1f s: %s", compiler, time.monotonic() - begun, target)
    return target
