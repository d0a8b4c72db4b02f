"""The tiers of KV below the device: their content, copies to them, and imports from them.

This package has only ids, page keys and counts. The executor has the bytes of the pages. A worker without lower tiers and without
reads from other workers has no Tiers object.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

from rootstock_llm.services.worker.core.contracts.transfers import NO_USE, Fact, PageOperation, Tier, WritePolicy
from rootstock_llm.services.worker.core.kv.backup_queue import BackupQueue
from rootstock_llm.services.worker.core.kv.cache_events import CacheEventLog
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.kv.other_tiers import RequestKey, TierStats, Wanted
from rootstock_llm.services.worker.core.tiers.backups import Backups
from rootstock_llm.services.worker.core.tiers.host_index import HostIndex
from rootstock_llm.services.worker.core.tiers.imports import Imports
from rootstock_llm.services.worker.core.tiers.lanes import Lanes
from rootstock_llm.services.worker.core.tiers.page_keys import PageKeys
from rootstock_llm.services.worker.core.tiers.prefetches import Prefetches
from rootstock_llm.services.worker.core.tiers.rates import Rates
from rootstock_llm.services.worker.core.tiers.stored_units import StoredUnits
from rootstock_llm.services.worker.core.tiers.tier_blocks import TierBlocks

SELECTIVE_HITS = 2  # number of admissions on a path after which `write_through_selective` copies the path
LOOKED_AT_PAGES = 64  # length of the prefix in pages for which stats() compares reading and computing
OPERATION_BYTES = 16 << 20  # largest number of bytes of one operation, unless a single page is larger
# Largest number of bytes of one load from the host. A load copies layer by layer, and a step can begin before its last layers.
LOAD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class TierLimits:
    """The sizes and settings of the tiers."""

    host_pages: int  # size of the host tier in pages
    has_storage: bool  # whether a storage tier is below the host tier
    page_bytes: int  # bytes of KV of one page
    page_size: int  # tokens of one page
    policy: WritePolicy
    salt_pages: int  # largest number of host pages of one salt; 0: no limit
    stored_salt_pages: int  # largest number of pages of one salt in the storage; 0: no limit
    hold_s: float  # seconds for which prefetched pages stay pinned after the last message about them
    num_parts: tuple[int, ...] = ()  # number of parts of a unit outside of the device, by cache group


class Tiers:
    """The tiers of one worker; implements OtherTiers. The scheduler calls `prefetches` directly."""

    def __init__(self, limits: TierLimits, keys: PageKeys, events: CacheEventLog | None = None, revision: str = "") -> None:
        """Starts with empty tiers. Facts then report the content of a storage.

        Args:
            limits: sizes and settings.
            keys: maker of page keys.
            events: log of the blocks in lower tiers; None if no prefix index reads it.
            revision: revision of the weights.
        """
        self.queue = _queue_of(limits.policy) if limits.host_pages else BackupQueue(False, False, 0)
        self._keys, self._host = keys, HostIndex(limits.host_pages, limits.salt_pages)
        self._stored: set[bytes] = set()  # page keys in the storage
        stored = self._stored if limits.has_storage else None
        self.rates = Rates(limits.page_bytes, limits.page_size)
        self._use = NO_USE  # size and counters of the storage in its last fact
        self._landed_at = -math.inf  # time at which the last load with an early fact was complete
        ids = count(1)
        at_once, load_at_once = (max(1, size // max(limits.page_bytes, 1)) for size in (OPERATION_BYTES, LOAD_BYTES))
        self._lanes = Lanes(self.rates)
        units = StoredUnits(keys, limits.num_parts)
        self._imports = Imports(keys, self._host, stored, self.rates, self._lanes, at_once, load_at_once, ids, units)
        self.prefetches = Prefetches(self._imports, limits.hold_s)
        self._blocks = None
        if events is not None and limits.host_pages:
            reported = self._stored if events.reports_storage else ()
            self._blocks = TierBlocks(events, self._host, reported, limits.page_size, revision)
        salt_pages = limits.stored_salt_pages
        self._backups = Backups(self.queue, keys, self._host, stored, self._blocks, at_once, ids, units, salt_pages)

    @property
    def num_running(self) -> int:
        """Number of operations that read or write device pages. Writes to the storage do neither."""
        return len(self._lanes) + self._backups.num_copying

    @property
    def num_storing(self) -> int:
        """Number of host pages that are written to the storage or wait for it."""
        return self._backups.num_storing

    @property
    def num_quarantined(self) -> int:
        return self._lanes.num_pages

    def num_quarantined_units(self, index: int) -> int:
        return self._lanes.num_units(index)

    def consider(self, wanted: Wanted, memory: KVMemory) -> bool:
        return self._imports.consider(wanted, memory)

    def waiting(self) -> set[int]:
        return self._imports.waiting() - self.prefetches.seqs()

    def admitted(self, seq: int, keys: list[bytes], hit: int) -> None:
        self._imports.admitted(seq, keys, hit)

    def cancel(self, seq: int) -> None:
        self._imports.cancel(seq)

    def take_freed(self) -> bool:
        """Returns whether pins have been released since the last call, so that pages may be evictable."""
        return self._imports.take_freed()

    def take_prefetched(self, request_key: RequestKey, seq: int) -> Counter[str]:
        return self.prefetches.take(request_key, seq)

    def release_pins(self) -> bool:
        return self._imports.release_pins()

    def end_all(self) -> None:
        """Discards the results of all operations on device pages and ends all waits, because the pages will be forgotten."""
        self._imports.end_all()
        self._backups.forget_copies(pages_too=True)

    def plan(self, memory: KVMemory, now: float, in_flight: bool, begins: bool) -> tuple[tuple[PageOperation, ...], list[int]]:
        """Begins operations.

        Args:
            memory: the owner of the device pages.
            now: present time.
            in_flight: whether a step is uncommitted.
            begins: whether copies may begin. False while the loop waits until no operation uses device pages.

        Returns:
            The new operations, and the seqs of the requests that stop waiting for an import.
        """
        memory.settle_units()  # so that units that no step reads may be lent
        if now >= self.prefetches.next_expiry:
            self.prefetches.expire(now)
        imports, moved = self._imports.plan(memory, now, in_flight)
        ahead = self.prefetches.seqs() if moved else set()
        ready = [seq for seq in moved if seq not in ahead]
        copies = self._backups.plan(memory) if begins and self._host.num_pages else []
        return (*imports, *copies), ready

    def loads_since(self, then: float) -> bool:
        """Returns whether a load may have delayed a step that was planned at `then`.

        If so, the time of the step does not tell how long its computation took.
        """
        return self._lanes.num_landing > 0 or self._landed_at >= then

    def step_ended(self, extended: int, rows: int, seconds: float, now: float) -> None:
        """Records the time of a step, see Rates.computed()."""
        self.rates.computed(extended, rows, seconds)
        self._lanes.step_ended(now)

    def ended(self, fact: Fact, now: float) -> bool:
        """Applies a fact: the end of an operation, or changes of the storage.

        Returns:
            Whether an operation on device pages has ended, so that more pages may be available.
        """
        if fact.use is not None:
            self._use = fact.use
        if fact.loaded is not None:
            self._lanes.landed(*fact.loaded, now)
            self._landed_at = now
        self._stored.difference_update(fact.dropped)
        for key in fact.dropped:
            self._backups.gone(key)
        if not self._backups.is_void(fact):
            self._stored.update(fact.stored)
            self._name(fact)
        before = self.num_running
        known = fact.op_id < 0 or self._imports.ended(fact, now) or self._backups.ended(fact)
        assert known, "a fact belongs to a running operation"
        return self.num_running < before

    def replace_weights(self, revision: str) -> None:
        """Forgets the host pages of the old weights.

        Later requests do not find pages of the old weights in a storage. The storage deletes such pages later, by their age.
        """
        self.clear((Tier.HOST,))
        if self._blocks is not None:
            self._blocks.replace_weights(revision)

    def _name(self, fact: Fact) -> None:
        """Records the blocks of pages that the storage has gained."""
        if self._blocks is not None:
            self._blocks.changed(fact.stored)
            self._blocks.add(fact.blocks)

    def clear(self, tiers: Sequence[Tier]) -> int:
        """Forgets the pages of the given tiers and returns their number. The executor deletes the pages of a storage."""
        count = 0
        if Tier.HOST in tiers:
            self._backups.forget_waiting()
            self._backups.forget_copies(pages_too=False)
            count += self._host.clear()
        if Tier.STORAGE in tiers:
            self._backups.forget_storing()
            count += len(self._stored)
            gone = list(self._stored)
            self._stored.clear()
            for key in gone:
                self._backups.gone(key)
        return count

    def forget_salt(self, salt: str, tiers: Sequence[Tier]) -> int:
        """Forgets the pages of one salt, or the pages without a salt if `salt` is empty. Returns the number of host pages.

        The page keys in the storage stay until the executor reports their deletion.
        """
        count, tag = 0, self._keys.tag(salt)
        if Tier.HOST in tiers:
            self._backups.forget_copies(pages_too=False, tag=tag)
            count += self._host.forget_salt(tag)
        if Tier.HOST in tiers or Tier.STORAGE in tiers:
            self._backups.forget_waiting(tag)
        return count

    def tag(self, salt: str) -> bytes:
        """Returns the tag by which the storage knows the pages of the salt."""
        return self._keys.tag(salt)

    def retired(self, names: Collection[str]) -> None:
        """Ends the imports of trees whose salt was deleted. `names` are the names of the trees before the deletion."""
        self._imports.end_trees(names)

    def forget_tree(self) -> None:
        """Forgets everything about the device pages, which are reset. No operation on them may run."""
        assert not self.num_running, "an operation reads or writes the pages"
        self.prefetches.clear()
        self._imports.end_all()
        self._backups.clear()

    def violations(self) -> list[str]:
        """Returns one sentence per broken invariant, for checks."""
        out = []
        if not self.num_running and self._host.num_writing:
            out.append("host pages are being written although no operation writes them")
        if not self.num_running and not self.num_storing and self._host.num_pinned:
            out.append("host pages are pinned although no operation reads them")
        if self._blocks is not None:
            out += self._blocks.violations()
        return out

    def stats(self) -> TierStats:
        imports, backups, host = self._imports, self._backups, self._host
        return TierStats(
            host_pages=host.num_pages,
            host_pages_used=host.num_cached,
            host_salts=host.num_salts,
            host_over_quota_pages_total=host.over_quota_total,
            storage_pages=len(self._stored),
            storage_bytes=self._use.num_bytes,
            storage_salts=self._use.num_salts,
            storage_over_quota_pages_total=self._use.over_quota_pages,
            storage_deleted_pages_total=self._use.deleted_pages,
            num_importing=len(self.waiting()),
            backed_up_pages_total=backups.backed_up_pages_total,
            stored_pages_total=backups.stored_pages_total,
            lost_pages_total=backups.lost_pages_total,
            unstored_pages_total=backups.unstored_pages_total,
            loaded_pages_total=imports.imported_pages_total[Tier.HOST],
            fetched_pages_total=imports.imported_pages_total[Tier.STORAGE],
            pulled_pages_total=imports.imported_pages_total[Tier.PEER],
            prefetched_pages_total=imports.prefetched_pages_total,
            refused_pulls_total=imports.refused_pulls_total,
            load_bytes_s=self.rates.bytes_s(Tier.HOST),
            fetch_bytes_s=self.rates.bytes_s(Tier.STORAGE),
            pull_bytes_s=self.rates.bytes_s(Tier.PEER),
            pulls_lose=self.rates.loses(Tier.PEER, LOOKED_AT_PAGES),
            host_saves=self.rates.saves(Tier.HOST, LOOKED_AT_PAGES),
            storage_saves=self.rates.saves(Tier.STORAGE, LOOKED_AT_PAGES),
            recomputed_pages_total=imports.recomputed_pages_total,
            given_up_operations_total=self._lanes.given_up_total,
            failed_operations_total=imports.failed_total + backups.failed_total,
            host_evicted_pages_total=host.evicted_total,
        )


def _queue_of(policy: WritePolicy) -> BackupQueue:
    selective = policy is WritePolicy.WRITE_THROUGH_SELECTIVE
    return BackupQueue(policy is WritePolicy.WRITE_BACK, policy is WritePolicy.WRITE_THROUGH, SELECTIVE_HITS if selective else 0)
