"""Tiny random checkpoints, written by transformers. Their greedy outputs are varied, and no two tokens have equal logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from demo.window_masks import add_window_masks

SHAPE = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

QWEN35 = {
    "initializer_range": 0.12,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "tie_word_embeddings": True,
}
GEMMA2 = {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0}
GEMMA3 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 20,
}

EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
HYBRID = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]}


@dataclass(frozen=True)
class TinyModel:
    family: str  # prefix of transformers' classes, such as "Qwen3"
    options: dict[str, Any]  # fields of the config that differ from SHAPE
    shard_size: str = "5GB"  # largest size of a safetensors file
    config: str = ""  # name of the config class; "": by family
    class_name: str = ""  # name of the model class; "": by family

    def build(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        """Saves the checkpoint to the folder and returns the transformers model, in eval mode."""
        torch.manual_seed(7)
        config = getattr(transformers, self.config or f"{self.family}Config")(**{**SHAPE, **self.options})
        config._attn_implementation = "eager"
        model = getattr(transformers, self.class_name or f"{self.family}ForCausalLM")(config)
        for parameter in model.parameters():  # not buffers, because transformers keeps rotary frequencies in float32
            parameter.data = parameter.data.to(dtype)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "layernorm.weight")):
                torch.nn.init.normal_(parameter.data, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
            elif name.endswith("sinks"):
                torch.nn.init.normal_(parameter.data, std=2.0)
        model.save_pretrained(folder, max_shard_size=self.shard_size)
        add_window_masks(model)
        return model.eval()


def greedy_answers(model: Any, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Returns transformers' greedy output for each prompt. End-of-sequence tokens do not end an output.

    The prompts are one batch, padded on the left. The batch runs on one thread, because with several threads, such a small
    computation takes twenty times as long while another process runs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=num_new, min_new_tokens=num_new, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    torch.set_num_threads(threads)
    answers: list[list[int]] = out[:, longest:].tolist()
    return answers


def recurrent_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Returns transformers' logits, float32[tokens, V], computed token by token.

    For a whole prompt, transformers computes a recurrent layer in chunks. This causes larger rounding errors.
    """
    cache, rows = None, []
    with torch.inference_mode():
        for token in tokens:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, 0].float())
    return torch.stack(rows)


MODELS = {
    "llama-untied": TinyModel("Llama", {"tie_word_embeddings": False}),
    "llama-tied": TinyModel("Llama", {"tie_word_embeddings": True}),
    "llama-sharded": TinyModel("Llama", {"tie_word_embeddings": False}, shard_size="100KB"),
    "llama-biases": TinyModel("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": TinyModel("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-yarn-rope": TinyModel("Llama", {"rope_parameters": YARN_ROPE}),
    "llama-linear-rope": TinyModel("Llama", {"rope_parameters": LINEAR_ROPE}),
    "mistral": TinyModel("Mistral", {"sliding_window": None}),
    "mistral-window": TinyModel("Mistral", {"sliding_window": 24}),
    "qwen2": TinyModel("Qwen2", {}),
    "qwen2-window": TinyModel("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": TinyModel("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3.5": TinyModel("Qwen3_5", QWEN35, config="Qwen3_5TextConfig"),
    "qwen3.5-window": TinyModel("Qwen3_5", QWEN35 | HYBRID | {"sliding_window": 24}, config="Qwen3_5TextConfig"),
    "gpt-oss": TinyModel("GptOss", {**EXPERTS, "head_dim": 16, "sliding_window": 24, "num_hidden_layers": 4}),
    "gemma2": TinyModel("Gemma2", {**GEMMA2, "final_logit_softcapping": 6.0, "tie_word_embeddings": False}),
    "gemma3": TinyModel("Gemma3", GEMMA3, config="Gemma3TextConfig"),
    "mixtral": TinyModel("Mixtral", {**EXPERTS, "sliding_window": 24}),
    "qwen3-moe": TinyModel("Qwen3Moe", {**EXPERTS, "head_dim": 32, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3.5-moe": TinyModel(
        "Qwen3_5Moe",
        {**QWEN35, **EXPERTS, "shared_expert_intermediate_size": 56, "initializer_range": 0.1},
        config="Qwen3_5MoeTextConfig",
    ),
}
