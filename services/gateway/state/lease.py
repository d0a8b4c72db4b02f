"""Work that one gateway at a time may do, whichever it is: a lease is taken, kept while it lasts, and given back.

    state:lease:NAME   string   the token of who has it; with a TTL

What its holder writes is fenced: the script that writes looks first whether the lease is still the holder's. So who was stopped
for longer than the lease lasts writes nothing any more, however late it wakes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.state.state_redis import READS, WRITES, StateRedis

# The same token asks again where an answer was lost, and takes back what has run out where nobody else has taken it.
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
LOST = b"lost"  # a script that finds so by itself may say it, too


class LeaseLost(Exception):
    """Somebody else may have it: nothing was written."""


@dataclass(frozen=True, slots=True)
class Lease:
    """token: its holder's alone."""

    name: str
    token: str

    @property
    def key(self) -> str:
        return f"state:lease:{self.name}"


class Leases:
    """lasts_s: from the last keep() on. Every method raises StoreAway."""

    def __init__(self, redis: StateRedis, lasts_s: float) -> None:
        self._redis = redis
        self._lasts_ms = int(lasts_s * 1000)

    async def take(self, name: str) -> Lease | None:
        """None: somebody else has it."""
        lease = Lease(name, secrets.token_hex(16))
        return lease if await self.keep(lease) else None

    async def keep(self, lease: Lease) -> bool:
        """For as long again. False: it has run out, and somebody else has it."""
        return bool(await self._redis.call(READS + _KEEP, [lease.key], lease.token, self._lasts_ms))

    async def give_back(self, lease: Lease) -> None:
        """Before it runs out. No effect on one that is lost."""
        await self._redis.call(READS + _GIVE_BACK, [lease.key], lease.token)

    async def write(self, lease: Lease, script: str, keys: Sequence[str], *arguments: Any, frees: bool = False) -> Any:
        """Runs the script if the lease is still held. In it KEYS[1] and ARGV[1] are the lease's; its own come behind. frees: it
        is run where there is no memory, too. Raises LeaseLost."""
        found = await self._redis.call(
            (READS if frees else WRITES) + _FENCE + script, [lease.key, *keys], lease.token, *arguments
        )
        if found == LOST:
            raise LeaseLost(lease.name)
        return found
