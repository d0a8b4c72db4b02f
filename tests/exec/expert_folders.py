"""Rewrites checkpoints of mixtures, whose experts may be stored separately or in one tensor for each layer."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def fuse_experts(folder: Path) -> None:
    """Replaces the tensors of single experts by tensors that have all experts of a layer, as in transformers' modules."""
    file = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in load_file(file).items():
        layer, found, rest = name.replace("block_sparse_moe", "mlp").partition("experts.")
        if not found:
            tensors[layer] = tensor
            continue
        expert, part, _ = rest.split(".")
        parts.setdefault(layer, {}).setdefault(int(expert), {})[part] = tensor
    for layer, experts in parts.items():
        gate, up, down = ("w1", "w3", "w2") if "w1" in experts[0] else ("gate_proj", "up_proj", "down_proj")
        each = [experts[number] for number in range(len(experts))]
        tensors[f"{layer}experts.gate_up_proj"] = torch.stack([torch.cat((one[gate], one[up])) for one in each])
        tensors[f"{layer}experts.down_proj"] = torch.stack([one[down] for one in each])
    save_file(tensors, file, {"format": "pt"})
