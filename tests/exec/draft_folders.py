"""Writes random EAGLE-3 heads and MTP layers in their published formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

LAYERS = (0, 1, 2)  # an EAGLE-3 head reads the outputs of these layers


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator) * 0.2
        made[name] = drawn + 1 if len(shape) == 1 else drawn
    return made


def _layer(config: Any, place: str, attended: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    q, kv = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        f"{place}.input_layernorm.weight": (hidden,),
        f"{place}.post_attention_layernorm.weight": (hidden,),
        f"{place}.self_attn.q_proj.weight": (q, attended),
        f"{place}.self_attn.k_proj.weight": (kv, attended),
        f"{place}.self_attn.v_proj.weight": (kv, attended),
        f"{place}.self_attn.o_proj.weight": (hidden, q),
        f"{place}.mlp.gate_proj.weight": (inner, hidden),
        f"{place}.mlp.up_proj.weight": (inner, hidden),
        f"{place}.mlp.down_proj.weight": (hidden, inner),
    }


def write_eagle3(folder: Path, target: Path, draft_vocab: int, prefix: str = "", place: str = "midlayer") -> None:
    """Writes a random EAGLE-3 head for a target model with three layers.

    Args:
        folder: folder of the head.
        target: folder of the target model.
        draft_vocab: number of tokens that the head can draft.
        prefix: prefix of all tensor names.
        place: name of the head's layer in the tensor names.
    """
    config = AutoConfig.from_pretrained(str(target))
    hidden = config.hidden_size
    shapes = {
        "fc.weight": (hidden, len(LAYERS) * hidden),
        f"{place}.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        **_layer(config, place, 2 * hidden),
    }
    tensors = {f"{prefix}{name}": tensor for name, tensor in _random(shapes, 5).items()}
    tensors |= _random({"lm_head.weight": (draft_vocab, hidden)}, 6)
    known = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(7))[:draft_vocab].sort().values
    if draft_vocab < config.vocab_size:
        tensors["d2t"] = known - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, known, True)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    own |= {name: getattr(config, name) for name in (*same, "rms_norm_eps", "max_position_embeddings")}
    (folder / "config.json").write_text(json.dumps(own))


def add_mtp(target: Path, deepseek: bool) -> None:
    """Adds a random MTP layer to the target's checkpoint, in DeepSeek's format if `deepseek`."""
    config = AutoConfig.from_pretrained(str(target))
    hidden, behind = config.hidden_size, f"model.layers.{config.num_hidden_layers}"
    place = behind if deepseek else "mtp.layers.0"
    qwen = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    names = tuple(f"{behind}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")) if deepseek else qwen
    shapes: dict[str, tuple[int, ...]] = {
        f"{names[0]}.weight": (hidden,),
        f"{names[1]}.weight": (hidden,),
        f"{names[2]}.weight": (hidden, 2 * hidden),
        f"{names[3]}.weight": (hidden,),
        **_layer(config, place, hidden),
        f"{place}.self_attn.q_norm.weight": (config.head_dim,),
        f"{place}.self_attn.k_norm.weight": (config.head_dim,),
    }
    file = target / "model.safetensors"
    save_file({**load_file(file), **_random(shapes, 5)}, file, metadata={"format": "pt"})
