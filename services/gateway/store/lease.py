"""Leases in the store. A lease lets one gateway at a time run a batch or a background response.

    state:lease:NAME   string   token of the holder; with a TTL

The holder renews its lease, and releases it at the end. The holder's writes are fenced: the script that writes first checks that
the lease has the holder's token. So a gateway whose lease expired while the gateway was suspended cannot write when it wakes up.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rootstock_llm.services.gateway.store.state_redis import FREES, WRITES, StateRedis

# Also restores an expired lease that no other gateway has taken. Idempotent for one token, so that a call can be repeated after a
# lost reply.
_RENEW = """
local token_now = redis.call('GET', KEYS[1])
if token_now and token_now ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
_FENCE = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'lost' end\n"
LOST = b"lost"  # reply if the caller does not have the lease; a script also returns it if the record refuses the write


class LeaseLost(Exception):
    """The caller does not have the lease. Nothing was written. The caller stops its work, because another gateway may do it."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that one gateway has taken or may take."""

    name: str
    token: str  # random; unique to this holder

    @property
    def key(self) -> str:
        return f"state:lease:{self.name}"


class Leases:
    """The leases in the store. Every method raises StoreAway if the store cannot be reached."""

    def __init__(self, redis: StateRedis, lifetime_s: float) -> None:
        """Prepares the leases. A lease expires `lifetime_s` seconds after the last renew()."""
        self._redis = redis
        self._lifetime_ms = int(lifetime_s * 1000)

    async def take(self, name: str) -> Lease | None:
        """Takes a lease. Returns None if another gateway has the lease."""
        lease = Lease(name, secrets.token_hex(16))
        return lease if await self.renew(lease) else None

    async def renew(self, lease: Lease) -> bool:
        """Renews a lease, even if it has expired. Returns False if another gateway has taken the lease."""
        return bool(await self._redis.call(FREES + _RENEW, [lease.key], lease.token, self._lifetime_ms))

    async def release(self, lease: Lease) -> None:
        """Releases a lease before it expires. Has no effect on a lost lease."""
        await self._redis.call(FREES + _RELEASE, [lease.key], lease.token)

    async def write(self, lease: Lease, script: str, keys: Sequence[str], *arguments: Any, frees: bool = False) -> Any:
        """Runs a script if the caller still holds the lease.

        Args:
            script: Lua script whose KEYS[1] and ARGV[1] are the lease's key and token. Its own keys and arguments follow.
            frees: Whether the script frees more memory than it uses. It then runs even if the store's memory is full.

        Raises:
            LeaseLost: Another gateway has the lease, or the script has returned LOST.
        """
        found = await self._redis.call(
            (FREES if frees else WRITES) + _FENCE + script, [lease.key, *keys], lease.token, *arguments
        )
        if found == LOST:
            raise LeaseLost(lease.name)
        return found
