"""Applies events to the PrefixIndex. Each worker has one mirrored generation, whose events are numbered without gaps."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.gateway.routing.prefix_index import PrefixIndex
from services.shared.index.block_tier import BlockTier
from services.shared.index.prefix_index import IndexEvent


class Applied(enum.Enum):
    """Result of applying an event."""

    NEW = enum.auto()
    OLD = enum.auto()  # not applied again
    GAP = enum.auto()  # applied, but earlier events are missing
    FOREIGN = enum.auto()  # not applied, because its generation is not mirrored


@dataclass(slots=True)
class _MirroredGeneration:
    """The mirrored generation of one worker."""

    generation: int
    number: int  # owner number in the index
    seq: int | None  # number of the last event; None before the first event after the reading of the blocks


class MirroredOwners:
    """The mirrored generations of all workers. It applies events to the index, and only this class retires owners."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._owners: dict[str, _MirroredGeneration] = {}

    def number(self, worker: str) -> int:
        """Returns the owner number of a worker; -1 if no generation is mirrored."""
        owner = self._owners.get(worker)
        return -1 if owner is None else owner.number

    def generation(self, worker: str) -> int | None:
        owner = self._owners.get(worker)
        return None if owner is None else owner.generation

    def generations(self) -> dict[str, int]:
        return {worker: owner.generation for worker, owner in self._owners.items()}

    def adopt(self, worker: str, generation: int, seq: int | None) -> int:
        """Starts to mirror a generation without any blocks, and retires the worker's previous owner.

        Args:
            seq: Number of the last applied event; None if it is unknown.

        Returns:
            The owner number.
        """
        self.retire(worker)
        number = self._index.owner(worker, generation)
        self._owners[worker] = _MirroredGeneration(generation, number, seq)
        return number

    def retire(self, worker: str) -> None:
        """Stops mirroring a worker, in O(1). Has no effect if it is not mirrored."""
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
