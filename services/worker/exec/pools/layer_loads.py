"""Loads of pages into the pools, group after group of layers, on one thread beside the steps."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.core.contracts.transfers import EARLY_S, I32
from services.worker.exec.pools.arrivals import Arrivals, LayerGroups
from services.worker.exec.streams.cuda_streams import Arrival, NeverCame, Streams

SAYS_BYTES = 16 << 20  # of a load that is large enough to say how fast the next one is


class LayerLoads:
    """A device puts all groups on its stream at once, and reads on by itself; a host's thread copies one after the other."""

    def __init__(self, streams: Streams, arrivals: Arrivals) -> None:
        self._streams, self._arrivals = streams, arrivals
        self._bytes_s = 0.0  # of the last large load; 0: there was none

    def load(
        self, bring: Callable[[int], None], pages: I32, groups: LayerGroups, num_bytes: int, tell: Callable[[], None]
    ) -> tuple[float, bool]:
        """bring: has a group copied, on the current stream. tell: called while some are on their way, once what is left takes
        less than EARLY_S by what the load before has taken: from then on steps wait for it. Returns when all are there: seconds,
        and whether it was called. Raises NeverCame behind tell(), anything else before it; then no step waits."""
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
        except Exception as error:  # of any kind: whatever a driver raises, or a host without memory
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
