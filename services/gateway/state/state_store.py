"""What clients have the service keep: responses and conversations, each of one API key. The port; redis_store.py lasts. Files
and batches are in stores of their own, file_store.py and batch_store.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class StoreAway(Exception):
    """It cannot be reached, or does not answer in time. Whether what was asked for has happened is not known."""


class Changed(Exception):
    """Somebody else has written the record meanwhile."""


@dataclass(frozen=True, slots=True)
class Record:
    """version: how often it has been written."""

    content: bytes
    version: int


class StateStore(Protocol):
    """owner: whose records, see owner_of(). name: a record's, of one owner. Every method raises StoreAway."""

    async def get(self, owner: str, names: Sequence[str]) -> list[Record | None]:
        """In this order; None for what there is not. Records that are read begin to live anew."""

    async def put(self, owner: str, name: str, content: bytes, version: int | None = None) -> bool:
        """Whether it is kept: what is, outlives the store's restart. False: the owner's quota is full, or it is too large.
        version: that it must have by now, 0 for none yet; None: any. Raises Changed."""

    async def delete(self, owner: str, name: str) -> bool:
        """Whether there was one."""
