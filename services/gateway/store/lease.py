"""Leases in the store. A lease lets one gateway at a time do a piece of work.

    state:lease:NAME   string   token of the holder; with a TTL

The holder renews its lease and gives it back at the end. Its writes are fenced: the script that writes checks first that the
holder still has the lease. So a gateway that was suspended for longer than the lease lasts cannot write when it wakes up.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rootstock_llm.services.gateway.store.state_redis import READS, WRITES, StateRedis

# Idempotent for one token, so that a call with a lost reply can be repeated. Restores an expired lease that no other gateway has.
_KEEP = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_GIVE_BACK = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
_FENCE = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'lost' end\n"
LOST = b"lost"  # result of the fence; a fenced script may return it too


class LeaseLost(Exception):
    """Another gateway may have the lease. Nothing was written, and the caller stops its work."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that one gateway has taken or may take."""

    name: str
    token: str  # random; unique to this holder

    @property
    def key(self) -> str:
        return f"state:lease:{self.name}"


class Leases:
    """The leases in the store. Every method raises StoreAway."""

    def __init__(self, redis: StateRedis, lasts_s: float) -> None:
        """Prepares the leases. Each lease expires `lasts_s` seconds after its last keep()."""
        self._redis = redis
        self._lasts_ms = int(lasts_s * 1000)

    async def take(self, name: str) -> Lease | None:
        """Takes a lease. Returns None if another gateway has it."""
        lease = Lease(name, secrets.token_hex(16))
        return lease if await self.keep(lease) else None

    async def keep(self, lease: Lease) -> bool:
        """Renews a lease. Returns False if it has expired and another gateway has taken it."""
        return bool(await self._redis.call(READS + _KEEP, [lease.key], lease.token, self._lasts_ms))

    async def give_back(self, lease: Lease) -> None:
        """Releases a lease before it expires. Has no effect on a lost lease."""
        await self._redis.call(READS + _GIVE_BACK, [lease.key], lease.token)

    async def write(self, lease: Lease, script: str, keys: Sequence[str], *arguments: Any, frees: bool = False) -> Any:
        """Runs a script if the caller still holds the lease.

        Args:
            script: Lua script whose KEYS[1] and ARGV[1] are the lease's key and token. Its own keys and arguments follow.
            frees: Whether the script only frees memory. It then runs even if the store's memory is full.

        Raises:
            LeaseLost: Another gateway has the lease, or the script has returned LOST.
        """
        found = await self._redis.call(
            (READS if frees else WRITES) + _FENCE + script, [lease.key, *keys], lease.token, *arguments
        )
        if found == LOST:
            raise LeaseLost(lease.name)
        return found
