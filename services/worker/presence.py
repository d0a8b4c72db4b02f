"""Tells Redis that this worker lives: lease:<worker> = generation, gone 10 s after the worker is (DESIGN §5).

Redis is on no request's path: while it is away the worker serves on, says so once, and comes back by itself.
"""

from __future__ import annotations

import asyncio
import logging

import redis.asyncio
import redis.exceptions

logger = logging.getLogger(__name__)

LEASE_TTL_S = 10
RENEW_S = 3.0


class Presence:
    """Raises ValueError if the URL is none. `reachable` is for metrics: whether the last renewal got through."""

    def __init__(self, url: str, worker_id: str, generation: int) -> None:
        self._client = redis.asyncio.from_url(url, socket_timeout=RENEW_S, socket_connect_timeout=RENEW_S)
        self._key = f"lease:{worker_id}"
        self._generation = generation
        self.reachable = False

    async def keep(self) -> None:
        """Renews until cancelled, then gives the lease up."""
        try:
            while True:
                await self._renew()
                await asyncio.sleep(RENEW_S)
        finally:
            await self._give_up()

    async def _renew(self) -> None:
        try:
            await self._client.set(self._key, self._generation, ex=LEASE_TTL_S)
            if not self.reachable:
                logger.info("redis holds this worker's lease")
            self.reachable = True
        except (redis.exceptions.RedisError, OSError) as error:
            if self.reachable:
                logger.warning("redis is away, serving on without it: %s", type(error).__name__)
            self.reachable = False

    async def _give_up(self) -> None:
        try:
            if await self._client.get(self._key) == str(self._generation).encode():
                await self._client.delete(self._key)
        except (redis.exceptions.RedisError, OSError) as error:
            logger.info("the lease is left to expire: %s", type(error).__name__)
        await self._client.aclose()
