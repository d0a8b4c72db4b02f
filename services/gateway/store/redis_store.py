"""Stores records in a Redis server with an append-only file.

The server must not be the Redis server of the prefix index, whose data may be lost at any time.

    state:of:OWNER:NAME   hash   fields c (content) and v (version); every use extends its TTL to at least ttl_s
    state:use:OWNER       zset   names of records, by the Unix second at which they expire
    state:size:OWNER      hash   bytes by name of record; field "!" has the total

Each call is one script, so that a crash cannot separate a record from its count against the quota.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rootstock_llm.services.gateway.store.state_redis import FREES, StateRedis, WritesRefused
from rootstock_llm.services.gateway.store.state_store import Changed, StoredRecord
from rootstock_llm.services.shared.limits import MAX_RECORD_BYTES

_FORGET = """
local function forget(name)
  local size = tonumber(redis.call('HGET', KEYS[2], name) or '0')
  redis.call('HDEL', KEYS[2], name)
  if size > 0 then redis.call('HINCRBY', KEYS[2], '!', -size) end
  redis.call('ZREM', KEYS[1], name)
end
local now = tonumber(redis.call('TIME')[1])
local ttl = tonumber(ARGV[1])
local function live_on(key)
  if redis.call('TTL', key) < ttl then redis.call('EXPIRE', key, ttl) end
end
local function refresh(key, name)
  live_on(key)
  redis.call('ZADD', KEYS[1], 'GT', now + ttl, name)
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000)) do forget(name) end
live_on(KEYS[1])
live_on(KEYS[2])
"""
_GET = (
    FREES
    + _FORGET
    + """
local found = {}
for at = 3, #KEYS do
  local record = redis.call('HMGET', KEYS[at], 'c', 'v')
  if record[1] then refresh(KEYS[at], ARGV[at - 1]) end
  found[#found + 1] = record[1] or false
  found[#found + 1] = record[2] or false
end
return found
"""
)
_PEEK = """
local found = {}
for at = 3, #KEYS do
  local record = redis.call('HMGET', KEYS[at], 'c', 'v')
  found[#found + 1] = record[1] or false
  found[#found + 1] = record[2] or false
end
return found
"""
_PUT = (
    "#!lua\n"
    + _FORGET
    + """
local name, content, expected, most, most_bytes = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local version = tonumber(redis.call('HGET', KEYS[3], 'v') or '0')
if expected >= 0 and version ~= expected then
  if version == expected + 1 and redis.call('HGET', KEYS[3], 'c') == content then return version end  -- by an earlier try
  return -1
end
local old = tonumber(redis.call('HGET', KEYS[2], name) or '0')
local used = tonumber(redis.call('HGET', KEYS[2], '!') or '0')
if used - old + #content > most_bytes then return 0 end
if version == 0 and redis.call('ZCARD', KEYS[1]) >= most then return 0 end
redis.call('HSET', KEYS[3], 'c', content, 'v', version + 1)
redis.call('HSET', KEYS[2], name, #content)
redis.call('HINCRBY', KEYS[2], '!', #content - old)
refresh(KEYS[3], name)
live_on(KEYS[2])
live_on(KEYS[1])
return version + 1
"""
)
_DELETE = (
    FREES
    + _FORGET
    + """
local there = redis.call('DEL', KEYS[3])
forget(ARGV[2])
return there
"""
)


class RedisStore:
    """A StateStore in Redis."""

    def __init__(self, url: str, ttl_s: int, records: int, record_bytes: int, patience_s: float) -> None:
        """Makes the store.

        Args:
            ttl_s: Lifetime of a record after its last use, in seconds.
            records: Largest number of records per owner.
            record_bytes: Largest number of bytes per owner.
            patience_s: Time limit of a call with its retries, as in StateRedis.

        Raises:
            ValueError: The URL is invalid.
        """
        self._redis = StateRedis(url, patience_s)
        self._ttl_s, self._records, self._record_bytes = ttl_s, records, record_bytes

    async def close(self) -> None:
        await self._redis.close()

    async def get(self, owner: str, names: Sequence[str]) -> list[StoredRecord | None]:
        if not names:
            return []
        try:
            found = await self._call(_GET, owner, names, *names)
        except WritesRefused:  # the records are returned, but their lifetimes do not restart
            found = await self._redis.read(_PEEK, _keys(owner, names))
        pairs = zip(found[::2], found[1::2], strict=True)
        return [None if content is None else StoredRecord(content, int(version)) for content, version in pairs]

    async def put(self, owner: str, name: str, content: bytes, version: int | None = None) -> bool:
        if len(content) > MAX_RECORD_BYTES:
            return False
        expected = -1 if version is None else version
        now = await self._call(_PUT, owner, [name], name, content, expected, self._records, self._record_bytes)
        if now == -1:
            raise Changed
        return int(now) > 0

    async def delete(self, owner: str, name: str) -> bool:
        return await self._redis.deletes(_DELETE, _keys(owner, [name]), self._ttl_s, name)

    async def _call(self, script: str, owner: str, names: Sequence[str], *arguments: Any) -> Any:
        return await self._redis.call(script, _keys(owner, names), self._ttl_s, *arguments)


def _keys(owner: str, names: Sequence[str]) -> list[str]:
    return [f"state:use:{owner}", f"state:size:{owner}", *(f"state:of:{owner}:{name}" for name in names)]
