"""Page keys: keyed 256-bit digests by which tiers and other workers identify pages.

- The digest of a page covers the page key of the previous page, or the root for the first page, and the tokens of the page.
- The root covers the model's layout (dtype, page size, layers, heads) and the tree's name (weights, adapter, salt).
- A unit of a cache group is stored as parts, each of the size of a page. The digest of a part covers the page key of the unit's
  page, the cache group and the number of the part.
- Page keys depend on a secret. Without it, tokens cannot be tested against a page key.
- KV is read by page key, never by the 64-bit block names of the prefix index, which only serve routing.
- A tag precedes the digest. The tag is a keyed digest of the salt, so that a storage can count and delete the pages of one salt
  without knowing the salt.
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
UNSALTED = bytes(TAG_BYTES)  # tag of KV without a salt, which all clients share and which has no quota
_OF_SALTS = b"salt"  # personalization of the digests of salts, so that they differ from digests of pages
_OF_PARTS = b"part"  # personalization of the digests of parts of units
_OF_PAGES = b"0"  # a constant part of each root


class PageKeys:
    """Makes the page keys of one model on one worker."""

    def __init__(self, secret: bytes, layout: bytes, page_size: int) -> None:
        """Prepares the digests.

        Args:
            secret: bytes[SECRET_BYTES]. Workers with a common storage have the same secret.
            layout: bytes that describe a page's layout. If they are equal, two pools can exchange pages.
            page_size: tokens of a page.
        """
        assert len(secret) == SECRET_BYTES, "the secret has SECRET_BYTES bytes"
        self._secret = secret
        self._layout = layout
        self._page_bytes = page_size * TOKEN_BYTES

    def tag(self, salt: str) -> bytes:
        """Returns bytes[TAG_BYTES], the tag of a cache salt. The empty salt has the tag UNSALTED."""
        return blake2b(salt.encode(), digest_size=TAG_BYTES, key=self._secret, person=_OF_SALTS).digest() if salt else UNSALTED

    def root(self, tree: str) -> bytes:
        """Returns the root of a tree, which precedes its first page. `tree` is a name from tree_name()."""
        parts = (self._layout, tree.encode(), _OF_PAGES)
        packed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return self.tag(salt_of_tree(tree)) + self._digest(packed)

    def extend(self, keys: list[bytes], root: bytes, tokens: bytes, end: int) -> None:
        """Appends the page keys of the pages from len(keys) to end - 1.

        Args:
            keys: page keys of the prompt's first pages. Changed in place.
            root: root of the tree.
            tokens: tokens from the prompt's beginning, as bytes of int32.
            end: number of page keys after the call.
        """
        assert end * self._page_bytes <= len(tokens), "only whole pages have page keys"
        link = keys[-1] if keys else root
        for at in range(len(keys) * self._page_bytes, end * self._page_bytes, self._page_bytes):
            link = link[:TAG_BYTES] + self._digest(link + tokens[at : at + self._page_bytes])
            keys.append(link)

    def parts(self, page_key: bytes, group: int, count: int) -> tuple[bytes, ...]:
        """Returns the keys of the first parts of the unit that a page owns in a cache group.

        Args:
            page_key: page key of the page.
            group: PageOperation.group.
            count: number of parts.
        """
        tag, found = page_key[:TAG_BYTES], []
        for part in range(count):
            data = page_key + group.to_bytes(4, "little") + part.to_bytes(4, "little")
            found.append(tag + blake2b(data, digest_size=DIGEST_BYTES, key=self._secret, person=_OF_PARTS).digest())
        return tuple(found)

    def after(self, link: bytes, tokens: bytes) -> list[bytes]:
        """Returns the page keys of the whole pages of `tokens`, which follow the page with the page key or root `link`."""
        keys: list[bytes] = []
        self.extend(keys, link, tokens, len(tokens) // self._page_bytes)
        return keys

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_BYTES, key=self._secret).digest()


def tag_of(key: bytes) -> bytes:
    return key[:TAG_BYTES]


def leading(keys: Sequence[bytes], cached: Container[bytes]) -> int:
    """Returns the number of first keys that `cached` contains without a gap."""
    count = 0
    for key in keys:
        if key not in cached:
            break
        count += 1
    return count
