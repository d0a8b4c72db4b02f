"""The hashes of token blocks in the prefix index and the namespaces of cached prefixes, for workers and gateways.

A block has BLOCK_TOKENS tokens; incomplete blocks have no hash. The hash of a block (xxh3, 64 bits) includes the hash of the
block before it. The first block is chained to a root hash of everything that makes equal tokens give different KV: the model,
its revision, the tokenizer, the adapter and the cache salt. The index alone does not reveal token ids. See
docs/design/fleet.md#the-index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

INDEX_VERSION = "1"
BLOCK_TOKENS = 64
HASH_BYTES = 8


def cache_namespace(lora: str, salt: str) -> str:
    """Joins an adapter and a salt. Requests share KV only within one namespace; different pairs give different namespaces."""
    return f"{len(lora)}:{lora}{salt}" if lora or salt else ""


def salt_of(namespace: str) -> str:
    """Returns the salt of a namespace."""
    length, _, rest = namespace.partition(":")
    return rest[int(length) :] if namespace else ""


def root_hash(model: str, revision: str, tokenizer: str, namespace: str) -> bytes:
    """Returns the hash to which the first block is chained, HASH_BYTES long.

    Args:
        namespace: adapter and cache salt, as cache_namespace() joins them.
    """
    chain = xxhash.xxh3_64()
    for part in (INDEX_VERSION, model, revision, tokenizer, namespace):
        data = part.encode()
        chain.update(len(data).to_bytes(4, "little"))
        chain.update(data)
    return chain.digest()


def block_hash(before: bytes, tokens: bytes) -> bytes:
    """Returns the hash of a block, HASH_BYTES long.

    Args:
        before: hash of the block before, or the root hash.
        tokens: BLOCK_TOKENS token ids as little-endian int32.
    """
    return xxhash.xxh3_64_digest(before + tokens)


def block_hashes(root: bytes, ids: Sequence[int]) -> bytes:
    """Returns the concatenated hashes of all full blocks of a prompt."""
    tokens = np.asarray(ids, dtype=np.uint32).astype("<i4", copy=False).tobytes()
    size = BLOCK_TOKENS * 4
    names, link = [], root
    for at in range(0, len(tokens) - size + 1, size):
        link = xxhash.xxh3_64_digest(link + tokens[at : at + size])
        names.append(link)
    return b"".join(names)
