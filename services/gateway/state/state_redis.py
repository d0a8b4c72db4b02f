"""Calls of the store: each is one Lua script, so that a crash leaves all of it or nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from redis import exceptions

from services.gateway.state.state_store import StoreAway
from services.shared.index.redis_client import redis_client

TIMEOUT_S = 2.0  # of a try
PAUSE_S = 0.1

_PASSING = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, OSError)
# How scripts begin. One without the flag is refused where there is no memory.
READS = "#!lua flags=allow-oom\n"
WRITES = "#!lua\n"


class StateRedis:
    """While it is away only the first call waits for it; later ones try once. patience_s: of a call, which is tried again until
    then."""

    def __init__(self, url: str, patience_s: float) -> None:
        """Raises ValueError if the URL is none."""
        self._client = redis_client(url, TIMEOUT_S)
        self._is_away = False
        self._patience_s = patience_s

    @property
    def is_away(self) -> bool:
        """By the last call: it waited in vain, or did not reach it."""
        return self._is_away

    async def close(self) -> None:
        await self._client.aclose()

    async def memory(self) -> tuple[int, int]:
        """Returns the bytes that the store uses and their limit, 0 without one.

        Raises:
            StoreAway: The store does not answer, or does not tell this user.
        """
        try:
            found = await self._client.info("memory")
        except (exceptions.RedisError, OSError) as error:
            raise StoreAway(f"{type(error).__name__}: {str(error)[:200]}") from None
        return int(found["used_memory"]), int(found.get("maxmemory", 0))

    async def call(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        """Tries until it has an answer or no patience is left: a try whose answer was lost may have happened, and happens again;
        scripts come to the same end then. Raises StoreAway."""
        return (await self._tried(script, keys, arguments))[0]

    async def deletes(self, script: str, keys: Sequence[str], *arguments: Any) -> bool:
        """As call(), of a script that says whether what it deletes was there. True also where an earlier try may have done it,
        whose answer was lost. Raises StoreAway."""
        there, is_repeated = await self._tried(script, keys, arguments)
        return bool(there) or is_repeated

    async def _tried(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> tuple[Any, bool]:
        """What it says, and whether it is not the first try. Raises StoreAway."""
        is_repeated = False
        until = time.monotonic() + (0.0 if self._is_away else self._patience_s)
        while True:
            try:
                found = await self._client.eval(script, len(keys), *keys, *arguments)
            except (exceptions.RedisError, OSError) as error:
                passes = isinstance(error, _PASSING)
                if not passes or time.monotonic() + PAUSE_S > until:
                    self._is_away = self._is_away or passes
                    raise StoreAway(f"{type(error).__name__}: {str(error)[:200]}") from None
            else:
                self._is_away = False
                return found, is_repeated
            is_repeated = True
            await asyncio.sleep(PAUSE_S)
