"""Writes tiny embedding models: transformers' files, and the files of sentence-transformers that define the pooling."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.exec.tiny_models import SHAPE

MODULE = "sentence_transformers.models."
LEGACY_SWITCHES = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "lasttoken": "pooling_mode_lasttoken"}


@dataclass(frozen=True)
class EmbeddingFolder:
    """A random embedding model, with or without the files of sentence-transformers."""

    family: str  # name of the architecture
    pooling: str  # pooling by its name in sentence-transformers; "" for a folder without the files of sentence-transformers
    options: dict[str, Any] = field(default_factory=dict)  # further fields of the model's config
    normalize: bool = True  # whether the vectors are normalized
    saved_as: str = "Model"  # suffix of the architecture's class in config.json
    legacy: bool = True  # whether the pooling is stored as one switch per mode, as in older sentence-transformers

    def build(self, folder: Path) -> Any:
        """Writes the model to `folder` and returns it as transformers' model without a head, in float32 and eval mode."""
        torch.manual_seed(11)
        config = getattr(transformers, f"{self.family}Config")(**{**SHAPE, "pad_token_id": 0, **self.options})
        model = getattr(transformers, self.family + self.saved_as)(config).to(torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "LayerNorm.weight")):
                torch.nn.init.normal_(parameter.data, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
        model.save_pretrained(folder)
        if self.pooling:
            self._write_modules(folder)
        return (model if self.saved_as == "Model" else model.base_model).eval()

    def _write_modules(self, folder: Path) -> None:
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if self.normalize else [])]
        modules = [{"idx": i, "name": str(i), "path": path, "type": MODULE + kind} for i, (path, kind) in enumerate(kinds)]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        size = {"word_embedding_dimension": SHAPE["hidden_size"]}
        switches = {switch: mode == self.pooling for mode, switch in LEGACY_SWITCHES.items()}
        chosen = switches if self.legacy else {"pooling_mode": self.pooling}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({**size, **chosen}))


FOLDERS = {
    "qwen3-last": EmbeddingFolder("Qwen3", "lasttoken", {"head_dim": 16, "tie_word_embeddings": True}, saved_as="ForCausalLM"),
    "qwen3-base-last": EmbeddingFolder("Qwen3", "lasttoken", {"head_dim": 16}, legacy=False),
    "llama-mean": EmbeddingFolder("Llama", "mean", legacy=False),
    "mistral-last": EmbeddingFolder("Mistral", "lasttoken", {"sliding_window": 24}),
    "gpt-neox-last": EmbeddingFolder("GPTNeoX", "lasttoken"),
    "bert-cls": EmbeddingFolder("Bert", "cls"),
    "bert-mean": EmbeddingFolder("Bert", "mean", normalize=False),
    "bert-masked-mean": EmbeddingFolder("Bert", "mean", saved_as="ForMaskedLM"),
    "roberta-mean": EmbeddingFolder("Roberta", "mean", {"pad_token_id": 1, "max_position_embeddings": 66}),
    "xlm-roberta-cls": EmbeddingFolder("XLMRoberta", "cls", {"pad_token_id": 1, "max_position_embeddings": 66}),
    "mpnet-mean": EmbeddingFolder("MPNet", "mean", {"pad_token_id": 1, "max_position_embeddings": 66}),
    "distilbert-mean": EmbeddingFolder("DistilBert", "mean", {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}),
    "modernbert-cls": EmbeddingFolder(
        "ModernBert", "cls", {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1}
    ),
}
