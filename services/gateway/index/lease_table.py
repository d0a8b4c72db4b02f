"""The workers' leases in Redis, as last read. Times are seconds of a monotonic clock, given by the caller."""

from __future__ import annotations

from services.shared.index.prefix_index import LEASE_TTL_S

GONE_KEPT = 4096  # remembered workers without a lease; the one whose lease ended first is dropped first


class LeaseTable:
    """The leases of all workers. Only IndexMirror writes them."""

    def __init__(self) -> None:
        self.current: dict[str, int] = {}  # worker → generation of its lease
        self._gone: dict[str, int] = {}  # worker → last generation, for workers without a lease, the oldest loss first
        self._back_at = 0.0  # time at which Redis responded again

    def came_back(self, now: float) -> None:
        """Notes that Redis responds again. Leases may be missing, because Redis lost them or workers could not renew them."""
        self._back_at = now

    def settled(self, now: float) -> bool:
        """Returns whether all live workers have had time to renew their leases since Redis responded again.

        Only then does a missing lease mean that its worker has ended.
        """
        return now - self._back_at >= LEASE_TTL_S

    def saw(self, worker: str, generation: int | None) -> bool:
        """Notes the generation of a worker's lease, or None without a lease. Returns whether it has changed."""
        before = self.current.get(worker)
        if before == generation:
            return False
        if generation is not None:
            self.current[worker] = generation
            self._gone.pop(worker, None)
            return True
        self._gone[worker] = self.current.pop(worker)
        while len(self._gone) > GONE_KEPT:
            del self._gone[next(iter(self._gone))]
        return True

    def alive(self, worker: str, generation: int, now: float) -> bool | None:
        """Returns whether a worker of a generation holds its lease.

        Args:
            generation: Generation that the caller knows; 0: any.

        Returns:
            None if this is unknown: Redis has not settled, or the generation has had no lease yet and may get one.
        """
        current = self.current.get(worker)
        if current is not None:
            return True if generation in (0, current) else None
        gone = self._gone.get(worker)
        if gone is None or not self.settled(now):
            return None
        return False if generation in (0, gone) else None
