"""Whether KV is sooner here by being read or by being computed, by what both have taken lately. All times in seconds."""

from __future__ import annotations

from services.worker.core.contracts.transfers import Tier

FADES = 0.7  # of a measured rate, with each further measurement
FORGIVES = 1.05  # of a rate, each time that it was too low
LARGE_TOKENS = 128  # of a step of extends alone: what a step takes beside them does not count for much then
FIRST_BYTES_S = {Tier.HOST: 4e9, Tier.STORAGE: 1e9, Tier.PEER: 1e10}  # taken for true until something was read
LATENCY_S = {
    Tier.HOST: 1e-3,
    Tier.STORAGE: 5e-3,
    Tier.PEER: 5e-3,
}  # of the first of some operations, its way through the loop's turns with it
MOST_LANES = 64  # other workers whose rates are known
UNKNOWN_S = 1.0  # that reading may take while nobody knows what computing takes


class Rates:
    """page_bytes: of one page's KV. lane: the address of the other worker that is read, "" for the tiers of this one. What one
    worker has taken says nothing of the others."""

    def __init__(self, page_bytes: int, page_size: int) -> None:
        self._page_bytes, self._page_size = page_bytes, page_size
        self._bytes_s = dict(FIRST_BYTES_S)
        self._lanes: dict[str, float] = {}  # bytes/s by lane, in the order in which they were measured
        self._token_s: float | None = None

    def computed(self, extended: int, rows: int, seconds: float) -> None:
        """A step has computed so many tokens of extends, and so many rows of others. Small steps, and those that do something
        else, say little of what a token costs."""
        if extended >= LARGE_TOKENS and not rows and seconds > 0:
            self._token_s = _faded(self._token_s, seconds / extended)

    def moved(self, source: Tier, pages: int, seconds: float, lane: str = "") -> None:
        """An operation has read so many pages; what it failed at is not in them."""
        if pages and seconds > 0:
            self._measured(source, lane, _faded(self.bytes_s(source, lane), pages * self._page_bytes / seconds))

    def given_up(self, source: Tier, pages: int, seconds: float, lane: str = "") -> None:
        """An operation has run for so long and is not done: it is no faster than that."""
        if seconds > 0:
            self._measured(source, lane, min(self.bytes_s(source, lane), pages * self._page_bytes / seconds))

    def bytes_s(self, source: Tier, lane: str = "") -> float:
        """Without a lane: of other workers that of the fastest."""
        if source is not Tier.PEER:
            return self._bytes_s[source]
        return self._lanes.get(lane, FIRST_BYTES_S[source]) if lane else max(self._lanes.values(), default=FIRST_BYTES_S[source])

    def reading_s(self, source: Tier, pages: int, lane: str = "") -> float:
        return LATENCY_S[source] + pages * self._page_bytes / self.bytes_s(source, lane)

    def computing_s(self, pages: int) -> float:
        return UNKNOWN_S if self._token_s is None else pages * self._page_size * self._token_s

    def reading_pays(self, source: Tier, pages: int, lane: str = "", forgives: bool = True) -> bool:
        """Each no that forgives makes the next yes likelier: what is never read is never measured again. forgives: once for a
        request, not for each look."""
        pays = self._token_s is None or self.reading_s(source, pages, lane) < self.computing_s(pages)
        if not pays and forgives:
            self._measured(source, lane, self.bytes_s(source, lane) * FORGIVES)
        return pays

    def loses(self, source: Tier, pages: int) -> bool:
        """Reading so many has been slower lately than computing them; of other workers, from each of them."""
        return self._token_s is not None and self.reading_s(source, pages) >= self.computing_s(pages)

    def saves(self, source: Tier, pages: int) -> float | None:
        """The share of the time to compute so many pages that reading them saves, 0 to 1. None: nobody knows what computing
        takes."""
        if self._token_s is None:
            return None
        return max(0.0, 1.0 - self.reading_s(source, pages) / self.computing_s(pages))

    def is_over(self, source: Tier, pages: int, elapsed: float, rest: int, lane: str = "") -> bool:
        """Of an operation that has run for so long and is not done: computing its pages and the `rest` behind them would be
        sooner than reading all that. An operation that is late is taken to be late by as much again."""
        left = max(self.reading_s(source, pages, lane) - elapsed, 0.0) or elapsed
        behind = self.reading_s(source, rest, lane) if rest else 0.0
        return left + behind > self.computing_s(pages + rest)

    def _measured(self, source: Tier, lane: str, bytes_s: float) -> None:
        """Lanes of long ago are forgotten."""
        if source is not Tier.PEER:
            self._bytes_s[source] = bytes_s
            return
        self._lanes.pop(lane, None)
        self._lanes[lane] = bytes_s
        if len(self._lanes) > MOST_LANES:
            del self._lanes[next(iter(self._lanes))]


def _faded(before: float | None, now: float) -> float:
    return now if before is None else FADES * before + (1 - FADES) * now
