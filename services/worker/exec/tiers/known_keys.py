"""The page keys of a shared storage that one worker knows, by tag and time of writing.

Only RedisPageStore uses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import nsmallest

from rootstock_llm.services.worker.core.tiers.page_keys import UNSALTED, tag_of


class KnownKeys:
    """Page keys in the order in which they were added. Beyond `most` keys, the first ones are dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[bytes, None] = {}
        self._of_tag: dict[bytes, dict[bytes, int | None]] = {}  # time of writing by tag and key, in ms, None if not known
        self._of_no_age: dict[bytes, dict[bytes, None]] = {}  # keys without a known time, by tag; no entry is empty

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._keys))

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_salts(self) -> int:
        return len(self._of_tag) - (UNSALTED in self._of_tag)

    def num_of(self, tag: bytes) -> int:
        return len(self._of_tag.get(tag, ()))

    def add(self, keys: Iterable[bytes], written_ms: int | None) -> list[bytes]:
        """Appends keys. Drops the first keys beyond `most` keys and returns them."""
        for key in keys:
            self.drop(key)
            self._keys[key] = None
            self._of_tag.setdefault(tag_of(key), {})[key] = written_ms
            if written_ms is None:
                self._of_no_age.setdefault(tag_of(key), {})[key] = None
        forgotten: list[bytes] = []
        while len(self._keys) > self._most:
            forgotten.append(oldest := next(iter(self._keys)))
            self.drop(oldest)
        return forgotten

    def drop(self, key: bytes) -> None:
        """Removes a key if it is known."""
        if key not in self._keys:
            return
        del self._keys[key]
        tag = tag_of(key)
        del self._of_tag[tag][key]
        if not self._of_tag[tag]:
            del self._of_tag[tag]
        self._has_age(tag, key)

    def of_no_age(self, tag: bytes) -> list[bytes]:
        """Returns the keys of a tag whose time of writing is not known."""
        return list(self._of_no_age.get(tag, ()))

    def learn(self, written_ms: Mapping[bytes, int]) -> None:
        """Records times of writing of known keys, in ms."""
        for key, when in written_ms.items():
            self._of_tag[tag_of(key)][key] = when
            self._has_age(tag_of(key), key)

    def oldest(self, tag: bytes, count: int) -> list[bytes]:
        """Returns at most `count` keys of a tag, oldest first by time of writing."""
        own = self._of_tag.get(tag, {})
        return nsmallest(count, own, key=lambda key: own[key] or 0)

    def _has_age(self, tag: bytes, key: bytes) -> None:
        """Removes a key from those without a known time."""
        of_no_age = self._of_no_age.get(tag, {})
        of_no_age.pop(key, None)
        if not of_no_age:
            self._of_no_age.pop(tag, None)
