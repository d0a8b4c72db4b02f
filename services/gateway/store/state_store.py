"""The interface to stored responses and conversations, each of which belongs to one API key.

redis_store.py implements it. Files and batches have their own stores, file_store.py and batch_store.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class StoreAway(Exception):
    """The store cannot be reached, or does not respond within the time limit. The call may or may not have taken effect."""


class Changed(Exception):
    """The record does not have the expected version, because another call has written it. The caller reads the record again."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A stored record."""

    content: bytes
    version: int  # number of writes of this record


class StateStore(Protocol):
    """Stored records, by owner (see owner_of()) and name. Every method raises StoreAway if the store cannot be reached."""

    async def get(self, owner: str, names: Sequence[str]) -> list[StoredRecord | None]:
        """Returns for each name, in order, its record or None if it has none. Reading a record restarts the record's lifetime."""

    async def put(self, owner: str, name: str, content: bytes, version: int | None = None) -> bool:
        """Writes a record, which survives a restart of the store.

        Args:
            version: Required version of the stored record. 0: the record must not exist. None: no requirement.

        Returns:
            False if the owner's quota is full or the content is larger than MAX_RECORD_BYTES. Nothing is written then.

        Raises:
            Changed: The record has another version.
        """

    async def delete(self, owner: str, name: str) -> bool:
        """Deletes a record. Returns whether it existed."""
