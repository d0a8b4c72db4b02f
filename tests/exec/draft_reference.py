"""Computes the expected draft tokens after a text, by plain torch and by transformers' model of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.exec.draft_folders import LAYERS


def small_guesses(folder: Path, text: Sequence[int], count: int) -> list[int]:
    """Returns the greedy draft tokens of a separate draft model after the text."""
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    ids = list(text)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(text) :]


@dataclass
class HeadReference:
    """Computes the draft tokens of an EAGLE-3 head or of an MTP layer."""

    target: Path  # folder of the target model
    eagle3: Path | None  # folder of the EAGLE-3 head; None for the MTP layer in the target's checkpoint

    def __post_init__(self) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(str(self.target), dtype=torch.float32)
        self._outputs: list[Tensor] = []
        for layer in self._model.model.layers:
            layer.register_forward_hook(
                lambda _, __, output: self._outputs.append(output[0] if isinstance(output, tuple) else output)
            )
        self._config = self._model.config
        behind, found = f"model.layers.{self._config.num_hidden_layers}", load_file(self.target / "model.safetensors")
        if self.eagle3 is not None:
            found = {name.removeprefix("model."): tensor for name, tensor in load_file(self.eagle3 / "model.safetensors").items()}
            renamed = {"midlayer.": "layer.", "layers.0.": "layer."}
        else:
            mtp = {
                "mtp.pre_fc_norm_embedding": "enorm",
                "mtp.pre_fc_norm_hidden": "hnorm",
                "mtp.fc": "joined",
                "mtp.norm": "norm",
            }
            deepseek = {f"{behind}.enorm": "enorm", f"{behind}.hnorm": "hnorm", f"{behind}.eh_proj": "joined"}
            deepseek[f"{behind}.shared_head.norm"] = "norm"
            renamed = mtp | deepseek | {"mtp.layers.0.": "layer.", f"{behind}.": "layer."}
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in found.items():
            start = next((old for old in renamed if name.startswith(old)), None)
            if start is not None or self.eagle3 is not None:
                self._tensors[renamed[start] + name.removeprefix(start) if start else name] = tensor

    def guesses(self, text: Sequence[int], count: int) -> list[int]:
        """Returns `count` draft tokens after a text of `n` tokens.

        The head's first `n - 1` inputs use the target's hidden states, later inputs use the head's own hidden states.
        """
        with torch.inference_mode():
            states = self._states(text)
            found: list[int] = []
            for _ in range(count):
                token, state = self._last(torch.tensor([*text[1:], *found]), states)
                found.append(token)
                states = torch.cat((states, state[None]))
        return found

    def _states(self, text: Sequence[int]) -> Tensor:
        self._outputs.clear()
        self._model(torch.tensor([list(text)]))
        outputs = [output.reshape(len(text), -1) for output in self._outputs]
        if self.eagle3 is not None:
            return F.linear(torch.cat([outputs[layer] for layer in LAYERS], 1)[:-1], self._tensors["fc.weight"])
        return self._normed(outputs[-1], self._model.model.norm.weight)[:-1]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._config.rms_norm_eps)

    def _last(self, ids: Tensor, states: Tensor) -> tuple[int, Tensor]:
        own, embedded = self._tensors, self._model.model.embed_tokens.weight[ids]
        input_norm = own["layer.input_layernorm.weight"]
        if self.eagle3 is not None:
            x = torch.cat((self._normed(embedded, input_norm), self._normed(states, own["layer.hidden_norm.weight"])), 1)
            residual = states
        else:
            both = self._normed(embedded, own["enorm.weight"]), self._normed(states, own["hnorm.weight"])
            residual = F.linear(torch.cat(both, 1), own["joined.weight"])
            x = self._normed(residual, input_norm)
        residual = residual + F.linear(self._attention(x), own["layer.self_attn.o_proj.weight"])
        x = self._normed(residual, own["layer.post_attention_layernorm.weight"])
        gate, up = (F.linear(x, own[f"layer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        output = (residual + F.linear(F.silu(gate) * up, own["layer.mlp.down_proj.weight"]))[-1]
        normed = self._normed(output, own["norm.weight"])
        head = own["lm_head.weight"] if self.eagle3 is not None else self._model.lm_head.weight
        token = int(F.linear(normed, head).argmax())
        token += int(own["d2t"][token]) if "d2t" in own else 0
        return token, output if self.eagle3 is not None else normed

    def _attention(self, x: Tensor) -> Tensor:
        size, own = self._config.head_dim, self._tensors
        q, k, v = (F.linear(x, own[f"layer.self_attn.{name}_proj.weight"]).view(len(x), -1, size) for name in "qkv")
        if "layer.self_attn.q_norm.weight" in own:
            q, k = (self._normed(part, own[f"layer.self_attn.{name}_norm.weight"]) for part, name in ((q, "q"), (k, "k")))
        angles = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(0, size, 2) / size)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def rotated(part: Tensor) -> Tensor:
            first, second = part.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        q, k, v = (part.transpose(0, 1)[None] for part in (rotated(q), rotated(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1).reshape(len(x), -1)
