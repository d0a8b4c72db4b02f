"""Matrix products of a step with and without reduced-precision sums: python -m tests.benchmarks.gpu.gemms."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rootstock_llm.kernels.bench.gpu_timing import Make, Work
from rootstock_llm.kernels.reference import layers
from rootstock_llm.kernels.triton.layers.layers import TritonLayers
from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import shape_of
from tests.benchmarks.gpu.replay import microseconds
from tests.benchmarks.make_model import Shape

HOW = (
    "Each weight matrix of the 8B and the 0.6B shape times `rows` rows in bf16, by cuBLAS; median over replays of a CUDA graph."
    " Reduced: cuBLAS may add split sums in bf16 (allow_bf16_reduced_precision_reduction); the worker does not allow this."
    " Worker: the product that the worker's steps run on a GPU. Fixed order: the kernel of deterministic mode on a GPU."
    " Layers: the sum of a layer's four products times the number of layers."
)
MODELS = ("qwen3-8b", "qwen3-0.6b")
ROWS = (1, 2, 4, 8, 64, 128, 256)
OURS = {"as_worker": False, "in_fixed_order": True}  # by name of the figure: whether the product runs in deterministic mode
COLUMNS = ("model", "matrix", "rows", "µs", "reduced µs", "worker µs", "fixed order µs", "GB/s", "TFLOP/s", "exact / reduced")


@dataclass(frozen=True, slots=True)
class Product:
    """The product of [rows, inner] and the transpose of [outer, inner]."""

    rows: int
    inner: int
    outer: int

    def bytes_moved(self, itemsize: int) -> int:
        return itemsize * (self.rows * self.inner + self.outer * self.inner + self.rows * self.outer)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.outer

    def make(self, device: torch.device) -> Work:
        return self._work_with(layers, device)

    def by_ours(self, deterministic: bool) -> Make:
        return lambda device: self._work_with(TritonLayers(device, deterministic), device)

    def _work_with(self, kernels: Any, device: torch.device) -> Work:
        dtype = dtype_of(device)
        given = torch.randn(self.rows, self.inner, device=device, dtype=dtype)
        packed = kernels.pack_linear(torch.randn(self.outer, self.inner, device=device, dtype=dtype), None)
        out = torch.empty(self.rows, self.outer, device=device, dtype=dtype)
        return lambda: kernels.linear(out, given, packed)


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """Returns (outer, inner) of each fused weight matrix of a layer, and of the LM head."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "qkv": (queries + 2 * keys, shape.hidden),
        "o": (shape.hidden, queries),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
        "head": (shape.vocab, shape.hidden),
    }


@contextmanager
def reduced_precision(allowed: bool) -> Iterator[None]:
    """Allows or forbids reduced-precision sums in bf16 products, and restores the old setting on exit."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = allowed
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def measure(setting: Setting, journal: Journal) -> None:
    rows = (1, 3) if setting.toy else ROWS
    for name in MODELS[:1] if setting.toy else MODELS:
        shape = shape_of(name, setting)
        for count in rows:
            with journal.apart(f"{name}, {count} rows"):
                _measure_rows(name, shape, count, setting, journal)


def _measure_rows(name: str, shape: Shape, rows: int, setting: Setting, journal: Journal) -> None:
    layer, by_ours = dict.fromkeys((False, True), 0.0), dict.fromkeys(OURS, 0.0)
    itemsize = dtype_of(torch.device(setting.device)).itemsize
    for matrix, (outer, inner) in matrices(shape).items():
        product, found = Product(rows, inner, outer), {}
        for allowed in layer:
            with reduced_precision(allowed):
                found[allowed] = microseconds(product.make, product.bytes_moved(itemsize), setting)
            layer[allowed] += found[allowed] if matrix != "head" else 0.0
        exact, reduced = found[False], found[True]
        ours = {}
        for kind in OURS if setting.on_gpu else ():
            ours[kind] = microseconds(product.by_ours(OURS[kind]), product.bytes_moved(itemsize), setting)
            by_ours[kind] += ours[kind] if matrix != "head" else 0.0
        rates = product.bytes_moved(itemsize) / exact / 1e3, product.flops / exact / 1e6
        journal.row(
            "matrix products",
            COLUMNS,
            (name, matrix, rows, exact, reduced, *(ours.get(kind, "") for kind in OURS), *rates, exact / reduced),
        )
    for allowed, taken in layer.items():
        journal.figure(f"{name}.layers_{rows}_rows{'_reduced' if allowed else ''}_ms", taken * shape.layers / 1e3, "ms")
    for kind, taken in by_ours.items() if setting.on_gpu else ():
        journal.figure(f"{name}.layers_{rows}_rows_{kind}_ms", taken * shape.layers / 1e3, "ms")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
