"""Counts the use of a limit: the amount of the last minute, or the amount in use now. Times are Unix seconds.

The last minute is divided into sub-buckets of BUCKET_S seconds. The oldest sub-bucket counts in full. So the sum is never less
than the amount used within the last WINDOW_S seconds, and a sum within a limit keeps every period of WINDOW_S within that limit.
The sub-buckets of all gateways begin at the same times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

WINDOW_S = 60
BUCKET_S = 6
BUCKETS = WINDOW_S // BUCKET_S + 1  # one more than WINDOW_S has, because the newest sub-bucket is not complete


def bucket_of(now: float) -> int:
    return int(now // BUCKET_S)


class Usage(Protocol):
    """A count of used amounts."""

    size: int  # length of amounts()

    def add(self, amount: int, now: float) -> None: ...

    def give_back(self, amount: int, since: float, now: float) -> int: ...

    def used(self, now: float) -> int: ...

    def recent(self, now: float) -> int: ...

    def amounts(self, now: float) -> list[int]: ...

    def replace(self, amounts: Sequence[int], now: float) -> None: ...


class PerMinute:
    """The amount used within the last minute, in BUCKETS sub-buckets.

    If the clock goes back, the window waits until the clock has caught up.
    """

    size = BUCKETS

    def __init__(self) -> None:
        self._newest = 0
        self._amounts = [0] * BUCKETS  # newest first

    def add(self, amount: int, now: float) -> None:
        self._advance(now)
        self._amounts[0] += amount

    def give_back(self, amount: int, since: float, now: float) -> int:
        """Subtracts from the amount that was added at `since`. Returns the part that was still counted."""
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
        """Returns the amount used in the present sub-bucket and the previous one."""
        self._advance(now)
        return self._amounts[0] + self._amounts[1]

    def amounts(self, now: float) -> list[int]:
        """Returns the amounts by sub-bucket, the newest first."""
        self._advance(now)
        return list(self._amounts)

    def replace(self, amounts: Sequence[int], now: float) -> None:
        """Replaces all amounts by those of amounts() of another window."""
        self._advance(now)
        self._amounts = list(amounts)

    def _advance(self, now: float) -> None:
        gone = bucket_of(now) - self._newest
        if gone > 0:
            self._newest += gone
            kept = self._amounts[: max(0, BUCKETS - gone)]
            self._amounts = [0] * (BUCKETS - len(kept)) + kept


class Concurrent:
    """The amount in use now."""

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


def seconds_until(amounts: Sequence[int], free: int, now: float) -> float:
    """Returns the seconds until at most `free` of the amounts is still counted; 0 if this is so now.

    Args:
        amounts: Amounts by sub-bucket, the newest first.
        free: Largest amount that may still be counted then; at least 0.
    """
    left, seconds = sum(amounts), 0.0
    for age in range(len(amounts) - 1, -1, -1):
        if left <= free:
            break
        left -= amounts[age]
        if amounts[age]:
            seconds = (bucket_of(now) - age + BUCKETS) * BUCKET_S - now
    return seconds
