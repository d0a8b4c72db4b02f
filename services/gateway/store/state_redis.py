"""Calls the store's Redis. Each call is one Lua script, so that a crash leaves all of its effect or none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from redis import exceptions

from rootstock_llm.services.gateway.store.state_store import StoreAway
from rootstock_llm.services.shared.index.redis_client import redis_client

TIMEOUT_S = 2.0  # time limit of one attempt in seconds
PAUSE_S = 0.1  # seconds between two attempts

_TRANSIENT_ERRORS = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, OSError)
# First lines of scripts. If the memory of Redis is full, Redis refuses scripts that begin with WRITES. If its disk is full, Redis
# refuses all scripts that do not begin with _READS.
FREES = "#!lua flags=allow-oom\n"  # for scripts that write, but need no more memory
WRITES = "#!lua\n"
_READS = "#!lua flags=allow-oom,no-writes\n"


class WritesRefused(StoreAway):
    """Redis cannot write to its disk, and therefore refuses all scripts that may write."""


class StateRedis:
    """A client of the store's Redis.

    The first call that finds Redis unreachable retries. Later calls try once, until a call succeeds.
    """

    def __init__(self, url: str, patience_s: float) -> None:
        """Makes the client. A call is retried for up to `patience_s` seconds. Raises ValueError if the URL is invalid."""
        self._client = redis_client(url, TIMEOUT_S)
        self._is_away = False
        self._patience_s = patience_s

    @property
    def is_away(self) -> bool:
        """Whether the last call failed because Redis could not be reached."""
        return self._is_away

    async def close(self) -> None:
        await self._client.aclose()

    async def memory(self) -> tuple[int, int]:
        """Returns the bytes of memory that Redis uses, and their limit. A limit of 0 means no limit.

        Raises:
            StoreAway: The store does not respond, or does not allow this user to send the command.
        """
        try:
            found = await self._client.info("memory")
        except (exceptions.RedisError, OSError) as error:
            raise StoreAway(f"{type(error).__name__}: {str(error)[:200]}") from None
        return int(found["used_memory"]), int(found.get("maxmemory", 0))

    async def call(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        """Runs a script, retrying until it returns or `patience_s` has passed. Raises StoreAway.

        The script must be idempotent: if the reply of an attempt is lost, the script may have run, and runs a second time.
        """
        return (await self._call_with_retries(script, keys, arguments))[0]

    async def read(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        """Runs a script that only reads, also while Redis cannot write to its disk. `script` has no first line. Raises StoreAway.

        The first attempt does not state that the script only reads. A replica refuses this attempt, because its data may be old.
        """
        try:
            return await self.call(FREES + script, keys, *arguments)
        except WritesRefused:
            return await self.call(_READS + script, keys, *arguments)

    async def deletes(self, script: str, keys: Sequence[str], *arguments: Any) -> bool:
        """Runs a script that deletes an object. Raises StoreAway.

        Returns:
            Whether the object existed. Also True if the reply of an attempt was lost, because that attempt may have deleted the
            object.
        """
        there, is_repeated = await self._call_with_retries(script, keys, arguments)
        return bool(there) or is_repeated

    async def _call_with_retries(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> tuple[Any, bool]:
        """Returns the script's result, and whether the call took more than one attempt. Raises StoreAway."""
        is_repeated = False
        until = time.monotonic() + (0.0 if self._is_away else self._patience_s)
        while True:
            try:
                found = await self._client.eval(script, len(keys), *keys, *arguments)
            except (exceptions.RedisError, OSError) as error:
                if str(error).startswith("MISCONF"):
                    raise WritesRefused(str(error)[:200]) from None
                is_transient = isinstance(error, _TRANSIENT_ERRORS)
                if not is_transient or time.monotonic() + PAUSE_S > until:
                    self._is_away = self._is_away or is_transient
                    raise StoreAway(f"{type(error).__name__}: {str(error)[:200]}") from None
            else:
                self._is_away = False
                return found, is_repeated
            is_repeated = True
            await asyncio.sleep(PAUSE_S)
