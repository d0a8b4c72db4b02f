"""The gateway's copy of the prefix index: the blocks of each worker generation, as bit masks.

- An owner is one generation of one worker. It has a small number.
- Each block has a mask per tier. Bit n of the mask is set if the owner with number n has the block in this tier.
- A block of an owner is confirmed if the worker has reported it.
- A block of an owner is speculative if a request was routed to the worker and will leave the block on its device. A block stays
  speculative only for a short time.

MirroredOwners applies the events of workers to the index. Everything runs on the gateway's event loop, without locks.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.shared.index.prefix_index import BlockTier, IndexEvent, end_mark

_DEVICE = int(BlockTier.DEVICE)  # an int, because comparing enum members is slow
_Shards = list[dict[bytes, int]]  # masks by hash, in one dict per first byte of the hash
_SHARDS = 256  # resizing one dict of millions of blocks would stop the event loop for tens of ms


@dataclass(slots=True, eq=False)
class _Owner:
    """A generation of a worker, with its blocks.

    `confirmed` and `speculative` are dicts of bytes and numbers, because the garbage collector does not traverse such dicts. It
    would traverse sets, and dicts with enum members.
    """

    worker: str
    generation: int
    number: int
    bit: int  # 1 << number
    live: bool = True  # False after retire()
    confirmed: dict[bytes, int] = field(default_factory=dict)  # tier of each confirmed block, as an int
    speculative: dict[bytes, float] = field(default_factory=dict)  # time at which each speculative block ends


@dataclass(slots=True, order=True)
class _Route:
    """Speculative blocks of one routed request. Another request may delay their end, and the worker may confirm them."""

    until: float  # time at which expire() removes the blocks that were not extended, in seconds of the event loop
    order: int  # number of the route; decides between routes with equal `until`
    owner: _Owner = field(compare=False)
    hashes: list[bytes] = field(compare=False)


class PrefixIndex:
    """The blocks of all owners. The hash of a block has HASH_BYTES bytes, and covers the block and all blocks before it."""

    def __init__(self, max_speculative: int = 1_000_000) -> None:
        """Makes an empty index.

        Args:
            max_speculative: Largest number of speculative blocks, summed over owners. Above it, the oldest blocks are dropped.
        """
        self._tiers: list[_Shards] = [[{} for _ in range(_SHARDS)] for _ in BlockTier]
        self._shards = self._tiers[_DEVICE]
        self._num_slower = 0  # confirmed blocks in the host and storage tiers, summed over owners
        self._live = 0  # mask of the live owners
        self._owners: list[_Owner] = []  # by number; a retired owner stays until its number is reused
        self._numbers: dict[tuple[str, int], int] = {}  # by worker and generation, of live owners
        self._retired: deque[_Owner] = deque()  # retired owners whose blocks sweep() has not freed
        self._free: list[int] = []  # heap of unused numbers
        self._routes: list[_Route] = []  # heap by `until`
        self._routed_blocks = 0  # number of blocks of all routes
        self._order = 0  # number of the newest route
        self._max_speculative = max_speculative

    @property
    def num_blocks(self) -> int:
        """Number of blocks with an owner, summed over tiers. Includes blocks of retired owners until sweep() frees them."""
        return sum(len(masks) for shards in self._tiers for masks in shards)

    @property
    def num_owners(self) -> int:
        """Largest owner number ever used, plus 1."""
        return len(self._owners)

    @property
    def num_speculative(self) -> int:
        return self._routed_blocks

    @property
    def num_retired(self) -> int:
        """Number of retired owners whose blocks sweep() has not freed."""
        return len(self._retired)

    def owner(self, worker: str, generation: int) -> int:
        """Returns the number of an owner. The first call for an owner assigns the number."""
        known = self._numbers.get((worker, generation))
        if known is not None:
            return known
        number = heapq.heappop(self._free) if self._free else len(self._owners)
        new = _Owner(worker, generation, number, 1 << number)
        if number == len(self._owners):
            self._owners.append(new)
        else:
            self._owners[number] = new
        self._numbers[worker, generation] = number
        self._live |= new.bit
        return number

    def find(self, worker: str, generation: int) -> int:
        """Returns the number of an owner; -1 if it is unknown or retired."""
        return self._numbers.get((worker, generation), -1)

    def stored(self, owner: int, hashes: Iterable[bytes], tier: BlockTier = BlockTier.DEVICE) -> None:
        """Confirms blocks of an owner in a tier, and removes them from its other tiers.

        Raises:
            KeyError: The owner is not live.
        """
        record, level, added = self._live_owner(owner), int(tier), 0
        shards, bit, confirmed, speculative = self._tiers[level], record.bit, record.confirmed, record.speculative
        for block in hashes:
            before = confirmed.get(block)
            if before != level:
                confirmed[block] = level
                masks = shards[block[0]]
                mask = masks.get(block)
                masks[block] = bit if mask is None else mask | bit
                added += 1
                if before is not None:
                    self._unconfirm(record, block, before)
            if level == _DEVICE:
                # A confirmed block is not speculative. Otherwise it would still match after the worker has removed it.
                speculative.pop(block, None)
        self._num_slower += added if level != _DEVICE else 0

    def removed(self, owner: int, hashes: Iterable[bytes]) -> None:
        """Removes confirmed blocks of an owner.

        Speculative blocks with the same hashes stay, because a request that was just routed to the worker computes them again.

        Raises:
            KeyError: The owner is not live.
        """
        record = self._live_owner(owner)
        confirmed = record.confirmed
        for block in hashes:
            if (level := confirmed.pop(block, None)) is not None:
                self._unconfirm(record, block, level)

    def num_confirmed(self, owner: int) -> int:
        """Returns the number of confirmed blocks of an owner in all tiers; 0 if it is not live."""
        return len(self._owners[owner].confirmed) if self._is_live(owner) else 0

    def blocks(self, owner: int, tier: BlockTier = BlockTier.DEVICE) -> frozenset[bytes]:
        """Returns a copy of the confirmed blocks of an owner in a tier."""
        confirmed = self._owners[owner].confirmed if self._is_live(owner) else {}
        return frozenset(block for block, where in confirmed.items() if where == tier)

    def retire(self, owner: int) -> None:
        """Immediately excludes the blocks of an owner from matches. sweep() later frees the blocks and the number.

        Raises:
            KeyError: The owner is not live.
        """
        record = self._live_owner(owner)
        record.live = False
        self._live ^= record.bit
        del self._numbers[record.worker, record.generation]
        self._retired.append(record)

    def sweep(self, budget: int) -> int:
        """Frees up to `budget` blocks of retired owners. Returns their number, which is below `budget` if no block is left."""
        done = 0
        while self._retired:
            record = self._retired[0]
            confirmed, speculative = record.confirmed, record.speculative
            while (speculative or confirmed) and done < budget:
                if speculative:
                    block = speculative.popitem()[0]
                    if confirmed.get(block) != _DEVICE:
                        self._clear(block, record.bit)
                else:
                    self._unconfirm(record, *confirmed.popitem())
                done += 1
            if speculative or confirmed:
                break
            self._retired.popleft()
            heapq.heappush(self._free, record.number)
        return done

    def speculate(self, owner: int, hashes: Sequence[bytes], until: float) -> None:
        """Adds speculative blocks of an owner. They expire at time `until`. Has no effect if the owner is not live."""
        if not self._is_live(owner):
            return
        record = self._owners[owner]
        ends, shards, bit = record.speculative, self._shards, record.bit
        new = []
        for block in hashes[: self._max_speculative]:
            end = ends.setdefault(block, until)
            if end is until:
                new.append(block)
                masks = shards[block[0]]
                # setdefault() returns the object `bit` itself only if the block had no mask before.
                if masks.setdefault(block, bit) is not bit:
                    masks[block] |= bit
            elif end < until:
                ends[block] = until
        if new:
            self._add_route(until, record, new)
        while self._routed_blocks > self._max_speculative:
            self._pop_route(self._routes[0].until)

    def expire(self, now: float) -> None:
        """Removes the speculative blocks whose end has passed."""
        while self._routes and self._routes[0].until <= now:
            self._pop_route(now)

    def match(self, hashes: Sequence[bytes]) -> NDArray[np.int64]:
        """Returns int64[num_owners]: the number of leading blocks that each live owner has on its device.

        Confirmed and speculative blocks count.
        """
        shards = self._shards
        return self._leading((shards[block[0]].get(block, 0) for block in hashes), len(hashes))

    def match_ends(self, hashes: Sequence[bytes]) -> NDArray[np.int64]:
        """Returns int64[num_owners]: the number of leading blocks after which a prefix hit of each live owner can end.

        Owners mark these blocks with end_mark(). The result is 0 for owners without marks. Only blocks on the device count.
        """
        return self._leading_ends(hashes, self._tiers[:1])

    def reach_ends(self, hashes: Sequence[bytes]) -> NDArray[np.int64]:
        """Returns int64[tiers, num_owners]: match_ends() with the blocks and marks in each BlockTier and in faster ones.

        The result has the rows of reach().
        """
        tiers = self._tiers if self._num_slower else self._tiers[:1]
        return np.stack([self._leading_ends(hashes, tiers[: number + 1]) for number in range(len(tiers))])

    def _leading_ends(self, hashes: Sequence[bytes], tiers: Sequence[_Shards]) -> NDArray[np.int64]:
        """Returns int64[num_owners]: the number of leading blocks, in these tiers, up to the last one with a mark."""
        left = self._live
        found: list[int] = []  # owners with a mark, by number of blocks - 1
        for block in hashes:
            left &= _owners_of(block, tiers)
            if not left:
                break
            found.append(left & _owners_of(end_mark(block), tiers))
        masks: list[int] = []
        reached: list[int] = []
        done = 0  # owners whose last marked block is found
        for depth in range(len(found), 0, -1):
            if mask := found[depth - 1] & ~done:
                masks.append(mask)
                reached.append(depth)
                done |= mask
        return _value_per_bit(masks, reached, len(self._owners))

    def reach(self, hashes: Sequence[bytes]) -> NDArray[np.int64]:
        """Returns int64[tiers, num_owners]: the number of leading blocks that each live owner has in a BlockTier or a faster one.

        The values of an owner do not decrease from tier to tier. If no owner has a block in the host or storage tier, the result
        has only the row of the device.
        """
        if not self._num_slower:
            return self.match(hashes)[np.newaxis]
        device, host, storage = self._tiers
        found: tuple[list[int], list[int], list[int]] = [], [], []
        left = self._live
        for block in hashes:
            at = block[0]
            mask = device[at].get(block, 0)
            found[0].append(mask)
            mask |= host[at].get(block, 0)
            found[1].append(mask)
            mask |= storage[at].get(block, 0)
            found[2].append(mask)
            left &= mask
            if not left:
                break
        return np.stack([self._leading(masks, len(hashes)) for masks in found])

    def _leading(self, found: Iterable[int], count: int) -> NDArray[np.int64]:
        """Returns int64[num_owners]: the number of leading masks that have the bit of each live owner.

        Args:
            found: The masks of `count` blocks, or of fewer if no owner has the next block.
        """
        masks: list[int] = []  # each mask has the owners with the same number of leading blocks
        reached: list[int] = []  # number of leading blocks for each entry of `masks`
        before = self._live
        for depth, owners in enumerate(found):
            mask = owners & before
            if mask != before:
                masks.append(before ^ mask)
                reached.append(depth)
                if not mask:
                    break
                before = mask
        else:
            masks.append(before)
            reached.append(count)
        return _value_per_bit(masks, reached, len(self._owners))

    def _live_owner(self, owner: int) -> _Owner:
        if not self._is_live(owner):
            raise KeyError(f"no live owner {owner}")
        return self._owners[owner]

    def _is_live(self, owner: int) -> bool:
        return 0 <= owner < len(self._owners) and self._owners[owner].live

    def _unconfirm(self, owner: _Owner, block: bytes, level: int) -> None:
        """Updates the masks after the removal of a confirmed block from a tier of an owner."""
        if level != _DEVICE:
            self._num_slower -= 1
        elif block in owner.speculative:
            return
        self._clear(block, owner.bit, level)

    def _clear(self, block: bytes, bit: int, level: int = _DEVICE) -> None:
        masks = self._tiers[level][block[0]]
        mask = masks[block]
        if mask == bit:
            del masks[block]
        else:
            masks[block] = mask ^ bit

    def _add_route(self, until: float, owner: _Owner, hashes: list[bytes]) -> None:
        self._order += 1
        heapq.heappush(self._routes, _Route(until, self._order, owner, hashes))
        self._routed_blocks += len(hashes)

    def _pop_route(self, now: float) -> None:
        """Removes the route with the earliest end. Its blocks that end after `now` become a new route."""
        route = heapq.heappop(self._routes)
        self._routed_blocks -= len(route.hashes)
        owner = route.owner
        if not owner.live:
            return  # sweep() frees the blocks
        ends, confirmed, bit, shards = owner.speculative, owner.confirmed, owner.bit, self._shards
        extended = []
        for block in route.hashes:
            end = ends.pop(block, None)
            if end is None or (end <= now and confirmed.get(block) == _DEVICE):
                continue
            if end > now:
                ends[block] = end
                extended.append(block)
            elif (masks := shards[block[0]])[block] == bit:  # as in _clear(), but without a call per block
                del masks[block]
            else:
                masks[block] ^= bit
        if extended:
            self._add_route(min(ends[block] for block in extended), owner, extended)


def _owners_of(name: bytes, tiers: Sequence[_Shards]) -> int:
    """Returns the mask of the owners that have a block or mark in one of the tiers."""
    mask = 0
    for shards in tiers:
        mask |= shards[name[0]].get(name, 0)
    return mask


def _value_per_bit(masks: list[int], values: list[int], size: int) -> NDArray[np.int64]:
    """Returns int64[size]: for each bit, the value of the mask that has the bit, or 0 if none has it. Masks share no bits."""
    width = (size + 7) // 8
    raw = np.frombuffer(b"".join([mask.to_bytes(width, "little") for mask in masks]), np.uint8)
    which, bits = np.divmod(np.flatnonzero(np.unpackbits(raw, bitorder="little").view(np.bool_)), 8 * width or 1)
    spread = np.zeros(size, np.int64)
    spread[bits] = np.array(values, np.int64)[which]
    return spread


class Applied(enum.Enum):
    """Result of MirroredOwners.apply()."""

    NEW = enum.auto()  # the event was applied
    OLD = enum.auto()  # the event had been applied before, and was ignored
    GAP = enum.auto()  # the event was applied, but events before it are missing
    FOREIGN = enum.auto()  # the event was ignored, because its generation is not mirrored


@dataclass(slots=True)
class _MirroredGeneration:
    """The mirrored generation of one worker."""

    generation: int
    number: int  # owner number in the index
    seq: int | None  # number of the last applied event, or None if it is unknown


class MirroredOwners:
    """The mirrored generation of each worker. Applies the workers' events to the index.

    The events of a generation are numbered without gaps. The owners of the index are retired only by this class.
    """

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
