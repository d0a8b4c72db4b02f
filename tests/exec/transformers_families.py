"""Tiny checkpoints of model families that run by transformers' code, and of families that are refused."""

from __future__ import annotations

import transformers
from packaging.version import Version

from tests.exec.tiny_models import GEMMA2, SHAPE, TinyModel

GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "n_inner": 96}
WINDOW = {"sliding_window": 24}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GEMMA3N = {
    "head_dim": 16,
    "vocab_size_per_layer_input": 257,
    "hidden_size_per_layer_input": 16,
}  # the defaults would make a gigabyte of weights
GEMMA3N_LAYERS = ["full_attention", "sliding_attention"] * 2
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
INDEXED = {**EXPERTS, **MLA, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "index_n_heads": 2, "index_head_dim": 16}
COMPRESSED = {
    **EXPERTS,
    "layer_types": ["heavily_compressed_attention"] * 3,
    "head_dim": 16,
    "num_key_value_heads": 1,
    "q_lora_rank": 48,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_rope_head_dim": 8,
    "n_routed_experts": 4,
    "hc_mult": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}
DYNAMIC_ROPE = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}  # our decoder does not have it
ROTATED_GPT = {name: TinyModel(kind, {**GPT, "rotary_dim": 8}) for name, kind in {"codegen": "CodeGen", "gptj": "GPTJ"}.items()}
ROTATED_SERVED = Version(transformers.__version__) >= Version("5.24")  # since 5.24, these families' attention can be replaced

