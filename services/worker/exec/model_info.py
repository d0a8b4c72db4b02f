"""What the rest of the worker may know of a loaded model. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """context_len: tokens, prompt and output together. dtype: of weights and KV. weight_bytes: resident, packed copies
    included. kv_bytes_per_token: over all layers, keys and values. The KV pool holds num_pages * page_size tokens."""

    architecture: str
    context_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_pages: int
    page_size: int
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
