"""The parts of a GPU check, with their commands and time limits."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS, BENCHMARK = "tests", "benchmark"
BACKEND_TESTS = ("gpu/test_backends", "exec/test_flashinfer_signatures", "exec/test_flashinfer_backend")
COMPILERS = 8  # pytest processes of a part that mostly compiles with Triton; each uses one core
CONTEXTS = 7  # pytest processes of a part that mostly runs small steps: one per test case of test_deterministic
COMPILING = 4  # pytest processes of a part that mostly runs nvcc; each starts several compilers (check.compilers())


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the check, which runs in one process."""

    name: str
    kind: str  # TESTS or BENCHMARK
    about: str  # description in the report
    limit_s: int  # time limit in seconds; below 480, so that a part fits into a short lease of a machine
    command: tuple[str, ...]  # arguments of the Python interpreter; "{out}" stands for the result file (JUnit XML or JSON)
    flags: str = ""  # flags of a benchmark that runs models, as in the command; results with other flags are stored separately

    @property
    def label(self) -> str:
        return f"{self.name} {self.flags}".rstrip()

    @property
    def stem(self) -> str:
        """Prefix of the names of the part's files."""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.label).strip("-")


def _tests(name: str, about: str, limit_s: int, *paths: str, processes: int = 1) -> Part:
    """Returns a part that runs tests.

    pytest prints the name of each test. If one test takes half of `limit_s`, pytest prints its stack. If one test takes `limit_s`
    minus 25 s, pytest ends it.
    """
    flags = ("-m", "pytest", "-v", "-ra", "--tb=short", "--durations=5", "--color=no", "--junitxml={out}")
    plugins = ("-p", "no:cacheprovider", "-p", "tests.gpu.lost_device")
    settings = (f"faulthandler_timeout={limit_s // 2}", f"timeout={limit_s - 25}", "addopts=--strict-markers")
    at_once = ("-n", str(processes)) if processes > 1 else ()
    return Part(name, TESTS, about, limit_s, (*flags, *plugins, *(f"-o{one}" for one in settings), *at_once, *paths))


def _at_once(processes: int) -> int:
    """Returns the number of pytest processes: `processes`, but at most one per core, and 1 without pytest-xdist."""
    return min(processes, os.cpu_count() or 1) if importlib.util.find_spec("xdist") is not None else 1


def _kernel_tests(root: Path) -> tuple[Part, ...]:
    """Returns three parts with the tests of the Triton kernels. Compiling all kernels would exceed the time limit of one part."""
    groups: dict[str, list[str]] = {"layers": [], "attention": ["tests/exec/test_attention_backends.py"], "sampling": []}
    for path in sorted((root / "tests/kernels").glob("test_triton_*.py")):
        name = path.stem.removeprefix("test_triton_")
        group = name if name in groups else "layers" if name in ("step", "executor") else "sampling"
        groups[group].append(str(path.relative_to(root)))
    about = "Triton kernels against their torch twins: "
    return tuple(
        _tests(f"kernels-{name}", about + name, 300, *paths, processes=_at_once(COMPILERS)) for name, paths in groups.items()
    )


def all_parts(root: Path, bench_flags: Sequence[str] = ()) -> tuple[Part, ...]:
    """Returns all parts in the order in which they run.

    The order is: main tests of correctness, benchmarks by the importance of their figures, other tests, tests that mostly
    compile.

    Args:
        bench_flags: flags for the benchmarks that run models, see tests.benchmarks.gpu.command.
    """

    def bench(name: str, about: str, limit_s: int, flags: Sequence[str] = bench_flags) -> Part:
        module = f"tests.benchmarks.gpu.{name.replace('-', '_')}"
        command = ("-m", module, *flags, "--out={out}")
        return Part(f"bench-{name}", BENCHMARK, about, limit_s, command, " ".join(flags))

    backends = (f"tests/{name}.py" for name in BACKEND_TESTS)
    memory = ("tests/gpu/test_memory.py", "tests/exec/test_memory_budget.py")
    return (
        _tests("parity", "tokens and logits against transformers on the device", 180, "tests/gpu/test_parity.py"),
        _tests("waits", "no call that waits for the device", 180, "tests/gpu/test_sync.py"),
        bench("throughput", "8B shape, 256 requests of 1024 in and 1024 out", 300),
        bench("ceilings", "copy and read bandwidth, matrix products", 60, ()),
        bench("single-stream", "one request, 0.6B, 8B and 14B shapes", 300),
        bench("timeline", "what the device does over 50 decode steps of 64 rows", 240),
        bench("overlap", "overlap on and off, 0.6B shape", 180),
        _tests("graphs", "decode graphs on and off", 120, "tests/gpu/test_graphs.py"),
        _tests(
            "deterministic",
            "equal bits in any context, with and without graphs",
            300,
            "tests/gpu/test_deterministic.py",
            processes=_at_once(CONTEXTS),
        ),
        _tests("speculation", "drafting on and off, with each drafter", 300, "tests/gpu/test_speculation.py"),
        bench("deterministic", "deterministic mode on and off, 0.6B shape", 240),
        bench("gemms", "matrix products of both models, reduced precision on and off", 120, ()),
        bench("attention-kernels", "decode and prompt attention alone, FlashInfer's kernels and Triton's", 240, ()),
        bench("versus-transformers", "transformers' continuous batching, 0.6B shape", 420),
        bench("nano", "256 requests, in and out 100 to 1,024, 0.6B shape", 180),
        bench("attention", "decode steps and prompts by each attention back end, 8B shape", 300),
        bench("graphs", "CUDA graphs on and off, 0.6B shape", 180),
        bench("shared-prefix", "requests with a long shared prefix, 8B shape", 180),
        bench("host-loads", "prefixes from host memory, layer by layer and whole, 0.6B shape", 180),
        Part("bench-kernels", BENCHMARK, "each kernel alone", 300, ("-m", "rootstock_llm.kernels.bench.gpu", "--json", "{out}")),
        _tests("memory", "exhausted memory, and the measurement of its peak", 120, *memory),
        _tests("sampling", "logprobs and seeded draws", 120, "tests/gpu/test_logprobs.py", "tests/gpu/test_draws.py"),
        _tests(
            "random-steps", "2,000 random steps, compared with the fake executor", 300, "tests/exec/test_device_random_steps.py"
        ),
        _tests("tiers", "KV from host memory and from files", 120, "tests/gpu/test_tiers.py"),
        _tests("peers", "KV from another worker; needs generated messages", 120, "tests/gpu/test_peers.py"),
        _tests("loading", "weights streamed to the device", 120, "tests/exec/test_weight_stream.py"),
        *_kernel_tests(root),
        _tests("backends", "each attention back end", 400, *backends, processes=_at_once(COMPILING)),
    )


def chosen(parts: Sequence[Part], names: Sequence[str]) -> tuple[Part, ...]:
    """Returns the parts with these names or kinds in the order of `names`; without names, all parts.

    Raises:
        ValueError: no part has one of the names.
    """
    known = {part.name for part in parts} | {part.kind for part in parts}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no part has the name {', '.join(unknown)}; the parts are {', '.join(part.name for part in parts)}")
    if not names:
        return tuple(parts)
    return tuple(dict.fromkeys(part for name in names for part in parts if name in (part.name, part.kind)))
