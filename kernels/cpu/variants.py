"""Classes of CPUs that the C++ kernels are built for ahead of time: compiler options, and what a CPU must have to run them.

Levels are those of the x86-64 psABI; names of features are those of /proc/cpuinfo.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    machine: str
    options: tuple[str, ...]
    needs: frozenset[str]


VARIANTS = (  # of each machine: best first, the baseline last
    Variant("x86-64-v4-bf16", "x86_64", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
    Variant("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Variant("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Variant("x86-64-v2", "x86_64", ("-march=x86-64-v2",), _V2),
    Variant("armv8-a", "aarch64", ("-march=armv8-a",), frozenset()),
)


def cpu_features() -> frozenset[str]:
    """Those of the first CPU in /proc/cpuinfo; empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.lower().startswith(("flags", "features"))), ":")
    return frozenset(found.partition(":")[2].split())


def runnable(machine: str, features: frozenset[str]) -> list[Variant]:
    """Best first."""
    return [variant for variant in VARIANTS if variant.machine == machine and variant.needs <= features]


def buildable() -> list[Variant]:
    """Those that this machine's compiler makes: all of its architecture, whatever this CPU can run."""
    return [variant for variant in VARIANTS if variant.machine == platform.machine()]
