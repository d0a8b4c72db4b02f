"""Hashes a block of tokens to its name in the prefix index (docs/design/fleet.md#the-index).

A block is BLOCK_TOKENS tokens, full blocks only. Its hash is chained over the prefix, and the chain begins with everything
that makes equal tokens mean different KV: the model and its revision, the tokenizer, the adapter, the cache salt. xxh3, 64
bits; hashes reveal no token ids to whoever has only the index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

INDEX_VERSION = "1"
BLOCK_TOKENS = 64
HASH_BYTES = 8


def root_hash(model: str, revision: str, tokenizer: str, namespace: str) -> bytes:
    """What the first block is chained to: HASH_BYTES bytes. namespace: adapter and cache salt, as the worker joins them."""
    chain = xxhash.xxh3_64()
    for part in (INDEX_VERSION, model, revision, tokenizer, namespace):
        data = part.encode()
        chain.update(len(data).to_bytes(4, "little"))
        chain.update(data)
    return chain.digest()


def block_hash(before: bytes, tokens: bytes) -> bytes:
    """before: the hash of the block before, or a root's. tokens: BLOCK_TOKENS little-endian int32. HASH_BYTES bytes."""
    return xxhash.xxh3_64_digest(before + tokens)


def block_hashes(root: bytes, ids: Sequence[int]) -> bytes:
    """The hashes of all full blocks of a prompt, HASH_BYTES each, one after the other."""
    tokens = np.asarray(ids, dtype=np.uint32).astype("<i4", copy=False).tobytes()
    size = BLOCK_TOKENS * 4
    names, link = [], root
    for at in range(0, len(tokens) - size + 1, size):
        link = xxhash.xxh3_64_digest(link + tokens[at : at + size])
        names.append(link)
    return b"".join(names)
