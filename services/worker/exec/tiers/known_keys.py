"""The page keys that one worker knows to be in a shared storage, by tag and time of writing. Only RedisPageStore uses them.

A tag is the part of a page key that is derived from the cache salt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import nsmallest

from rootstock_llm.services.worker.core.tiers.page_keys import UNSALTED, tag_of


class KnownKeys:
    """Page keys in the order in which they were added. If there are more than `most` keys, the first ones are dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[bytes, None] = {}
        self._of_tag: dict[bytes, dict[bytes, int | None]] = {}  # by tag, then by key: time of writing in ms, None if unknown
        self._without_time: dict[
            bytes, dict[bytes, None]
        ] = {}  # by tag: keys whose time of writing is unknown; no entry is empty

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._keys))

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_salts(self) -> int:
        return len(self._of_tag) - (UNSALTED in self._of_tag)

    def num_with_tag(self, tag: bytes) -> int:
        return len(self._of_tag.get(tag, ()))

    def add(self, keys: Iterable[bytes], written_ms: int | None) -> list[bytes]:
        """Appends keys. If there are more than `most` keys afterwards, drops the first ones and returns them.

        Args:
            written_ms: time of writing in ms, None if it is unknown.
        """
        for key in keys:
            self.drop(key)
            self._keys[key] = None
            self._of_tag.setdefault(tag_of(key), {})[key] = written_ms
            if written_ms is None:
                self._without_time.setdefault(tag_of(key), {})[key] = None
        dropped: list[bytes] = []
        while len(self._keys) > self._most:
            dropped.append(oldest := next(iter(self._keys)))
            self.drop(oldest)
        return dropped

    def drop(self, key: bytes) -> None:
        """Removes a key if it is known."""
        if key not in self._keys:
            return
        del self._keys[key]
        tag = tag_of(key)
        del self._of_tag[tag][key]
        if not self._of_tag[tag]:
            del self._of_tag[tag]
        self._remove_without_time(tag, key)

    def keys_without_time(self, tag: bytes) -> list[bytes]:
        """Returns the keys of a tag whose time of writing is unknown."""
        return list(self._without_time.get(tag, ()))

    def set_times(self, written_ms: Mapping[bytes, int]) -> None:
        """Sets the times of writing of known keys, in ms."""
        for key, when in written_ms.items():
            self._of_tag[tag_of(key)][key] = when
            self._remove_without_time(tag_of(key), key)

    def oldest(self, tag: bytes, count: int) -> list[bytes]:
        """Returns at most `count` keys of a tag: those without a time of writing, then the others, oldest first."""
        times = self._of_tag.get(tag, {})
        return nsmallest(count, times, key=lambda key: times[key] or 0)

    def _remove_without_time(self, tag: bytes, key: bytes) -> None:
        """Removes a key from those whose time of writing is unknown."""
        keys = self._without_time.get(tag, {})
        keys.pop(key, None)
        if not keys:
            self._without_time.pop(tag, None)
