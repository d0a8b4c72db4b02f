"""What has been used within a minute, in sub-buckets of BUCKET_S seconds. Pure; times are Unix seconds, whole over all gateways.

The oldest sub-bucket counts whole, so that the sum is never less than what was used within the last WINDOW_S seconds: whoever
keeps the sum within a limit keeps every such stretch of time within it.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW_S = 60
BUCKET_S = 6
BUCKETS = WINDOW_S // BUCKET_S + 1  # one more than fit the window: the newest has just begun


def bucket_of(now: float) -> int:
    return int(now // BUCKET_S)


class RateWindow:
    """A clock that goes back does no harm: time stands still until it is where it was."""

    def __init__(self) -> None:
        self._newest = 0
        self._amounts = [0] * BUCKETS  # newest first

    def add(self, amount: int, now: float) -> None:
        self._advance(now)
        self._amounts[0] += amount

    def give_back(self, amount: int, since: float, now: float) -> int:
        """Of what was added then. Returns how much of it still counted."""
        self._advance(now)
        age = max(0, self._newest - bucket_of(since))
        if age >= BUCKETS:
            return 0
        given = min(amount, self._amounts[age])
        self._amounts[age] -= given
        return given

    def used(self, now: float) -> int:
        self._advance(now)
        return sum(self._amounts)

    def recent(self, now: float) -> int:
        """Used in this sub-bucket and the one before."""
        self._advance(now)
        return self._amounts[0] + self._amounts[1]

    def amounts(self, now: float) -> list[int]:
        """By sub-bucket, newest first."""
        self._advance(now)
        return list(self._amounts)

    def replace(self, amounts: Sequence[int], now: float) -> None:
        """All of it. amounts: as amounts() gives them."""
        self._advance(now)
        self._amounts = list(amounts)

    def _advance(self, now: float) -> None:
        gone = bucket_of(now) - self._newest
        if gone > 0:
            self._newest += gone
            kept = self._amounts[: max(0, BUCKETS - gone)]
            self._amounts = [0] * (BUCKETS - len(kept)) + kept


def seconds_until(amounts: Sequence[int], room: int, now: float) -> float:
    """From now until no more than `room` of these counts any more; 0 if that is so already. amounts: by sub-bucket, newest
    first. room: at least 0."""
    left, seconds = sum(amounts), 0.0
    for age in range(len(amounts) - 1, -1, -1):
        if left <= room:
            break
        left -= amounts[age]
        if amounts[age]:
            seconds = (bucket_of(now) - age + BUCKETS) * BUCKET_S - now
    return seconds
