"""The names of pages that are kept or sent: 256-bit digests, keyed, chained over all that decides what a page of KV holds.

A page's digest is of the page before it, or of its root, and of its tokens; the root is of the model's layout (dtype, page size,
layers, heads), of the tree's name (weights, adapter, salt) and of the cache group. Who does not know the secret can neither
make a key nor tell tokens by one. Unlike the 64-bit block names of the prefix index, which are hints for routing, keys are what
KV is served by. In front of the digest stands a tag, a keyed digest of the salt alone: whoever keeps pages tells by it which are
of one salt, for quotas and deletion, and not which salt it is.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from hashlib import blake2b

from services.worker.core.contracts.tree_name import salt_of_tree
from services.worker.core.kv.tree_node import TOKEN_BYTES

TAG_BYTES = 8
DIGEST_BYTES = 32
KEY_BYTES = TAG_BYTES + DIGEST_BYTES
SECRET_BYTES = 32
UNSALTED = bytes(TAG_BYTES)  # the tag of what was computed without a salt: everybody's, and of no quota
_OF_SALTS = b"salt"  # the purpose of these digests: no page's has one


class PageKeys:
    """secret: bytes[SECRET_BYTES], shared by those who share a store. layout: what makes two pools' pages exchangeable."""

    def __init__(self, secret: bytes, layout: bytes, page_size: int) -> None:
        assert len(secret) == SECRET_BYTES, "a short secret can be guessed"
        self._secret = secret
        self._layout = layout
        self._page_bytes = page_size * TOKEN_BYTES

    def tag(self, salt: str) -> bytes:
        """bytes[TAG_BYTES]. salt: a cache salt, "" for none."""
        return blake2b(salt.encode(), digest_size=TAG_BYTES, key=self._secret, person=_OF_SALTS).digest() if salt else UNSALTED

    def root(self, tree: str, group: int = 0) -> bytes:
        """tree: a tree's name, see contracts/tree_name.py."""
        parts = (self._layout, tree.encode(), str(group).encode())
        packed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return self.tag(salt_of_tree(tree)) + self._digest(packed)

    def extend(self, keys: list[bytes], root: bytes, tokens: bytes, end: int) -> None:
        """Appends keys of the pages of `tokens` (int32 as bytes, from the prompt's beginning) up to page `end`, behind those that
        are there."""
        assert end * self._page_bytes <= len(tokens), "whole pages have keys"
        link = keys[-1] if keys else root
        for at in range(len(keys) * self._page_bytes, end * self._page_bytes, self._page_bytes):
            link = link[:TAG_BYTES] + self._digest(link + tokens[at : at + self._page_bytes])
            keys.append(link)

    def after(self, link: bytes, tokens: bytes) -> list[bytes]:
        """Keys of the whole pages of `tokens` that follow the page with the key `link`."""
        keys: list[bytes] = []
        self.extend(keys, link, tokens, len(tokens) // self._page_bytes)
        return keys

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_BYTES, key=self._secret).digest()


def tag_of(key: bytes) -> bytes:
    return key[:TAG_BYTES]


def leading(keys: Sequence[bytes], held: Container[bytes]) -> int:
    """How many of them, from the first on, `held` contains."""
    count = 0
    for key in keys:
        if key not in held:
            break
        count += 1
    return count
