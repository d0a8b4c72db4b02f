"""Computes tables for rotary embedding, with the scalings of transformers' modeling_rope_utils: default, linear, llama3, yarn."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rootstock_llm.services.worker.exec.weights.checkpoint import UnsupportedModel

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def _base_frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (float(rope["rope_theta"]) ** exponents)


def _llama3(rope: dict[str, Any], frequencies: Tensor) -> Tensor:
    """Stretches long wavelengths by the factor, leaves short ones unchanged, and interpolates for those between (Llama 3.1)."""
    factor, old_context = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wavelengths = 2 * math.pi / frequencies
    blend = ((old_context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _mscale(scale: float, weight: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor)


def _yarn(rope: dict[str, Any], frequencies: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """Returns the scaled frequencies, and the factor by which cosines and sines are multiplied (arXiv 2309.00071)."""
    factor, base = float(rope["factor"]), float(rope["rope_theta"])
    old_context = float(rope["original_max_position_embeddings"])

    def dimension(rotations: float) -> float:
        return head_dim * math.log(old_context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return frequencies / factor * ramp + frequencies * (1 - ramp), _yarn_attention_factor(rope, factor)


def rope_table(rope: dict[str, Any], head_dim: int, num_positions: int, rotary_dim: int = 0) -> Tensor:
    """Returns float32[num_positions, head_dim]: per position, cosines and then sines of head_dim / 2 angles.

    Args:
        rope: the rope_parameters of the config.
        head_dim: elements of a head; even.
        num_positions: positions from 0 on.
        rotary_dim: elements of a head that are rotated; even. The other angles are 0. 0: all elements are rotated.

    Raises:
        UnsupportedModel: the rope_type is not in ROPE_TYPES.
    """
    rotary_dim = rotary_dim or head_dim
    assert head_dim % 2 == rotary_dim % 2 == 0 and num_positions > 0, "dimensions are rotated in pairs"
    kind = rope.get("rope_type", "default")
    frequencies, attention_factor = _base_frequencies(rope, rotary_dim), 1.0
    if kind == "linear":
        frequencies = frequencies / float(rope["factor"])
    elif kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif kind == "yarn":
        frequencies, attention_factor = _yarn(rope, frequencies, rotary_dim)
    elif kind != "default":
        raise UnsupportedModel(f"rope type {kind} is not supported; supported: {', '.join(ROPE_TYPES)}")
    assert len(frequencies) == rotary_dim // 2, "there is a frequency for each pair of dimensions"
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    rest = torch.zeros(num_positions, (head_dim - rotary_dim) // 2)
    return torch.cat((cos, rest + 1.0, sin, rest), dim=-1)
