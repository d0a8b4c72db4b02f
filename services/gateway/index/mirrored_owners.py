"""Workers' generations in the PrefixIndex as the event stream tells of them: one per worker, numbered events without gaps."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.gateway.routing.prefix_index import PrefixIndex
from services.shared.index.block_tier import BlockTier
from services.shared.index.prefix_index import IndexEvent


class Applied(enum.Enum):
    NEW = enum.auto()
    OLD = enum.auto()  # it had been applied before
    GAP = enum.auto()  # applied, but events before it are missing
    FOREIGN = enum.auto()  # of a generation that is not mirrored


@dataclass(slots=True)
class _Owner:
    """seq: of the last event, None until the first one after its blocks were read."""

    generation: int
    number: int
    seq: int | None


class MirroredOwners:
    """Writes confirmed blocks into the index; the only one that retires owners there."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._owners: dict[str, _Owner] = {}

    def number(self, worker: str) -> int:
        """In the index; -1 if none of its generations is mirrored."""
        owner = self._owners.get(worker)
        return -1 if owner is None else owner.number

    def generation(self, worker: str) -> int | None:
        owner = self._owners.get(worker)
        return None if owner is None else owner.generation

    def generations(self) -> dict[str, int]:
        return {worker: owner.generation for worker, owner in self._owners.items()}

    def adopt(self, worker: str, generation: int, seq: int | None) -> int:
        """Mirrors this generation from nothing, in place of any other and of what was known of itself. Its number."""
        self.retire(worker)
        number = self._index.owner(worker, generation)
        self._owners[worker] = _Owner(generation, number, seq)
        return number

    def retire(self, worker: str) -> None:
        """O(1). Nothing happens if it is not mirrored."""
        owner = self._owners.pop(worker, None)
        if owner is not None:
            self._index.retire(owner.number)

    def apply(self, event: IndexEvent) -> Applied:
        owner = self._owners.get(event.worker)
        if owner is None or owner.generation != event.generation:
            return Applied.FOREIGN
        if owner.seq is not None and event.seq <= owner.seq:
            return Applied.OLD
        gap = owner.seq is not None and event.seq > owner.seq + 1
        owner.seq = event.seq
        self._index.stored(owner.number, event.stored)
        self._index.removed(owner.number, event.removed)
        self._index.stored(owner.number, event.host, BlockTier.HOST)
        self._index.stored(owner.number, event.storage, BlockTier.STORAGE)
        return Applied.GAP if gap else Applied.NEW
