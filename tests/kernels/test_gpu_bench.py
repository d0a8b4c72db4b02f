"""Checks the GPU kernels' bench without a GPU: the cases run, compile for Hopper, and are reported."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rootstock_llm.kernels.bench import gpu, gpu_experts
from rootstock_llm.kernels.bench.gpu import COLUMNS, KernelFigures, figures_of, write_json
from rootstock_llm.kernels.bench.gpu_experts import MixtureShape
from rootstock_llm.kernels.bench.gpu_layers import SHAPES, DecoderShape, cases
from rootstock_llm.kernels.bench.gpu_timing import MAX_COPIES, GpuCase, Timing, copies_for
from tests.night import NIGHTLY

ROOT = Path(__file__).resolve().parents[2]

TOY = DecoderShape("toy", hidden=24, inner=40, heads=3, kv_heads=1, head_dim=8, vocab=33, page_size=4)
MIXTURE = MixtureShape("toy", hidden=24, inner=20, experts=6, chosen=2)
LOGARITHM = 12  # fused multiply-adds in one logarithm of the CUDA library
SHARED_MEMORY = 227 * 1024  # bytes of shared memory that a program may use on Hopper
EXPERTS = {"_group_kernel", "_gate_up_kernel", "_down_kernel", "_combine_kernel"}
KERNELS = {
    "gpu_layers": {
        "_rms_norm_kernel",
        "_activate_and_mul_kernel",
        "_sigmoid_mul_kernel",
        "_convolve_kernel",
        "_delta_kernel",
        "_gated_norm_kernel",
        "_rope_write_kernel",
        "_write_kv_kernel",
        "_update_table_kernel",
        "_resolve_tokens_kernel",
        "_page_indices_kernel",
        "_one_row_kernel",
    },
    "gpu_experts": {"_route_kernel", *EXPERTS},
    "gpu_attention": {"attention_kernel", "merge_kernel"},
    "gpu_deterministic": {"_linear_kernel", "attention_kernel", "_rope_write_kernel", *EXPERTS},
    "gpu_sampling": {
        "peaks_kernel",
        "tally_kernel",
        "round_kernel",
        "draw_kernel",
        "edit_kernel",
        "span_kernel",
        "merge_kernel",
    },
}


def test_layer_cases_run_with_kernels_and_plain_torch(device: torch.device) -> None:
    toys = cases((TOY,), tokens=(1, 3, 5), context=9) + gpu_experts.cases(MIXTURE, tokens=(1, 3, 5))
    assert len({case.name for case in toys}) == len(toys)
    for case in toys:
        case.make(device)()
        if case.plain is not None:
            case.plain(device)()
        assert case.bytes_moved > 0


@pytest.mark.parametrize("name", list(KERNELS))
def test_kernels_compile_for_hopper_at_bench_shapes(name: str) -> None:
    if name != "gpu_layers" and not NIGHTLY:
        pytest.skip("takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.hopper", f"rootstock_llm.kernels.bench.{name}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    shared = report["shared"]
    assert set(shared) == KERNELS[name]
    if name == "gpu_deterministic":
        assert set(report["fused"]) == KERNELS[name] - {"_rope_write_kernel"}
        assert len(shared["_rope_write_kernel"]) == len(SHAPES), "few and many tokens use the same variant"
    else:
        assert not report["fused"]
    for kernel, counts in report["fused"].items():
        logarithms = 4 if kernel == "attention_kernel" else 0  # each thread computes one logarithm per lane of a split
        assert {count % LOGARITHM for count in counts} == {0} and max(counts) <= logarithms * LOGARITHM, kernel
    assert max(max(sizes) for sizes in shared.values()) <= SHARED_MEMORY


def test_kernels_avoid_argument_names_of_the_launcher() -> None:
    """Triton generates a launcher that has the kernel's argument names and its own variables in one scope.

    A collision makes the launch fail, on a device only.
    """
    used = {"params", "specialization", "options", "backend", "specialize_impl", "JITCallable", "grid", "warmup"}
    taken, kernels = [], 0
    for path in sorted((ROOT / "kernels/triton").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
                kernels += 1
                taken += [
                    f"{path.name}: {node.name}({each.arg})"
                    for each in (*node.args.args, *node.args.kwonlyargs)
                    if each.arg in used
                ]
    assert kernels > 20 and taken == []


def test_copies_of_the_input_exceed_the_cache_size() -> None:
    assert [copies_for(size, 50) for size in (1, 25, 30, 99, 100, 1000)] == [MAX_COPIES, 4, 4, 2, 1, 1]


def test_kernel_figures_include_rates() -> None:
    case = GpuCase("one", lambda _: lambda: None, bytes_moved=3_000_000, flops=8_000_000)
    figures = figures_of(case, Timing(2.0, cold=True), Timing(5.0, cold=True), copy_bandwidth=4e12)
    expected = KernelFigures("one", 2.0, pytest.approx(1500.0), pytest.approx(37.5), pytest.approx(4.0), 5.0, True)
    assert figures == expected
    assert figures.line().split() == ["one", "2.0", "1500", "37.5", "4.0", "5.0", "2.50", "memory"]
    alone = figures_of(GpuCase("two words", case.make, 3_000_000), Timing(2.0, cold=False), None, 4e12)
    assert alone.line().split() == ["two", "words", "2.0", "1500", "37.5", "L2"]
    assert len(alone.line()) < len(COLUMNS) + 4


class NoPlainTorch:
    """Times the kernel, and raises for plain torch."""

    def time(self, make: object, bytes_moved: int, captures: bool) -> Timing:
        if make == "plain":
            raise RuntimeError("cannot be captured\nand more")
        return Timing(2.0, cold=True)


def test_measurement_keeps_the_kernel_figures_when_plain_torch_fails() -> None:
    case = GpuCase("one", lambda _: lambda: None, 1_000_000, plain="plain")  # type: ignore[arg-type]
    figures = gpu.measured(case, NoPlainTorch(), 1e12)  # type: ignore[arg-type]
    assert (figures.microseconds, figures.error, figures.torch_error) == (2.0, "", "RuntimeError: cannot be captured")
    assert figures.line().split() == ["one", "2.0", "500", "50.0", "failed", "memory"]


class Broken:
    def time(self, make: object, bytes_moved: int, captures: bool) -> Timing:
        raise RuntimeError("no such kernel\nand more")


def test_measurement_reports_the_error_when_a_case_fails(tmp_path: Path) -> None:
    figures = gpu.measured(GpuCase("one", lambda _: lambda: None, 1), Broken(), 1e12)  # type: ignore[arg-type]
    assert figures.line().split() == ["one", "failed:", "RuntimeError:", "no", "such", "kernel"]
    write_json(tmp_path / "figures.json", {"device": "none"}, [figures])
    written = json.loads((tmp_path / "figures.json").read_text())
    assert (written["device"], written["kernels"][0]["error"]) == ("none", "RuntimeError: no such kernel")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_command_exits_with_status_2_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert capsys.readouterr().err.strip() == gpu.NO_GPU
