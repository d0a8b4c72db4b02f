"""Makes attention masks for windowed layers, for the demo scripts and tests. transformers' code of Qwen3.5 makes none."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache
from transformers.masking_utils import (
    create_causal_mask,
    create_recurrent_attention_mask,
    create_sliding_window_causal_mask,
)


def add_window_masks(model: Any) -> None:
    """Makes the windowed layers of a transformers model read only their window. Does nothing for models without such layers.

    transformers' Qwen3.5 computes `sliding_attention` only if the attention mask is a dict of masks by layer type.
    """
    if model.config.model_type == "qwen3_5_text" and "sliding_attention" in model.config.layer_types:
        model.model.register_forward_pre_hook(_with_masks, with_kwargs=True)


def _with_masks(decoder: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call of the decoder, with a dict of masks by layer type in place of the padding mask."""
    assert not args, "transformers passes all arguments by name"
    cache = given.get("cache")
    if cache is None and given.get("use_cache"):
        cache = DynamicCache(config=decoder.config)
    common = {
        "config": decoder.config,
        "inputs_embeds": decoder.embed_tokens(given["input_ids"]),
        "attention_mask": given.get("attention_mask"),
        "cache": cache,
        "position_ids": given.get("position_ids"),
    }
    masks = {
        "full_attention": create_causal_mask(**common),
        "sliding_attention": create_sliding_window_causal_mask(**common),
        "linear_attention": create_recurrent_attention_mask(**common),
    }
    return args, given | {"attention_mask": masks, "cache": cache}
