"""Converts a Qwen3 checkpoint into a quantized GGUF file: gguf_writer.py MODEL FORMAT OUT

FORMAT is Q8_0 or Q4_0. Writes the checkpoint's bf16 weights as GGUF, quantizes this file with llama.cpp, and removes it.
The vocabulary is copied, because llama.cpp does not load a model without one. Requests have token ids, so no text is encoded.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

FORMATS = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


def tensors(model: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the bits, uint16, of each bf16 tensor of the checkpoint."""
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        data = np.memmap(file, np.uint8, "r", offset=8 + size)
        for name, tensor in header.items():
            if name != "__metadata__":
                assert tensor["dtype"] == "BF16", f"{name} has dtype {tensor['dtype']}; only BF16 is converted"
                begin, end = tensor["data_offsets"]
                yield name, data[begin:end].view(np.uint16).reshape(tensor["shape"])


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])


def add_vocabulary(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    """Adds the tokens of tokenizer.json, and unused tokens up to the number of rows of the embedding."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    names = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    names |= special
    kinds = [
        gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL if i in names else gguf.TokenType.UNUSED
        for i in range(config["vocab_size"])
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(config["vocab_size"])])
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])


def write(model: Path, out: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "qwen3":
        sys.exit(f"the model type is {config['model_type']}; only qwen3 is converted to GGUF")
    writer = gguf.GGUFWriter(out, "qwen3")
    add_config(writer, config)
    add_vocabulary(writer, model, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, bits in tensors(model):
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert renamed is not None, f"GGUF has no name for {name}"
        if bits.ndim == 1:  # norms, which llama.cpp reads as float32
            writer.add_tensor(renamed, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(renamed, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, out: Path, name: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FORMATS[name]
    if status := llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        sys.exit(f"llama.cpp could not quantize {source} to {name}: status {status}")


if __name__ == "__main__":
    folder, name, place = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    write(folder, place / "bf16.gguf")
    quantize(place / "bf16.gguf", place / f"{name}.gguf", name)
    (place / "bf16.gguf").unlink()
