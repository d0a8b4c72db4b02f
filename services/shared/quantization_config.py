"""Checks the quantization that a model's config.json describes, without torch.

Both the worker and the download of a model call fault_of(), so that they refuse the same models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

KEYS = ("quantization_config", "compression_config")  # keys of config.json
MODELOPT_FILE = "hf_quant_config.json"
GROUPS = (32, 64, 128)  # supported numbers of weights that share a scale
GPTQ_FORMATS = ("gptq", "gptq_v2")
BLOCK = [128, 128]  # supported size of a block of fp8 weights with one scale
PACKED, INTEGER, FLOAT = "pack-quantized", "int-quantized", "float-quantized"  # supported formats of compressed-tensors
MIXED = "mixed-precision"  # format of compressed-tensors whose groups name their own formats
STRATEGIES = {  # supported strategies of compressed-tensors by format; a strategy names the weights that share a scale
    PACKED: ("group", "channel"),
    INTEGER: ("channel", "tensor"),
    FLOAT: ("channel", "tensor", "block"),
}


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the description of quantized weights in the content of config.json, or None for other models."""
    owners = [owner for owner in (config, config.get("text_config")) if isinstance(owner, Mapping)]
    found = [owner.get(key) for owner in owners for key in KEYS]
    return next((each for each in found if isinstance(each, Mapping) and each), None)


def method_of(quantization: Mapping[str, Any]) -> str:
    return str(quantization.get("quant_method", "")).lower()


def fault_of(config: Mapping[str, Any], files: Collection[str]) -> str:
    """Returns the reason for which the model's quantized weights are not supported; "" if they are supported or not quantized.

    Args:
        files: names of the files in the model's folder.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return f"{MODELOPT_FILE} of ModelOpt is not supported" if MODELOPT_FILE in files else ""
    method = method_of(quantization)
    if method not in METHODS:
        return f"method {method or '(none)'} is not supported; supported: {', '.join(METHODS)}"
    try:
        fault = METHODS[method](quantization)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fault = f"the config is malformed ({type(error).__name__}: {error})"
    return fault and f"{method}: {fault}"


def becomes_float(quantization: Mapping[str, Any]) -> bool:
    """Whether the worker dequantizes weights of this quantization to floats of 16 or 32 bits when it loads them."""
    if method_of(quantization) == "fp8":
        return True
    groups = groups_of(quantization) if method_of(quantization) == "compressed-tensors" else []
    return bool(groups) and all(kind == FLOAT for kind, _ in groups)


def groups_of(quantization: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the format and the content of each config group of compressed-tensors."""
    kind = str(quantization.get("format"))
    groups = [group for group in quantization["config_groups"].values() if group.get("weights")]
    return [(str(group.get("format") or kind) if kind == MIXED else kind, group) for group in groups]


def _group(size: Any) -> str:
    """Returns the fault of a group size, the number of weights that share a scale; "" if it is supported.

    -1 and None stand for a whole output channel.
    """
    if size in (None, -1) or size in GROUPS:
        return ""
    return f"groups of {size} weights are not supported; supported: {', '.join(map(str, GROUPS))}"


def _bits(bits: Any, supported: Collection[int]) -> str:
    return "" if bits in supported else f"weights of {bits} bits are not supported; supported: {', '.join(map(str, supported))}"


def _compressed_tensors(quantization: Mapping[str, Any]) -> str:
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        return f"sparsity format {sparsity} is not supported"
    if quantization.get("transform_config"):
        return "transform_config is not supported"
    groups = groups_of(quantization)
    if not groups:
        return "no config group has weights"
    return next((fault for kind, group in groups if (fault := _compressed_group(kind, group["weights"]))), "")


def _compressed_group(kind: str, weights: Mapping[str, Any]) -> str:
    if kind not in STRATEGIES:
        return f"format {kind} is not supported; supported: {', '.join(STRATEGIES)}"
    bits, number, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy", "tensor")
    expected = "float" if kind == FLOAT else "int"
    if number != expected:
        return f"weights of type {number} are not supported in format {kind}"
    if strategy not in STRATEGIES[kind]:
        return f"strategy {strategy} of format {kind} is not supported; supported: {', '.join(STRATEGIES[kind])}"
    if strategy == "block" and weights.get("block_structure") != BLOCK:
        return f"blocks of {weights.get('block_structure')} weights are not supported; supported: {BLOCK}"
    if kind == INTEGER and not weights.get("symmetric", True):
        return f"zero points of format {kind} are not supported"
    return _bits(bits, (4, 8) if kind == PACKED else (8,)) or _group(weights.get("group_size"))


def _awq(quantization: Mapping[str, Any]) -> str:
    version = str(quantization.get("version", "gemm")).lower()
    if version != "gemm":
        return f"version {version} is not supported; supported: gemm"
    return _bits(quantization.get("bits"), (4,)) or _group(quantization.get("group_size"))


def _gptq(quantization: Mapping[str, Any]) -> str:
    kind = "marlin" if quantization.get("is_marlin_format") else str(quantization.get("checkpoint_format") or GPTQ_FORMATS[0])
    if kind not in GPTQ_FORMATS:
        return f"checkpoint format {kind} is not supported; supported: {', '.join(GPTQ_FORMATS)}"
    return _bits(quantization.get("bits"), (4, 8)) or _group(quantization.get("group_size"))


def _fp8(quantization: Mapping[str, Any]) -> str:
    block = quantization.get("weight_block_size")
    if block is not None and list(block) != BLOCK:
        return f"blocks of {list(block)} weights are not supported; supported: {BLOCK}"
    kind = str(quantization.get("fmt", "e4m3"))
    return "" if kind == "e4m3" else f"numbers of type {kind} are not supported; supported: e4m3"


def _mxfp4(quantization: Mapping[str, Any]) -> str:
    return ""


METHODS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
