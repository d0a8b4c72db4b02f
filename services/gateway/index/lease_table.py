"""Which workers hold a lease in Redis, as last read there. Pure: the time is a parameter, in seconds of a monotonic clock."""

from __future__ import annotations

from services.shared.index.prefix_index import LEASE_TTL_S

GONE_KEPT = 4096  # workers without a lease that are remembered; the longest gone is forgotten first


class LeaseTable:
    """IndexMirror is its one writer. `current`: worker → generation of the lease that it holds."""

    def __init__(self) -> None:
        self.current: dict[str, int] = {}
        self._gone: dict[str, int] = {}  # worker → the last generation that was seen, oldest first
        self._back_at = 0.0

    def came_back(self, now: float) -> None:
        """Redis answers again. It may have lost leases, or have let them expire while no worker could reach it either."""
        self._back_at = now

    def settled(self, now: float) -> bool:
        """Every worker that lives has had the time to renew its lease since Redis came back: an absent lease means what it
        says."""
        return now - self._back_at >= LEASE_TTL_S

    def saw(self, worker: str, generation: int | None) -> bool:
        """What the lease says now, None if there is none. True if that is new."""
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
        """Whether the worker, whose generation is this one as far as the caller knows (0: any), holds its lease. None: that
        cannot be said, as a generation that never had a lease may yet get one."""
        current = self.current.get(worker)
        if current is not None:
            return True if generation in (0, current) else None
        gone = self._gone.get(worker)
        if gone is None or not self.settled(now):
            return None
        return False if generation in (0, gone) else None
