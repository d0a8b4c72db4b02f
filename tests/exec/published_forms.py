"""Writes weights in the layouts of quantization tools, with the library compressed-tensors or as the tool's documentation says.

Form.encode returns the tensors of one module, and the elements float32[N, K] that their codes stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

Encoded = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Form:
    """A layout with its options, such as bits and group."""

    encode: Callable[[str, Tensor], Encoded]  # encodes a module's weight [N, K]
    config: dict[str, Any]  # quantization_config
    scheme: str  # LoadedInfo.quantization
    becomes_float: bool = False  # whether the worker stores the weights in the model's dtype instead of as codes


def grouped(weight: Tensor, group: int) -> Tensor:
    return weight.reshape(len(weight), -1, group or weight.shape[1])


def steps(weight: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor]:
    """Returns scales float32[N, C] that float16 represents exactly, and zero points [N, C] of codes that begin at 0."""
    low, high = grouped(weight, group).amin(-1), grouped(weight, group).amax(-1)
    scales = ((high - low) / ((1 << bits) - 1)).half().float()
    return scales, (-low / scales).round().clamp(0, (1 << bits) - 1)


def rounded(weight: Tensor, scales: Tensor, zeros: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor]:
    """Returns codes int64[N, K], and the elements [N, K] that the codes stand for."""
    codes = (grouped(weight, group) / scales[..., None] + zeros[..., None]).round().clamp(0, (1 << bits) - 1)
    elements = (codes - zeros[..., None]) * scales[..., None]
    return codes.long().reshape(weight.shape), elements.reshape(weight.shape)


def words(codes: Tensor, bits: int, positions: tuple[int, ...] | None = None) -> Tensor:
    """Packs codes int64[R, n] into int32[R, n bits / 32]. Column c of a word begins at bit positions[c] * bits."""
    per_word = 32 // bits
    places = torch.tensor(positions or range(per_word))
    packed = (codes.reshape(len(codes), -1, per_word) << (places * bits)).sum(-1)
    return (packed - ((packed >> 31) << 32)).int()


def awq(group: int) -> Form:
    def encode(module: str, weight: Tensor) -> Encoded:
        scales, zeros = steps(weight, group, 4)
        codes, elements = rounded(weight, scales, zeros, group, 4)
        # AutoAWQ packs the columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on (awq/modules/linear/gemm.py).
        positions = (0, 4, 1, 5, 2, 6, 3, 7)
        tensors = {
            f"{module}.qweight": words(codes.t(), 4, positions),
            f"{module}.qzeros": words(zeros.long().t(), 4, positions),
            f"{module}.scales": scales.t().half(),
        }
        return tensors, elements

    config = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm"}
    return Form(encode, config, f"awq 4 bits by {group or 'channel'}")


def gptq(bits: int, group: int, version: int = 1, symmetric: bool = False, act_order: bool = False) -> Form:
    def encode(module: str, weight: Tensor) -> Encoded:
        depth = weight.shape[1]
        # All modules with equal depth get the same column order. GPTQ gives the same order to modules with the same inputs.
        order = torch.randperm(depth, generator=torch.Generator().manual_seed(depth)) if act_order else torch.arange(depth)
        ordered = weight[:, order]
        scales, zeros = steps(ordered, group, bits)
        if symmetric:
            zeros = torch.full_like(zeros, 1 << (bits - 1))
            scales = (grouped(ordered, group).abs().amax(-1) / ((1 << (bits - 1)) - 1)).half().float()
        codes, elements = rounded(ordered, scales, zeros, group, bits)
        back = torch.argsort(order)
        stored = (zeros.long() - (1 if version == 1 else 0)) % (1 << bits)
        tensors = {
            f"{module}.qweight": words(codes[:, back], bits).t(),
            f"{module}.qzeros": words(stored.t(), bits),
            f"{module}.scales": scales.t().half(),
            f"{module}.g_idx": (back // (group or depth)).int(),
        }
        return tensors, elements[:, back]

    kind = "gptq" if version == 1 else "gptq_v2"
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": symmetric,
        "desc_act": act_order,
        "checkpoint_format": kind,
    }
    return Form(encode, config, f"gptq {bits} bits by {group or 'channel'}")


def compressed(kind: str, bits: int, number: str, strategy: str, group: int = 0, symmetric: bool = True) -> Form:
    """Returns a layout that the library compressed-tensors writes and reads."""
    block = [128, 128] if strategy == "block" else None
    args = QuantizationArgs(
        num_bits=bits, type=number, symmetric=symmetric, strategy=strategy, group_size=group or None, block_structure=block
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(kind)

    def encode(module: str, weight: Tensor) -> Encoded:
        largest = 448.0 if number == "float" else (1 << (bits - 1)) - 1
        state = {"weight": weight}
        if strategy == "tensor":
            state["weight_scale"] = (weight.abs().max() / largest).reshape(1)
        elif strategy == "block":
            height, width = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
            rows = torch.arange(weight.shape[0]) // 128
            scales = torch.stack([weight[rows == row].abs().amax() / largest for row in range(height)])
            state["weight_scale"] = scales[:, None].expand(height, width).contiguous()
        elif symmetric:
            state["weight_scale"] = grouped(weight, group).abs().amax(-1) / largest
            state["weight_zero_point"] = torch.zeros_like(state["weight_scale"], dtype=torch.int8)
        else:
            state["weight_scale"], zeros = steps(weight, group, bits)
            state["weight_zero_point"] = (zeros - (1 << (bits - 1))).to(torch.int8)
        stored = compressor.compress(state, scheme)
        elements = compressor.decompress(stored, scheme)["weight"].float()
        return {f"{module}.{name}": tensor for name, tensor in stored.items()}, elements

    group_config = {"targets": ["Linear"], "weights": args.model_dump(mode="json")}
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group_config},
        "ignore": ["lm_head"],
    }
    return Form(encode, config, f"compressed-tensors {kind} {bits} bits", becomes_float=number == "float")


def fp8(block: bool, scalar: bool = False) -> Form:
    """Returns the layout of DeepSeek-V3 and of transformers' method "fp8".

    Args:
        scalar: whether the only scale has no dimension, as FP8Linear of transformers stores it.
    """

    def encode(module: str, weight: Tensor) -> Encoded:
        rows, columns = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
        scales = torch.empty(rows, columns) if block else torch.empty(1)
        stored, elements = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
        parts = [(r, c) for r in range(rows) for c in range(columns)] if block else [(0, 0)]
        for r, c in parts:
            at = (slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128)) if block else (slice(None), slice(None))
            scale = weight[at].abs().max() / 448.0
            scales[(r, c) if block else 0] = scale
            stored[at] = (weight[at] / scale).to(torch.float8_e4m3fn)
            elements[at] = stored[at].float() * scale
        name = "weight_scale_inv" if block or scalar else "weight_scale"
        return {f"{module}.weight": stored, f"{module}.{name}": scales[0] if scalar else scales}, elements

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Form(encode, config | ({"weight_block_size": [128, 128]} if block else {}), "fp8", becomes_float=True)


def mxfp4_tensors(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns blocks uint8[..., K / 32, 16], exponents uint8[..., K / 32], and the elements [..., K]."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat((numbers, -numbers))
    parts = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = torch.floor(torch.log2(parts.abs().amax(-1))) - 2
    scaled = parts / torch.exp2(exponents)[..., None]
    codes = (scaled[..., None] - numbers).abs().argmin(-1)
    elements = (numbers[codes] * torch.exp2(exponents)[..., None]).reshape(weight.shape)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), elements


def mxfp4() -> Form:
    def encode(module: str, weight: Tensor) -> Encoded:
        blocks, exponents, elements = mxfp4_tensors(weight)
        return {f"{module}_blocks": blocks, f"{module}_scales": exponents}, elements

    return Form(encode, {"quant_method": "mxfp4"}, "mxfp4")


FORMS = {
    "packed 4 by 128": compressed("pack-quantized", 4, "int", "group", 128),
    "packed 4 by 32 with zero points": compressed("pack-quantized", 4, "int", "group", 32, symmetric=False),
    "packed 8 by channel": compressed("pack-quantized", 8, "int", "channel"),
    "int8 by channel": compressed("int-quantized", 8, "int", "channel"),
    "int8 by tensor": compressed("int-quantized", 8, "int", "tensor"),
    "float8 by channel": compressed("float-quantized", 8, "float", "channel"),
    "float8 by tensor": compressed("float-quantized", 8, "float", "tensor"),
    "float8 by block": compressed("float-quantized", 8, "float", "block"),
    "awq by 128": awq(128),
    "awq by 64": awq(64),
    "gptq 4 by 128": gptq(4, 128),
    "gptq 4 symmetric": gptq(4, 64, symmetric=True),
    "gptq 4 by channel": gptq(4, 0),
    "gptq 4 act-order": gptq(4, 32, act_order=True),
    "gptq 8 v2": gptq(8, 128, version=2),
    "gptq 8 act-order symmetric": gptq(8, 64, version=2, symmetric=True, act_order=True),
    "fp8 by block": fp8(block=True),
    "fp8 by tensor": fp8(block=False),
    "fp8 with a scalar": fp8(block=False, scalar=True),
    "mxfp4": mxfp4(),
}
