"""Counts the use of a limit: the amount of the last minute, or the amount in use now. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.gateway.keys.rate_window import BUCKETS, RateWindow


class Usage(Protocol):
    """A count of used amounts."""

    size: int  # length of amounts()

    def add(self, amount: int, now: float) -> None: ...

    def give_back(self, amount: int, since: float, now: float) -> int: ...

    def used(self, now: float) -> int: ...

    def recent(self, now: float) -> int: ...

    def amounts(self, now: float) -> list[int]: ...

    def replace(self, amounts: Sequence[int], now: float) -> None: ...


class PerMinute(RateWindow):
    """The amount used within the last minute."""

    size = BUCKETS


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
