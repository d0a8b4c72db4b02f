"""Returns the memory of unused grammars to the operating system, because schemas come in waves."""

from __future__ import annotations

import asyncio
from typing import Protocol

from services.shared.memory import trim_heap

EVERY_S = 15.0  # seconds between two looks


class Book(Protocol):
    @property
    def num_compiled(self) -> int:
        """Number of compilations since the book was made, refusals included."""

    def drop_unused(self) -> bool:
        """Drops unused grammars. Returns whether it dropped any."""


class UnusedGrammars:
    """Drops unused grammars of a book regularly and trims the heap."""

    def __init__(self, book: Book, every_s: float = EVERY_S) -> None:
        self._book = book
        self._every_s = every_s

    async def run(self) -> None:
        """Runs until cancelled. The heap is trimmed after a drop or a compilation, as soon as an interval had no compilation."""
        seen, owed = self._book.num_compiled, False
        while True:
            await asyncio.sleep(self._every_s)
            compiled = self._book.num_compiled
            owed = self._book.drop_unused() or owed or compiled != seen
            if owed and compiled == seen:
                owed = False
                await asyncio.to_thread(trim_heap)
            seen = compiled
