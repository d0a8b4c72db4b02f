"""Counts the used amount of a limit: within the last minute, or at present. Times are Unix seconds.

The last minute is divided into sub-buckets of BUCKET_S seconds. The oldest sub-bucket counts completely, so the sum is never
less than the amount used within the last WINDOW_S seconds. If the sum stays within a limit, the amount used in any WINDOW_S
seconds stays within it, too. The sub-buckets of all gateways begin at the same times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

WINDOW_S = 60  # seconds of a limit per minute
BUCKET_S = 6  # seconds of a sub-bucket
BUCKETS = WINDOW_S // BUCKET_S + 1  # number of sub-buckets; one more than fit into WINDOW_S, because the newest one is incomplete


def bucket_of(now: float) -> int:
    """Returns the number of the sub-bucket that contains a time."""
    return int(now // BUCKET_S)


class Usage(Protocol):
    """The used amount of one limit."""

    size: int  # length of amounts()

    def add(self, amount: int, now: float) -> None: ...

    def give_back(self, amount: int, since: float, now: float) -> int: ...

    def used(self, now: float) -> int: ...

    def recent(self, now: float) -> int: ...

    def amounts(self, now: float) -> list[int]: ...

    def replace(self, amounts: Sequence[int], now: float) -> None: ...


class PerMinute:
    """The amount used within the last minute, in BUCKETS sub-buckets.

    If the clock is set back, the window does not move until the clock reaches its previous time.
    """

    size = BUCKETS

    def __init__(self) -> None:
        self._newest = 0
        self._amounts = [0] * BUCKETS  # newest first

    def add(self, amount: int, now: float) -> None:
        self._advance(now)
        self._amounts[0] += amount

    def give_back(self, amount: int, since: float, now: float) -> int:
        """Subtracts an amount that was added at `since`. Returns the part of it that was still counted."""
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
        """Returns the amount used in the newest two sub-buckets."""
        self._advance(now)
        return self._amounts[0] + self._amounts[1]

    def amounts(self, now: float) -> list[int]:
        """Returns the amounts by sub-bucket, the newest first."""
        self._advance(now)
        return list(self._amounts)

    def replace(self, amounts: Sequence[int], now: float) -> None:
        """Replaces all amounts by `amounts`, which another PerMinute object's amounts() has returned."""
        self._advance(now)
        self._amounts = list(amounts)

    def _advance(self, now: float) -> None:
        gone = bucket_of(now) - self._newest
        if gone > 0:
            self._newest += gone
            kept = self._amounts[: max(0, BUCKETS - gone)]
            self._amounts = [0] * (BUCKETS - len(kept)) + kept


class Concurrent:
    """The amount in use at present, such as running requests."""

    size = 1

    def __init__(self) -> None:
        self._count = 0

    def add(self, amount: int, now: float) -> None:
        self._count += amount

    def give_back(self, amount: int, since: float, now: float) -> int:
        self._count -= amount
        return amount

    def used(self, now: float) -> int:
        return self._count

    def recent(self, now: float) -> int:
        return self._count

    def amounts(self, now: float) -> list[int]:
        return [self._count]

    def replace(self, amounts: Sequence[int], now: float) -> None:
        self._count = amounts[0]


def seconds_until(amounts: Sequence[int], most: int, now: float) -> float:
    """Returns the seconds until the counted amount has fallen to `most`; 0 if it is not above `most` now.

    Args:
        amounts: Amounts by sub-bucket, the newest first.
        most: Amount to which the counted amount must fall; at least 0.
    """
    left, seconds = sum(amounts), 0.0
    for age in range(len(amounts) - 1, -1, -1):
        if left <= most:
            break
        left -= amounts[age]
        if amounts[age]:
            seconds = (bucket_of(now) - age + BUCKETS) * BUCKET_S - now
    return seconds
