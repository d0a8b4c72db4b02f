"""Writes model folders with weights of several forms, and computes logprobs for comparison."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from tests.exec.driver import Driver, Sequence, greedy

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # layers that quantization tools quantize
PROMPT = torch.randint(0, 257, (40,), generator=torch.Generator().manual_seed(3)).tolist()
PAGE_SIZE = 16


def is_linear(name: str) -> bool:
    return name.endswith(tuple(f"{each}.weight" for each in LINEAR))


def rewrite(source: Path, target: Path, change: Callable[[str, Tensor], dict[str, Tensor]], **config: Any) -> Path:
    """Writes a copy of a model folder with one file of weights. Returns `target`.

    Args:
        change: takes the name and the value of a tensor; returns the tensors that replace it, by name.
        config: values that are added to config.json.
    """
    target.mkdir(parents=True)
    changed: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            changed.update(change(name, tensor))
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, target / "model.safetensors", {"format": "pt"})
    given = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(given | config))
    return target


def outputs(folder: Path, dtype: str = "float32", **options: Any) -> tuple[list[int], NDArray[np.float64], LoadedInfo]:
    """Returns 8 greedy tokens after PROMPT, and at each of them the logprobs of the 20 most likely tokens, by token id."""
    made = DeviceOptions(device="cpu", num_threads=1, **options)
    executor, info = build_device_executor(str(folder), dtype, PAGE_SIZE, 4, 64, 0.5, None, made, lambda _: None)
    try:
        driving, sequence = Driver(executor, PAGE_SIZE), Sequence(PROMPT, 0, greedy(8, top_logprobs=20))
        driving.prefill([sequence], 32)
        driving.decode([sequence], 8)
    finally:
        executor.close()
    rows = [dict(zip(row.top_ids, row.top, strict=True)) for row in sequence.logprobs]
    return sequence.output, np.array([[row[token] for token in sorted(row)] for row in rows]), info
