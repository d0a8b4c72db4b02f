"""Page keys: keyed 256-bit digests that name pages in tiers and between workers.

- The digest of a page covers the key of the previous page, or the root, and the tokens of the page.
- The root covers the model's layout (dtype, page size, layers, heads), the tree's name (weights, adapter, salt) and the cache
  group.
- Without the secret, a key can neither be made nor compared with tokens. KV is served by these keys. The 64-bit block names of
  the prefix index are only hints for routing.
- A tag precedes the digest. It is a keyed digest of the salt, so that a store can count and delete the pages of one salt without
  knowing the salt.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from hashlib import blake2b

from rootstock_llm.services.worker.core.kv.radix_cache import salt_of_tree
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES

TAG_BYTES = 8
DIGEST_BYTES = 32
KEY_BYTES = TAG_BYTES + DIGEST_BYTES
SECRET_BYTES = 32
UNSALTED = bytes(TAG_BYTES)  # tag of KV that was computed without a salt; all clients share it, and it has no quota
_OF_SALTS = b"salt"  # purpose of the digests of salts, which digests of pages do not have


class PageKeys:
    """Makes the page keys of one model on one worker."""

    def __init__(self, secret: bytes, layout: bytes, page_size: int) -> None:
        """Prepares the digests.

        Args:
            secret: bytes[SECRET_BYTES]. Workers with a common store have the same secret.
            layout: bytes that are equal for two pools whose pages are exchangeable.
            page_size: tokens of a page.
        """
        assert len(secret) == SECRET_BYTES, "a short secret can be guessed"
        self._secret = secret
        self._layout = layout
        self._page_bytes = page_size * TOKEN_BYTES

    def tag(self, salt: str) -> bytes:
        """Returns bytes[TAG_BYTES], the tag of a cache salt. The empty salt has the tag UNSALTED."""
        return blake2b(salt.encode(), digest_size=TAG_BYTES, key=self._secret, person=_OF_SALTS).digest() if salt else UNSALTED

    def root(self, tree: str, group: int = 0) -> bytes:
        """Returns the root of a tree, which precedes its first page. `tree` is a name from tree_name()."""
        parts = (self._layout, tree.encode(), str(group).encode())
        packed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return self.tag(salt_of_tree(tree)) + self._digest(packed)

    def extend(self, keys: list[bytes], root: bytes, tokens: bytes, end: int) -> None:
        """Appends the keys of further pages.

        Args:
            keys: page keys of the first pages, to which the others are appended.
            root: root of the tree.
            tokens: int32 as bytes, from the prompt's beginning.
            end: page after the last one that gets a key.
        """
        assert end * self._page_bytes <= len(tokens), "whole pages have keys"
        link = keys[-1] if keys else root
        for at in range(len(keys) * self._page_bytes, end * self._page_bytes, self._page_bytes):
            link = link[:TAG_BYTES] + self._digest(link + tokens[at : at + self._page_bytes])
            keys.append(link)

    def after(self, link: bytes, tokens: bytes) -> list[bytes]:
        """Returns the keys of the whole pages of `tokens`, which follow the page with the key `link`."""
        keys: list[bytes] = []
        self.extend(keys, link, tokens, len(tokens) // self._page_bytes)
        return keys

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_BYTES, key=self._secret).digest()


def tag_of(key: bytes) -> bytes:
    return key[:TAG_BYTES]


def leading(keys: Sequence[bytes], held: Container[bytes]) -> int:
    """Returns the number of first keys that `held` contains."""
    count = 0
    for key in keys:
        if key not in held:
            break
        count += 1
    return count
