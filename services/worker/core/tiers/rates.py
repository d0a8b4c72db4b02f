"""Estimates whether reading KV or computing it is faster, by recent measurements. All times are in seconds."""

from __future__ import annotations

from rootstock_llm.services.worker.core.contracts.transfers import Tier

FADES = 0.7  # weight of the earlier average when a new measurement is added
# A source's rate is multiplied by this factor each time that reading from the source would not pay, so that the source is
# measured again later.
FORGIVES = 1.05
LARGE_TOKENS = 128  # the time of a step with fewer extended tokens is not used, because other work dominates it
FIRST_BYTES_S = {Tier.HOST: 4e9, Tier.STORAGE: 1e9, Tier.PEER: 1e10}  # assumed rates in bytes/s until a read was measured
# Seconds of a read in addition to the transfer of its bytes, including the time until the loop gets the operation's fact.
LATENCY_S = {
    Tier.HOST: 1e-3,
    Tier.STORAGE: 5e-3,
    Tier.PEER: 5e-3,
}
MOST_LANES = 64  # largest number of remote workers whose rates are stored
UNKNOWN_S = 1.0  # assumed seconds for computing any number of pages, until a step was measured


class Rates:
    """The measured rates of reading KV, by tier or remote worker, and of computing it.

    A lane is the address of a remote worker, which has its own rate. For the tiers of this worker, `lane` is ignored.
    """

    def __init__(self, page_bytes: int, page_size: int) -> None:
        self._page_bytes, self._page_size = page_bytes, page_size
        self._bytes_s = dict(FIRST_BYTES_S)  # rates in bytes/s of the tiers
        self._lanes: dict[str, float] = {}  # rates in bytes/s by remote worker, least recently measured first
        self._token_s: float | None = None  # seconds for computing one token; None until a step was measured

    def computed(self, extended: int, rows: int, seconds: float) -> None:
        """Records the time of a step.

        Uses only steps of at least LARGE_TOKENS tokens without decode rows, because other work dominates the time of other steps.

        Args:
            extended: number of extended tokens.
            rows: number of decode rows.
            seconds: time of the step; 0 if unknown.
        """
        if extended >= LARGE_TOKENS and not rows and seconds > 0:
            self._token_s = _faded(self._token_s, seconds / extended)

    def moved(self, source: Tier, pages: int, seconds: float, lane: str = "") -> None:
        """Records the time of an operation that has read `pages` pages."""
        if pages and seconds > 0:
            self._measured(source, lane, _faded(self.bytes_s(source, lane), pages * self._page_bytes / seconds))

    def given_up(self, source: Tier, pages: int, seconds: float, lane: str = "") -> None:
        """Lowers the rate to at most `pages` pages in `seconds`, because an operation has not ended after `seconds`."""
        if seconds > 0:
            self._measured(source, lane, min(self.bytes_s(source, lane), pages * self._page_bytes / seconds))

    def bytes_s(self, source: Tier, lane: str = "") -> float:
        """Returns the rate in bytes/s. If `source` is PEER and `lane` is empty, this is the rate of the fastest remote worker."""
        if source is not Tier.PEER:
            return self._bytes_s[source]
        return self._lanes.get(lane, FIRST_BYTES_S[source]) if lane else max(self._lanes.values(), default=FIRST_BYTES_S[source])

    def reading_s(self, source: Tier, pages: int, lane: str = "") -> float:
        return LATENCY_S[source] + pages * self._page_bytes / self.bytes_s(source, lane)

    def computing_s(self, pages: int) -> float:
        return UNKNOWN_S if self._token_s is None else pages * self._page_size * self._token_s

    def reading_pays(self, source: Tier, pages: int, lane: str = "", forgives: bool = True, computed: int = 0) -> bool:
        """Returns whether reading the pages is faster than computing them. True if the time of computing is unknown.

        Args:
            source: tier of the pages.
            pages: number of pages to read, parts of units included.
            lane: address of the remote worker; ignored for other tiers.
            forgives: if True and the result is False, multiplies the source's rate by FORGIVES, so that a source that was slow
                once is read and measured again later. Pass False if one request causes many calls, as a prefetch does.
            computed: number of pages to compute if the pages are not read; 0 if it is `pages`.
        """
        pays = self._token_s is None or self.reading_s(source, pages, lane) < self.computing_s(computed or pages)
        if not pays and forgives:
            self._measured(source, lane, self.bytes_s(source, lane) * FORGIVES)
        return pays

    def loses(self, source: Tier, pages: int) -> bool:
        """Returns whether reading the pages is slower than computing them. False if the time of computing is unknown.

        If `source` is PEER, this is for the fastest remote worker.
        """
        return self._token_s is not None and self.reading_s(source, pages) >= self.computing_s(pages)

    def saves(self, source: Tier, pages: int) -> float | None:
        """Returns the share of the computing time that reading the pages saves, 0 to 1.

        The result is None if the time of computing is unknown.
        """
        if self._token_s is None:
            return None
        return max(0.0, 1.0 - self.reading_s(source, pages) / self.computing_s(pages))

    def is_over(self, source: Tier, pages: int, elapsed: float, rest: int, lane: str = "", computed: int = 0) -> bool:
        """Returns whether computing would now be faster than waiting for an operation that has not ended.

        The comparison is for the operation's pages and the `rest` pages after them. If the operation has taken longer than
        estimated, it is assumed to need as much time again as it has needed so far.

        Args:
            source: tier of the pages.
            pages: pages of the operation.
            elapsed: seconds since the lane began the operation.
            rest: number of pages that the request needs after the operation's pages.
            lane: address of the remote worker; ignored for other tiers.
            computed: number of pages to compute instead; 0 if it is `pages` + `rest`.
        """
        left = max(self.reading_s(source, pages, lane) - elapsed, 0.0) or elapsed
        behind = self.reading_s(source, rest, lane) if rest else 0.0
        return left + behind > self.computing_s(computed or pages + rest)

    def _measured(self, source: Tier, lane: str, bytes_s: float) -> None:
        """Stores a rate. If there are more than MOST_LANES remote workers, drops the least recently measured of them."""
        if source is not Tier.PEER:
            self._bytes_s[source] = bytes_s
            return
        self._lanes.pop(lane, None)
        self._lanes[lane] = bytes_s
        if len(self._lanes) > MOST_LANES:
            del self._lanes[next(iter(self._lanes))]


def _faded(before: float | None, now: float) -> float:
    return now if before is None else FADES * before + (1 - FADES) * now
