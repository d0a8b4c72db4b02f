"""When a peer that owes a sign of life is taken for gone, whatever its connection looks like: stopped, cut off, or hanging."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOKS = 5  # that find nothing new, within the time that a peer may be silent: a pause of this process is one, however long


async def until_silent(silence_s: float, signs: Callable[[], int | None]) -> None:
    """Returns when no sign of life has come for so long while one was due. signs: their number so far; None while none is due."""
    before, silent = signs(), 0
    while silent < LOOKS:
        await asyncio.sleep(silence_s / LOOKS)
        now = signs()
        silent = silent + 1 if now is not None and now == before else 0
        before = now
