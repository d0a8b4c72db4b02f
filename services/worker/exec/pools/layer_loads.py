"""Loads pages into the pools, group after group of layers, on a thread that runs in parallel with the steps."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.core.contracts.transfers import EARLY_S, I32
from services.worker.exec.pools.arrivals import Arrivals, LayerGroups
from services.worker.exec.streams.cuda_streams import Arrival, NeverCame, Streams

SAYS_BYTES = 16 << 20  # least size of a load whose rate predicts the duration of the next one


class LayerLoads:
    """Loads pages.

    For a device, all groups are queued on its stream at once; on a host, the thread copies one group after another.
    """

    def __init__(self, streams: Streams, arrivals: Arrivals) -> None:
        self._streams, self._arrivals = streams, arrivals
        self._bytes_s = 0.0  # rate of the last large load; 0 before the first one

    def load(
        self, bring: Callable[[int], None], pages: I32, groups: LayerGroups, num_bytes: int, tell: Callable[[], None]
    ) -> tuple[float, bool]:
        """Loads pages and returns when all groups are complete.

        Args:
            bring: copies a group, on the current stream.
            pages: int32[n], pages of the pool.
            groups: groups of layers.
            num_bytes: size of the load.
            tell: called before the last group is complete, when the rest is expected to take less than EARLY_S. From then on,
                steps wait for the load.

        Returns:
            The duration in seconds, and whether `tell` was called.

        Raises:
            NeverCame: the load failed after `tell` was called.
            Exception: the load failed before, and no step waits for it.
        """
        count, told = len(groups.layers), False
        arrival = self._streams.arrival(count)
        try:
            if not self._streams.on_host:
                for group in range(count):
                    bring(group)
                    arrival.came(group)
            for group in range(count):
                if not told and num_bytes * (count - group) <= self._bytes_s * EARLY_S * count:
                    self._arrivals.add(pages, groups, arrival)
                    told = True
                    tell()
                self._wait_for(arrival, group, bring)
        except Exception as error:  # errors of a driver, or of a host without memory
            if not told:
                raise
            arrival.failed(error)
            raise NeverCame(f"pages that steps wait for did not come: {error!r}") from error
        seconds = arrival.seconds
        if num_bytes >= SAYS_BYTES:
            self._bytes_s = num_bytes / max(seconds, 1e-9)
        return seconds, told

    def _wait_for(self, arrival: Arrival, group: int, bring: Callable[[int], None]) -> None:
        if self._streams.on_host:
            bring(group)
            arrival.came(group)
        else:
            arrival.settle(group)
