"""What is counted of a limit: what was used within a minute, or what is in use now. Pure; times are Unix seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.gateway.keys.rate_window import BUCKETS, RateWindow


class Usage(Protocol):
    """size: how many amounts there are."""

    size: int

    def add(self, amount: int, now: float) -> None: ...

    def give_back(self, amount: int, since: float, now: float) -> int: ...

    def used(self, now: float) -> int: ...

    def recent(self, now: float) -> int: ...

    def amounts(self, now: float) -> list[int]: ...

    def replace(self, amounts: Sequence[int], now: float) -> None: ...


class PerMinute(RateWindow):
    size = BUCKETS


class Concurrent:
    """What is in use now, whenever it began."""

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