SERVED = {
    "gemma": TinyModel("Gemma", {"head_dim": 16}),
    "gemma2": TinyModel("Gemma2", GEMMA2),
    "gemma2-dynamic-rope": TinyModel("Gemma2", {**GEMMA2, **DYNAMIC_ROPE}),
    "phi3": TinyModel("Phi3", {"pad_token_id": 0}),
    "phi3-window": TinyModel("Phi3", {"pad_token_id": 0, **WINDOW}),
    "phi3-longrope": TinyModel("Phi3", {"pad_token_id": 0, "original_max_position_embeddings": 128, "rope_parameters": LONGROPE}),
    "phi": TinyModel("Phi", {"partial_rotary_factor": 0.5}),
    "gpt-neox": TinyModel("GPTNeoX", {}),
    "gpt2": TinyModel("GPT2", GPT, class_name="GPT2LMHeadModel"),
    "opt": TinyModel("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "starcoder2": TinyModel("Starcoder2", {**WINDOW}),
    "gpt-bigcode": TinyModel("GPTBigCode", GPT),
    "olmo": TinyModel("Olmo", {}),
    "olmo2": TinyModel("Olmo2", {}),
    "olmo3": TinyModel("Olmo3", {**WINDOW}),
    "cohere": TinyModel("Cohere", {"logit_scale": 0.5}),
    "cohere2": TinyModel("Cohere2", {"logit_scale": 0.5, **WINDOW, "head_dim": 16}),
    "granite": TinyModel("Granite", {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}),
    "stablelm": TinyModel("StableLm", {}),
    "smollm3": TinyModel("SmolLM3", {"pad_token_id": 0, "no_rope_layer_interval": 2}),
    "glm": TinyModel("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": TinyModel("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "nemotron": TinyModel("Nemotron", {}),
    "exaone4": TinyModel("Exaone4", {**WINDOW}),
    "ernie4.5": TinyModel("Ernie4_5", {"head_dim": 16}),
    "seed-oss": TinyModel("SeedOss", {"head_dim": 16}),
    "helium": TinyModel("Helium", {"head_dim": 16}),
    "persimmon": TinyModel("Persimmon", {}),
    "qwen2-moe": TinyModel("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "olmoe": TinyModel("Olmoe", {**EXPERTS}),
    "granite-moe": TinyModel("GraniteMoe", {**EXPERTS}),
    "gpt-oss": TinyModel("GptOss", {**EXPERTS, **WINDOW, "head_dim": 16}),
    "gpt-oss-dynamic-rope": TinyModel("GptOss", {**EXPERTS, **WINDOW, "head_dim": 16, **DYNAMIC_ROPE}),
    "deepseek-v2": TinyModel("DeepseekV2", {**EXPERTS, **MLA, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
    "deepseek-v3": TinyModel(
        "DeepseekV3", {**EXPERTS, **MLA, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    ),
    "llama-gelu": TinyModel("Llama", {"hidden_act": "gelu"}),
    "llama-dynamic-rope": TinyModel("Llama", DYNAMIC_ROPE),
    "llama-half-rotary": TinyModel(
        "Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    ),
    "hunyuan": TinyModel("HunYuanDenseV1", {"head_dim": 16}),
    "arcee": TinyModel("Arcee", {}),
    "minimax-m2": TinyModel("MiniMaxM2", {**EXPERTS, "head_dim": 16}),
    "biogpt": TinyModel("BioGpt", {}),
    "bitnet": TinyModel("BitNet", {}),
    "apertus": TinyModel("Apertus", {}),
    "dots1": TinyModel("Dots1", {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "glm4-moe": TinyModel("Glm4Moe", {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 16}),
    "ernie4.5-moe": TinyModel("Ernie4_5_Moe", {**EXPERTS, "moe_num_experts": 4, "moe_k": 2}),
    "hunyuan-moe": TinyModel("HunYuanMoEV1", {**EXPERTS, "moe_topk": 2, "head_dim": 16}),
    "jetmoe": TinyModel("JetMoe", {**EXPERTS, "kv_channels": 16}),
    "gemma3n-shared": TinyModel(
        "Gemma3n",
        {**GEMMA3N, "num_hidden_layers": 4, "num_kv_shared_layers": 2, **WINDOW, "layer_types": GEMMA3N_LAYERS},
        config="Gemma3nTextConfig",
    ),
    "gemma3n": TinyModel(
        "Gemma3n", {**GEMMA3N, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 3}, config="Gemma3nTextConfig"
    ),
    **(ROTATED_GPT if ROTATED_SERVED else {}),
}

REFUSED = {
    "diffllama": TinyModel("DiffLlama", {}),
    "xglm": TinyModel("XGLM", {"d_model": 64, "ffn_dim": 96, "num_layers": 3, "attention_heads": 4}),
    "lfm2": TinyModel("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "bloom": TinyModel("Bloom", {"n_layer": 3, "n_head": 4}),
    "falcon": TinyModel("Falcon", {}),
    "mpt": TinyModel("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 3}),
    **({} if ROTATED_SERVED else ROTATED_GPT),
    "mamba": TinyModel("Mamba", {}),
    "mamba2": TinyModel("Mamba2", {"num_heads": 8, "head_dim": 16}),
    "falcon-h1": TinyModel("FalconH1", {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8}),
    "qwen3-next": TinyModel("Qwen3Next", {**EXPERTS, "head_dim": 16}),
    "recurrent-gemma": TinyModel("RecurrentGemma", {}),
    "llama4-text": TinyModel(
        "Llama4", {**EXPERTS, "attention_chunk_size": 16, "head_dim": 16, "intermediate_size_mlp": 96}, config="Llama4TextConfig"
    ),
    "deepseek-v4": TinyModel("DeepseekV4", COMPRESSED),
    "minimax-m3": TinyModel(
        "MiniMaxM3VL",
        {**EXPERTS, "layer_types": ["minimax_m3_sparse"] * 3, "head_dim": 16, "index_n_heads": 2, "index_head_dim": 16},
        config="MiniMaxM3VLTextConfig",
    ),
    "deepseek-v3.2": TinyModel("DeepseekV32", {**INDEXED, "index_topk": 8}),
    "glm-5": TinyModel("GlmMoeDsa", {**INDEXED, "index_topk": 8}),
    "t5": TinyModel("T5", {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4}, class_name="T5ForConditionalGeneration"),
    "llava": TinyModel(
        "Llava",
        {"text_config": {**SHAPE, "model_type": "llama"}, "vision_config": VISION, "image_token_id": 3},
        class_name="LlavaForConditionalGeneration",
    ),
}
