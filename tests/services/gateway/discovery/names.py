"""A resolver for tests of discovery."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence


class Names:
    """A resolver whose results are set by the test."""

    def __init__(self) -> None:
        self.answer: list[str] | OSError = []
        self.lookups = 0
        self.last = ("", 0)  # name and port of the last look-up
        self.trouble: Callable[[], str] = lambda: ""  # trouble() of the tested discovery

    async def resolve(self, name: str, port: int) -> Sequence[str]:
        self.lookups += 1
        self.last = (name, port)
        if isinstance(self.answer, OSError):
            raise self.answer
        return list(self.answer)

    async def some_lookups(self, more: int) -> None:
        """Waits for `more` complete look-ups."""
        goal = self.lookups + more + 1
        async with asyncio.timeout(60):
            while self.lookups < goal:
                await asyncio.sleep(0.002)
