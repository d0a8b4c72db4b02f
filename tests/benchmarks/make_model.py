"""Writes a checkpoint with random weights: python -m tests.benchmarks.make_model build/bench/qwen3-0.6b --shape qwen3-0.6b

The checkpoint has the shape, dtype and files of a published model, so that speed can be measured without that model. Like the
published tokenizer, the generated one decodes every id below the special tokens to text. So a completion of random ids streams
normally.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPACE = "Ġ"  # a space in the alphabet of byte-level BPE
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a decoder."""

    hidden: int
    intermediate: int  # of an expert, if the model has experts
    layers: int
    heads: int
    kv_heads: int
    tied: bool  # whether the LM head shares the embedding's weights
    head_dim: int = 128
    vocab: int = 151_936  # all ids; ids after the special tokens are padding
    text_tokens: int = 151_643  # number of text ids, which are 0 to text_tokens - 1; the special tokens follow
    max_positions: int = 40_960
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    std: float = 0.02  # standard deviation of the random weights
    family: str = "qwen3"  # key of CONFIGS
    experts: int = 0  # experts of each layer, with `intermediate` features; 0 for a dense decoder
    chosen: int = 0  # experts of each token


CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "qwen3": Qwen3Config,
    "qwen2": Qwen2Config,
    "llama": LlamaConfig,
    "qwen3.5": Qwen3_5TextConfig,
    "gpt-oss": GptOssConfig,
    "qwen3-moe": Qwen3MoeConfig,
}
DEFAULT_SHAPE = "qwen3-0.6b"
SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, tied=True, head_dim=16, vocab=1024, text_tokens=1000, max_positions=2048),
    "tiny-wide": Shape(256, 512, 2, 4, 2, tied=True, head_dim=64, vocab=1024, text_tokens=1000, max_positions=2048),
    "smollm2-360m": Shape(
        *(960, 2560, 32, 15, 5),
        tied=True,
        head_dim=64,
        vocab=49_152,
        text_tokens=49_149,
        max_positions=8192,
        rope_theta=1e5,
        norm_eps=1e-5,
        family="llama",
    ),
    "qwen2.5-0.5b": Shape(896, 4864, 24, 14, 2, tied=True, head_dim=64, max_positions=32_768, family="qwen2"),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, tied=True),
    "qwen3.5-0.8b": Shape(
        *(1024, 3584, 24, 8, 2),
        tied=True,
        head_dim=256,
        vocab=248_320,
        text_tokens=248_044,
        max_positions=262_144,
        rope_theta=1e7,
        family="qwen3.5",
    ),
    "moe-1b": Shape(
        *(1024, 768, 12, 16, 8),
        tied=True,
        vocab=32_000,
        text_tokens=31_997,
        max_positions=32_768,
        family="qwen3-moe",
        experts=32,
        chosen=4,
    ),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": Shape(4096, 12_288, 36, 32, 8, tied=False),
    # gpt-oss-20b at about a third of its width: 1.0 B parameters, windows of 128 tokens in every other layer
    "gpt-oss-1b": Shape(
        *(1024, 768, 12, 32, 4),
        tied=True,
        head_dim=64,
        vocab=32_768,
        text_tokens=32_765,
        rope_theta=150_000.0,
        norm_eps=1e-5,
        family="gpt-oss",
        experts=32,
        chosen=4,
    ),
    "qwen3-14b": Shape(5120, 17_408, 40, 40, 8, tied=False),
}


def config_of(shape: Shape) -> PreTrainedConfig:
    further: dict[str, Any] = {"max_window_layers": shape.layers} if shape.family.startswith("qwen") else {}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.family == "qwen3.5":
        further, rope["partial_rotary_factor"] = {"linear_num_value_heads": 16}, 0.25
    elif shape.family == "qwen3-moe":
        further = {"num_experts": shape.experts, "num_experts_per_tok": shape.chosen, "norm_topk_prob": True}
        further["moe_intermediate_size"] = shape.intermediate
    elif shape.family == "gpt-oss":
        further = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.chosen}
        yarn = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}
        rope |= {"rope_type": "yarn", **yarn}
    return CONFIGS[shape.family](
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        **further,
        rope_parameters=rope,
        rms_norm_eps=shape.norm_eps,
        initializer_range=shape.std,
        tie_word_embeddings=shape.tied,
        bos_token_id=shape.text_tokens,
        eos_token_id=shape.text_tokens + SPECIALS.index("<|im_end|>"),
        pad_token_id=shape.text_tokens,
        dtype=torch.bfloat16,
    )


def random_model(shape: Shape, seed: int) -> PreTrainedModel:
    """Returns a bf16 model on the CPU with random parameters. Its buffers are undefined, so it can be saved but not run."""
    config = config_of(shape)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    torch.nn.Module.to(model, torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # yields a tied weight once
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # 1.0 for the weight of an RMS norm
            else:
                # Drawn in float32, because bf16 has too few values for a normal distribution.
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, shape.std, generator=generator))
    return model


def merges() -> Iterator[tuple[str, str]]:
    """Yields merges of two letters (the first may be a space), then merges of two of the resulting tokens.

    Each merge adds one token.
    """
    pairs = [(first, second) for first in LETTERS + SPACE for second in LETTERS]
    yield from pairs
    inner = [first + second for first, second in pairs if first != SPACE]
    for first, second in pairs:
        yield from ((first + second, last) for last in inner)


def make_tokenizer(shape: Shape) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with exactly shape.text_tokens tokens, followed by the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    chosen = list(islice(merges(), shape.text_tokens - len(alphabet)))
    vocab = {token: i for i, token in enumerate([*alphabet, *(first + second for first, second in chosen)])}
    assert len(vocab) == shape.text_tokens, "the merges must give exactly text_tokens distinct tokens"
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=chosen))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        model_max_length=shape.max_positions,
        clean_up_tokenization_spaces=False,
    )


def generation_config(shape: Shape) -> GenerationConfig:
    eos = [shape.text_tokens + SPECIALS.index(name) for name in ("<|im_end|>", "<|endoftext|>")]
    return GenerationConfig(eos_token_id=eos, pad_token_id=shape.text_tokens, do_sample=False)  # type: ignore[no-untyped-call]


def write_model(folder: Path, shape: Shape, seed: int = 0) -> None:
    """Writes the checkpoint, replacing an existing one. A temporary folder is renamed, so that `folder` is always complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as parent:
        new = Path(parent) / folder.name
        model = random_model(shape, seed)
        model.generation_config = generation_config(shape)
        model.save_pretrained(new)
        make_tokenizer(shape).save_pretrained(new)
        for file in new.iterdir():
            file.chmod(0o644)  # a server in a container may read the files as another user
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make_model", description="Write a checkpoint with random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default=DEFAULT_SHAPE)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    start = time.perf_counter()
    write_model(args.folder, SHAPES[args.shape], args.seed)
    size = sum(f.stat().st_size for f in args.folder.iterdir())
    print(f"{args.folder}: {args.shape}, {size / 1e6:.0f} MB in {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
