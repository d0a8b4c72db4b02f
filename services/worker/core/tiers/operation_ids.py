"""The numbers of operations: each is given once."""

from __future__ import annotations

from itertools import count


class OperationIds:
    def __init__(self) -> None:
        self._numbers = count(1)

    def next(self) -> int:
        return next(self._numbers)
