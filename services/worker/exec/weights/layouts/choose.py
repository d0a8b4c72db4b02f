"""Chooses the layout of a folder's weights by its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rootstock_llm.services.shared import served_config
from rootstock_llm.services.shared.quantization_config import becomes_float, fault_of, method_of, quantization_of
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint, CheckpointError, read_json
from rootstock_llm.services.worker.exec.weights.layouts.awq import Awq
from rootstock_llm.services.worker.exec.weights.layouts.compressed_tensors import CompressedTensors
from rootstock_llm.services.worker.exec.weights.layouts.float8 import Float8
from rootstock_llm.services.worker.exec.weights.layouts.gptq import Gptq
from rootstock_llm.services.worker.exec.weights.layouts.mxfp4 import Mxfp4
from rootstock_llm.services.worker.exec.weights.quantization import AUTO, INT8, Layout, Quantization, QuantizationOptions

LAYOUTS: dict[str, Callable[[Mapping[str, Any], Checkpoint], Layout]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Float8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}


def read_quantization(folder: Path, options: QuantizationOptions) -> Mapping[str, Any] | None:
    """Returns the description of the quantized weights in a folder's config.json; None if the weights are not quantized.

    Raises:
        CheckpointError: the quantization is not supported, or the options cannot be combined with it.
    """
    config = read_json(folder / "config.json")
    if fault := fault_of(config, {path.name for path in folder.iterdir()}):
        raise CheckpointError(served_config.quantized(str(folder), fault))
    found = quantization_of(config)
    if found is not None and options.weights != AUTO and not (becomes_float(found) and options.weights == INT8):
        raise CheckpointError(
            f"--quantization is {options.weights}, but {folder} is quantized by {method_of(found)}. Set --quantization to {AUTO}."
        )
    return found


def quantization_for(given: Mapping[str, Any] | None, options: QuantizationOptions, checkpoint: Checkpoint) -> Quantization:
    """Returns the Quantization of a model.

    Args:
        given: result of read_quantization().
    """
    return Quantization(options, None if given is None else LAYOUTS[method_of(given)](given, checkpoint))
