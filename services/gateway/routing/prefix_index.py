"""Which worker generation holds which block: the gateway's mirror of the index in Redis, as bit masks.

An owner is one generation of one worker and has a small number; a block's mask has that bit for each of its owners, one mask for
each tier that somebody has it in. Owners hold blocks because their worker has said so, or, for a short while, because something
was routed there that will leave them on the device.
One writer and no locks: everything here runs on the gateway's event loop.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.shared.index.block_tier import BlockTier

_DEVICE = int(BlockTier.DEVICE)  # members of an enum are slow to compare, millions of times
_Shards = list[dict[bytes, int]]  # masks, by a hash's first byte
_SHARDS = 256  # one dict of millions would stop the event loop for tens of ms whenever it is resized


@dataclass(slots=True, eq=False)
class _Owner:
    """held: its confirmed blocks, and the tier of each as a plain int. until: its speculative ones, and when each ends.

    Dicts of atoms are invisible to the garbage collector, which would walk sets of millions, or dicts of enum members.
    """

    worker: str
    generation: int
    number: int
    bit: int
    live: bool = True
    held: dict[bytes, int] = field(default_factory=dict)
    until: dict[bytes, float] = field(default_factory=dict)


@dataclass(slots=True, order=True)
class _Route:
    """Blocks whose speculation has to be looked at when `until` has come; some may be extended or confirmed by then."""

    until: float
    order: int
    owner: _Owner = field(compare=False)
    hashes: list[bytes] = field(compare=False)


class PrefixIndex:
    """Hashes are HASH_BYTES bytes each, chained: a block's hash implies all blocks before it."""

    def __init__(self, max_speculative: int = 1_000_000) -> None:
        """max_speculative: blocks (times owners) remembered for what was just routed; the oldest go first."""
        self._tiers: list[_Shards] = [[{} for _ in range(_SHARDS)] for _ in BlockTier]
        self._shards = self._tiers[_DEVICE]
        self._num_below = 0  # blocks times owners that are confirmed below the device
        self._live = 0
        self._owners: list[_Owner] = []  # by number; a retired one stays until its number is given out again
        self._numbers: dict[tuple[str, int], int] = {}
        self._retired: deque[_Owner] = deque()
        self._free: list[int] = []
        self._routes: list[_Route] = []  # heap
        self._routed_blocks = 0  # in all of _routes
        self._order = 0
        self._max_speculative = max_speculative

    @property
    def num_blocks(self) -> int:
        """Blocks that somebody holds, is thought to hold, or held before a retirement that is not swept yet; once for each
        tier."""
        return sum(len(masks) for shards in self._tiers for masks in shards)

    @property
    def num_owners(self) -> int:
        """One more than the largest number given out."""
        return len(self._owners)

    @property
    def num_speculative(self) -> int:
        return self._routed_blocks

    @property
    def num_retired(self) -> int:
        """Retired owners that a sweep still has to clear."""
        return len(self._retired)

    def owner(self, worker: str, generation: int) -> int:
        """The owner's number; a new one at first use."""
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
        """-1 for none: never seen, or retired."""
        return self._numbers.get((worker, generation), -1)

    def stored(self, owner: int, hashes: Iterable[bytes], tier: BlockTier = BlockTier.DEVICE) -> None:
        """They are there, and in no other tier of the owner's. Raises KeyError for an owner that is not live."""
        record, level, added = self._of(owner), int(tier), 0
        shards, bit, held, until = self._tiers[level], record.bit, record.held, record.until
        for block in hashes:
            before = held.get(block)
            if before != level:
                held[block] = level
                masks = shards[block[0]]
                mask = masks.get(block)
                masks[block] = bit if mask is None else mask | bit
                added += 1
                if before is not None:
                    self._leave(record, block, before)
            if level == _DEVICE:
                until.pop(block, None)  # known by now: its removal must count at once
        self._num_below += added if level != _DEVICE else 0

    def removed(self, owner: int, hashes: Iterable[bytes]) -> None:
        """Speculation about the same blocks stays: who was just routed there will compute them anew. Raises KeyError."""
        record = self._of(owner)
        held = record.held
        for block in hashes:
            if (level := held.pop(block, None)) is not None:
                self._leave(record, block, level)

    def held(self, owner: int) -> int:
        """Number of confirmed blocks, in any tier; 0 for one that is not live."""
        return len(self._owners[owner].held) if self._is_live(owner) else 0

    def blocks(self, owner: int, tier: BlockTier = BlockTier.DEVICE) -> frozenset[bytes]:
        """Confirmed blocks of that tier, copied."""
        held = self._owners[owner].held if self._is_live(owner) else {}
        return frozenset(block for block, where in held.items() if where == tier)

    def retire(self, owner: int) -> None:
        """All its blocks are void at once; `sweep` frees them, and then the number. Raises KeyError."""
        record = self._of(owner)
        record.live = False
        self._live ^= record.bit
        del self._numbers[record.worker, record.generation]
        self._retired.append(record)

    def sweep(self, budget: int) -> int:
        """Clears up to `budget` blocks of retired owners. Returns how many it did; less than `budget`: nothing is left."""
        done = 0
        while self._retired:
            record = self._retired[0]
            held, until = record.held, record.until
            while (until or held) and done < budget:
                if until:
                    block = until.popitem()[0]
                    if held.get(block) != _DEVICE:
                        self._clear(block, record.bit)
                else:
                    self._leave(record, *held.popitem())
                done += 1
            if until or held:
                break
            self._retired.popleft()
            heapq.heappush(self._free, record.number)
        return done

    def speculate(self, owner: int, hashes: Sequence[bytes], until: float) -> None:
        """The owner is about to hold these blocks. Nothing for an owner that has been retired since it was picked."""
        if not self._is_live(owner):
            return
        record = self._owners[owner]
        ends, shards, bit = record.until, self._shards, record.bit
        new = []
        for block in hashes[: self._max_speculative]:
            end = ends.setdefault(block, until)
            if end is until:
                new.append(block)
                masks = shards[block[0]]
                if masks.setdefault(block, bit) is not bit:  # blocks of one owner share its number object
                    masks[block] |= bit
            elif end < until:
                ends[block] = until
        if new:
            self._remember(until, record, new)
        while self._routed_blocks > self._max_speculative:
            self._forget(self._routes[0].until)

    def expire(self, now: float) -> None:
        """Ends all speculation whose time has come."""
        while self._routes and self._routes[0].until <= now:
            self._forget(now)

    def match(self, hashes: Sequence[bytes]) -> NDArray[np.int64]:
        """int64[num_owners]: leading blocks that each live owner has on its device, confirmed or speculative."""
        shards = self._shards
        return self._leading((shards[block[0]].get(block, 0) for block in hashes), len(hashes))

    def reach(self, hashes: Sequence[bytes]) -> NDArray[np.int64]:
        """int64[tiers, num_owners]: leading blocks that each live owner has in a BlockTier or a faster one: no row has less than
        the one before it. One row, of the device, where nobody has any below."""
        if not self._num_below:
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
        """int64[num_owners]: of how many of the first blocks each live owner is in the mask. found: the masks of `count` blocks,
        or of as many as leave somebody."""
        masks: list[int] = []  # owners that got no further than
        reached: list[int] = []  # so many blocks
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
        return _spread(masks, reached, len(self._owners))

    def _of(self, owner: int) -> _Owner:
        if not self._is_live(owner):
            raise KeyError(f"no live owner {owner}")
        return self._owners[owner]

    def _is_live(self, owner: int) -> bool:
        return 0 <= owner < len(self._owners) and self._owners[owner].live

    def _leave(self, owner: _Owner, block: bytes, level: int) -> None:
        """It is no longer confirmed there."""
        if level != _DEVICE:
            self._num_below -= 1
        elif block in owner.until:
            return
        self._clear(block, owner.bit, level)

    def _clear(self, block: bytes, bit: int, level: int = _DEVICE) -> None:
        masks = self._tiers[level][block[0]]
        mask = masks[block]
        if mask == bit:
            del masks[block]
        else:
            masks[block] = mask ^ bit

    def _remember(self, until: float, owner: _Owner, hashes: list[bytes]) -> None:
        self._order += 1
        heapq.heappush(self._routes, _Route(until, self._order, owner, hashes))
        self._routed_blocks += len(hashes)

    def _forget(self, now: float) -> None:
        """Takes the route that ends first. Of its blocks, those that were extended beyond `now` become a route again."""
        route = heapq.heappop(self._routes)
        self._routed_blocks -= len(route.hashes)
        owner = route.owner
        if not owner.live:
            return  # the sweep has them
        ends, held, bit, shards = owner.until, owner.held, owner.bit, self._shards
        extended = []
        for block in route.hashes:
            end = ends.pop(block, None)
            if end is None or (end <= now and held.get(block) == _DEVICE):
                continue
            if end > now:
                ends[block] = end
                extended.append(block)
            elif (masks := shards[block[0]])[block] == bit:  # what _clear does, without a call per block
                del masks[block]
            else:
                masks[block] ^= bit
        if extended:
            self._remember(min(ends[block] for block in extended), owner, extended)


def _spread(masks: list[int], values: list[int], size: int) -> NDArray[np.int64]:
    """int64[size]: at every bit of a mask that mask's value, 0 at the others. No bit is in two masks."""
    width = (size + 7) // 8
    raw = np.frombuffer(b"".join([mask.to_bytes(width, "little") for mask in masks]), np.uint8)
    which, bits = np.divmod(np.flatnonzero(np.unpackbits(raw, bitorder="little").view(np.bool_)), 8 * width or 1)
    spread = np.zeros(size, np.int64)
    spread[bits] = np.array(values, np.int64)[which]
    return spread
