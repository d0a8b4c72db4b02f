"""The parts of a GPU check: what each runs and how many seconds it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS, BENCHMARK = "tests", "benchmark"
BACKEND_TESTS = ("gpu/test_backends", "exec/test_flashinfer_signatures", "exec/test_flashinfer_backend")


@dataclass(frozen=True, slots=True)
class Part:
    """command: what follows the interpreter; "{out}" in it is the file for its results: JUnit XML of tests, JSON of a benchmark.
    limit_s: below 480, so that any one part fits a short lease of a machine."""

    name: str
    kind: str
    about: str
    limit_s: int
    command: tuple[str, ...]


def _tests(name: str, about: str, limit_s: int, *paths: str) -> Part:
    flags = ("-m", "pytest", "-ra", "--tb=short", "-p", "no:cacheprovider", "--color=no", "--junitxml={out}")
    return Part(name, TESTS, about, limit_s, (*flags, *paths))


def _bench(name: str, about: str, limit_s: int, *flags: str, module: str = "") -> Part:
    module = module or f"tests.benchmarks.gpu.{name.removeprefix('bench-').replace('-', '_')}"
    return Part(name, BENCHMARK, about, limit_s, ("-m", module, *flags, "--out={out}"))


def _kernel_tests(root: Path) -> tuple[Part, ...]:
    """In three parts: most of their time goes into compiling."""
    groups: dict[str, list[str]] = {"layers": [], "attention": ["tests/exec/test_attention_backends.py"], "sampling": []}
    for path in sorted((root / "tests/kernels").glob("test_triton_*.py")):
        name = path.stem.removeprefix("test_triton_")
        group = name if name in groups else "layers" if name in ("step", "executor") else "sampling"
        groups[group].append(str(path.relative_to(root)))
    about = "Triton kernels against their torch twins: "
    return tuple(_tests(f"kernels-{group}", about + group, 300, *paths) for group, paths in groups.items())


def all_parts(root: Path) -> tuple[Part, ...]:
    """In the order in which they run: what is right first, then how fast it is, by weight of the figure."""
    return (
        *_kernel_tests(root),
        _tests("parity", "tokens and logits against transformers on the device", 180, "tests/gpu/test_parity.py"),
        _tests("graphs", "decode graphs on and off", 120, "tests/gpu/test_graphs.py"),
        _tests("backends", "each attention back end", 300, *(f"tests/{name}.py" for name in BACKEND_TESTS)),
        _tests("sampling", "logprobs and seeded draws", 120, "tests/gpu/test_logprobs.py", "tests/gpu/test_draws.py"),
        _tests("waits", "no call that waits for the device", 180, "tests/gpu/test_sync.py"),
        _tests(
            "memory", "memory running out, and its height", 120, "tests/gpu/test_memory.py", "tests/exec/test_memory_budget.py"
        ),
        _tests("loading", "weights streamed to the device", 120, "tests/exec/test_weight_stream.py"),
        _tests("random-steps", "2,000 random steps beside the fake executor", 300, "tests/exec/test_device_random_steps.py"),
        _bench("bench-ceilings", "copy and read bandwidth, matrix products", 60),
        _bench("bench-single-stream", "one request, 0.6B, 8B and 14B shapes", 300),
        _bench("bench-throughput", "8B shape, 256 requests of 1024 in and 1024 out", 300),
        _bench("bench-timeline", "what the device does over 50 decode steps of 64 rows", 240),
        _bench("bench-nano", "256 requests, in and out 100 to 1,024, 0.6B shape", 180),
        _bench("bench-overlap", "overlap on and off, 0.6B shape", 180),
        _bench("bench-graphs", "CUDA graphs on and off, 0.6B shape", 180),
        _bench("bench-versus-transformers", "transformers' continuous batching, 0.6B shape", 420),
        _bench("bench-shared-prefix", "requests with one long beginning, 8B shape", 180),
        Part("bench-kernels", BENCHMARK, "each kernel by itself", 300, ("-m", "kernels.bench.gpu", "--json", "{out}")),
    )


def chosen(parts: Sequence[Part], names: Sequence[str]) -> tuple[Part, ...]:
    """names: of parts, or of kinds. None: all. Raises ValueError naming what there is no part of."""
    known = {part.name for part in parts} | {part.kind for part in parts}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no part is called {', '.join(unknown)}; there are {', '.join(part.name for part in parts)}")
    return tuple(part for part in parts if not names or part.name in names or part.kind in names)
