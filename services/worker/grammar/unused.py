"""Memory of grammars that nobody asks for any more goes back to the system: schemas come in waves."""

from __future__ import annotations

import asyncio
from typing import Protocol

from services.shared.memory import trim_heap

EVERY_S = 15.0


class Book(Protocol):
    @property
    def num_compiled(self) -> int:
        """Since it was made, those that were refused included."""

    def drop_unused(self) -> bool:
        """Whether there were any."""


class UnusedGrammars:
    def __init__(self, book: Book, every_s: float = EVERY_S) -> None:
        self._book = book
        self._every_s = every_s

    async def run(self) -> None:
        """Until cancelled. What compilations have left free returns once a look has found no further one."""
        seen, owed = self._book.num_compiled, False
        while True:
            await asyncio.sleep(self._every_s)
            compiled = self._book.num_compiled
            owed = self._book.drop_unused() or owed or compiled != seen
            if owed and compiled == seen:
                owed = False
                await asyncio.to_thread(trim_heap)
            seen = compiled
