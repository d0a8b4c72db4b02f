"""Attention kernels of FlashInfer and Triton, timed by graph replay: python -m tests.benchmarks.gpu.attention_kernels."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rootstock_llm.kernels.bench.gpu_timing import Work
from tests.benchmarks.gpu import attention_batches as batches
from tests.benchmarks.gpu.attention_batches import StepBatch, StepTensors
from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import shape_of
from tests.benchmarks.gpu.replay import microseconds

HOW = (
    "One layer's attention in bf16 over shuffled pages: decode rows of equal and of uneven lengths, and prompts; pages of 16 and"
    " 64. Median over replays of a CUDA graph, without the time of planning. FlashInfer kernels marked `graph` are planned from"
    " the number of rows, as in captured steps. Other FlashInfer kernels are planned from the lengths of the rows. Triton kernels"
    " have a fixed number of splits per row if they are marked `splits`, and otherwise the splits of Triton's plan. Difference:"
    " largest absolute difference from the outputs of Triton's plan, which are of the order of 1."
)
COLUMNS = ("step", "page", "kernel", "µs", "GB/s", "difference")
SPLITS = (1, 2, 4)
DECODES = {"256 x 1536": (1535,) * 256, "64 x 1536": (1535,) * 64, "255 x 1536 and 32768": (1535,) * 255 + (32767,)}
PROMPTS = {"4 prompts of 2048": ((0,) * 4, 2048), "512 tokens behind 8192": ((8192,), 512)}
WRONG = 0.1  # a larger difference of outputs, which are of the order of 1, is an error and not bf16 rounding

Make = Callable[[StepTensors], Work]


def decode_batches(setting: Setting) -> list[StepBatch]:
    if setting.toy:
        return [_batch("qwen3-8b", "3 x 9", (8,) * 3, 1, 4, setting)]
    found = [_batch("qwen3-8b", name, starts, 1, page, setting) for page in (16, 64) for name, starts in DECODES.items()]
    return [*found, _batch("qwen3-0.6b", "256 x 1536", DECODES["256 x 1536"], 1, 16, setting)]


def prompt_batches(setting: Setting) -> list[StepBatch]:
    if setting.toy:
        return [_batch("qwen3-8b", "2 prompts of 5", (0,) * 2, 5, 4, setting)]
    return [_batch("qwen3-8b", name, starts, count, 16, setting) for name, (starts, count) in PROMPTS.items()]


def _batch(model: str, name: str, starts: tuple[int, ...], count: int, page_size: int, setting: Setting) -> StepBatch:
    shape = shape_of(model, setting)
    label = f"{model.removeprefix('qwen3-')} {name}"
    return StepBatch(label, shape.heads, shape.kv_heads, shape.head_dim, page_size, starts, count)


def kinds_of(batch: StepBatch, setting: Setting, module: Any) -> dict[str, Make]:
    """Returns the kinds of kernels by name. The outputs of the first one are the expected outputs.

    Args:
        module: the package flashinfer; None if it is not installed.
    """
    if not setting.on_gpu:
        return {"torch": batches.torch_work}
    found: dict[str, Make] = {batches.TRITON: batches.triton_work}
    if batch.count == 1:
        found |= {f"{batches.TRITON}, {splits} splits": _with_splits(splits) for splits in SPLITS}
    kinds = (*batches.EAGER_KINDS, *(batches.GRAPH_KINDS if batch.count == 1 else ()))
    return found | {kind: _by_flashinfer(kind, module) for kind in kinds if module is not None}


def _with_splits(splits: int) -> Make:
    return lambda step: batches.triton_work(step, splits)


def _by_flashinfer(kind: str, module: Any) -> Make:
    return lambda step: batches.flashinfer_work(step, kind, module)


def measure(setting: Setting, journal: Journal) -> None:
    there = setting.on_gpu and importlib.util.find_spec("flashinfer") is not None
    module = importlib.import_module("flashinfer") if there else None
    if setting.on_gpu and module is None:
        journal.note("FlashInfer is not installed: only Triton's kernels are measured.")
    with torch.inference_mode():
        for batch in (*decode_batches(setting), *prompt_batches(setting)):
            measure_batch(batch, kinds_of(batch, setting, module), setting, journal)


def measure_batch(batch: StepBatch, kinds: dict[str, Make], setting: Setting, journal: Journal) -> None:
    """Measures each kind separately. A kind that fails or computes wrong outputs does not stop the others."""
    expected: Tensor | None = None
    for kind, make in kinds.items():
        with journal.apart(f"{batch.name}, pages of {batch.page_size}, {kind}"):
            found = _outputs(batch, make, setting)
            expected = found if expected is None else expected
            difference = batches.distance(found, expected)
            if not difference < WRONG:
                raise RuntimeError(f"the outputs differ from Triton's by {difference:.3g}; the limit is {WRONG}")
            _time(batch, kind, make, difference, setting, journal)


def _outputs(batch: StepBatch, make: Make, setting: Setting) -> Tensor:
    step = _tensors(batch, setting)
    make(step)()
    return step.out


def _time(batch: StepBatch, kind: str, make: Make, difference: float, setting: Setting, journal: Journal) -> None:
    moved = batch.bytes_moved(_dtype(setting).itemsize)
    taken = microseconds(lambda device: make(_tensors(batch, setting)), moved, setting)
    journal.row("attention alone", COLUMNS, (batch.name, batch.page_size, kind, taken, moved / taken / 1e3, difference))
    journal.figure(f"{batch.name}, page {batch.page_size}, {kind}", taken, "µs")


def _tensors(batch: StepBatch, setting: Setting) -> StepTensors:
    return batches.tensors_of(batch, torch.device(setting.device), _dtype(setting))


def _dtype(setting: Setting) -> torch.dtype:
    return torch.bfloat16 if setting.on_gpu else torch.float32


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
