"""Batches in the store: what is known of each, and the results of its lines. See OwnerKeys for where.

    state:batches:open   zset   OWNER:ID of batches that are not over, by the microsecond in which they were made

A batch's lease is named by batch_lease(); what goes on with a batch is written under it. A line's result is written once,
whoever computes it, and how often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from services.gateway.state.batch_record import BatchOrder, BatchRecord, BatchStatus, Unreadable, record_of
from services.gateway.state.file_store import page
from services.gateway.state.lease import Lease, Leases
from services.gateway.state.state_redis import READS, WRITES, StateRedis
from services.gateway.state.stored_files import ERRORS, OUTPUT, OwnerKeys, StoredFile, accounts
from services.shared.limits import MAX_BATCH_WINDOW_S

_OPEN = "state:batches:open"
SAMPLES = 10
_RECORDED, _THERE, _FULL = 1, 0, -1

_BEGIN = """
local id, member, order, lives, oldest, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local now = redis.call('TIME')
if redis.call('EXISTS', KEYS[1]) == 1 then return 1 end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', (now[1] - oldest) * 1000000)
if redis.call('ZCARD', KEYS[2]) >= most then return 0 end
redis.call('HSET', KEYS[1], 'order', order, 'status', 'validating')
redis.call('EXPIRE', KEYS[1], lives)
local at = now[1] * 1000000 + now[2]
redis.call('ZADD', KEYS[2], at, id)
redis.call('ZADD', KEYS[3], at, member)
return 1
"""
_WAITING = """
local most, each, now, samples = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local found, of = {}, {}
for at, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if #found >= 2 * most then break end
  local owner = string.match(member, '^[^:]*')
  local has_room = (of[owner] or 0) < each
  if (has_room or at % samples == now % samples) and redis.call('EXISTS', 'state:lease:batch:' .. member) == 0 then
    local known = redis.call('HMGET', 'state:batch:' .. member, 'status', 'order')
    local ends = not known[1] or known[1] == 'cancelling' or cjson.decode(known[2]).expires_at <= now
    if has_room and not ends then of[owner] = (of[owner] or 0) + 1 end
    if has_room or ends then
      found[#found + 1] = member
      found[#found + 1] = ends and 1 or 0
    end
  end
end
return found
"""
_IS_READ = """
for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if string.sub(member, 1, #ARGV[1]) == ARGV[1] then
    local order = redis.call('HGET', 'state:batch:' .. member, 'order')
    if order and cjson.decode(order).input_file_id == ARGV[2] then return 1 end
  end
end
return 0
"""
_CANCEL = """
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'validating' or status == 'in_progress' then
  redis.call('HSET', KEYS[1], 'status', 'cancelling', 'at:cancelling', redis.call('TIME')[1])
end
return status
"""
# Under the lease, which is KEYS[1] and ARGV[1].
_ADVANCE = """
local is = redis.call('HGET', KEYS[2], 'status')
if is == ARGV[3] then return 1 end
if is ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[2], 'status', ARGV[3], 'at:' .. ARGV[3], redis.call('TIME')[1], unpack(ARGV, 4))
return 1
"""
_RECORD = (
    accounts(5)
    + """
local most, batch, lives = tonumber(ARGV[2]), KEYS[2], tonumber(ARGV[3])
local files = {output = ARGV[4], errors = ARGV[5]}
local lines = {output = KEYS[3], errors = KEYS[4]}
local counts = {output = 'completed', errors = 'failed'}
local said, status = {}, redis.call('HGET', batch, 'status')
if status ~= 'in_progress' and status ~= 'cancelling' then return 'lost' end
local function one(number, part, forced, line, tokens)
  if redis.call('HEXISTS', KEYS[3], number) == 1 or redis.call('HEXISTS', KEYS[4], number) == 1 then return 0 end
  if forced ~= '1' and used() + #line > most then return -1 end
  redis.call('HSET', lines[part], number, line)
  redis.call('EXPIRE', lines[part], lives)
  redis.call('ZADD', KEYS[u], seconds + lives, files[part])
  count(files[part], #line)
  redis.call('HINCRBY', batch, counts[part], 1)
  redis.call('HINCRBY', batch, 'bytes:' .. part, #line)
  for name, amount in pairs(cjson.decode(tokens)) do redis.call('HINCRBY', batch, 'usage:' .. name, amount) end
  return 1
end
for at = 6, #ARGV, 5 do said[#said + 1] = one(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]) end
return said
"""
)
_FINISH = (
    accounts(6)
    + """
local status, member, expires_at, lives = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
if redis.call('ZREM', KEYS[3], member) == 0 then return 0 end
redis.call('HSET', KEYS[2], 'status', status, 'at:' .. status, seconds, unpack(ARGV, 10))
redis.call('EXPIRE', KEYS[2], lives)
for part = 0, 1 do
  local id, about = ARGV[6 + 2 * part], ARGV[7 + 2 * part]
  if about ~= '' then
    redis.call('SET', KEYS[9 + part], about, 'EXAT', expires_at)
    redis.call('EXPIREAT', KEYS[4 + part], expires_at)
    redis.call('ZADD', KEYS[u], expires_at, id)
    redis.call('ZADD', KEYS[u + 2], now[1] * 1000000 + now[2], id)
  end
end
return 1
"""
)


@dataclass(frozen=True, slots=True)
class LineResult:
    """number: of the line in its input, from 1. part: OUTPUT or ERRORS. content: the line of that file, with its end. forced:
    whatever the quota says. usage: tokens by USAGE."""

    number: int
    part: str
    content: bytes
    forced: bool = False
    usage: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WaitingBatch:
    """That nobody has. ends: its client has cancelled it, or its time is over."""

    owner: str
    id: str
    ends: bool


def batch_lease(owner: str, batch_id: str) -> str:
    """Its name."""
    return f"batch:{owner}:{batch_id}"


class BatchStore:
    """lives_s: seconds for which a batch is known after its end at the latest. most: batches of one owner. most_bytes: of one
    owner's files, results among them. Every method raises StoreAway; those with a lease LeaseLost."""

    def __init__(self, redis: StateRedis, leases: Leases, lives_s: int, most: int, most_bytes: int) -> None:
        self._redis = redis
        self._leases = leases
        self._lives_s, self._most, self._most_bytes = lives_s, most, most_bytes

    async def begin(self, order: BatchOrder) -> bool:
        """False: the owner has too many."""
        keys = OwnerKeys(order.owner)
        place = [keys.batch(order.id), keys.batches, _OPEN]
        oldest = self._lives_s + MAX_BATCH_WINDOW_S
        begun = (order.id, _member(order), order.dumped(), self._life(order), oldest, self._most)
        return bool(await self._redis.call(WRITES + _BEGIN, place, *begun))

    async def get(self, owner: str, batch_id: str) -> BatchRecord | None:
        found = await self._redis.call(READS + "return redis.call('HGETALL', KEYS[1])", [OwnerKeys(owner).batch(batch_id)])
        pairs = zip(found[::2], found[1::2], strict=True)
        return record_of({name.decode(): value for name, value in pairs}) if found else None

    async def listed(self, owner: str, after: str, limit: int) -> tuple[list[BatchRecord], bool]:
        """The newest first, without those that another version has written. And whether there are more. Raises NoSuchPlace."""
        ids = await page(self._redis, OwnerKeys(owner).batches, after, limit + 1, rising=False)
        found: list[BatchRecord] = []
        for each in ids[:limit]:
            with suppress(Unreadable):
                if (record := await self.get(owner, each)) is not None:
                    found.append(record)
        return found, len(ids) > limit

    async def cancel(self, owner: str, batch_id: str) -> None:
        """Of one that is over, or about to be, nothing changes."""
        await self._redis.call(READS + _CANCEL, [OwnerKeys(owner).batch(batch_id)])

    async def is_read(self, owner: str, file_id: str) -> bool:
        """Whether one of the owner's batches that are not over has this input."""
        return bool(await self._redis.call(READS + _IS_READ, [_OPEN], f"{owner}:", file_id))

    async def waiting(self, most: int, each: int, now: int) -> list[WaitingBatch]:
        """Those that are not over, and that nobody has: the oldest first, `each` of an owner at most, and those that are to end.
        Of an owner who has more, every one is looked at once in SAMPLES seconds. now: Unix seconds."""
        found = await self._redis.call(READS + _WAITING, [_OPEN], most, each, now, SAMPLES)
        members = [str(member, "ascii").partition(":") for member in found[::2]]
        return [
            WaitingBatch(owner, batch_id, bool(ends)) for (owner, _, batch_id), ends in zip(members, found[1::2], strict=True)
        ]

    async def forget(self, owner: str, batch_id: str) -> None:
        """One that is said to be open, and of which nothing is known any more."""
        await self._redis.call(READS + "return redis.call('ZREM', KEYS[1], ARGV[1])", [_OPEN], f"{owner}:{batch_id}")

    async def done(self, order: BatchOrder) -> set[int]:
        """Numbers of the lines that have a result."""
        keys = OwnerKeys(order.owner)
        script = READS + "return redis.call('HKEYS', KEYS[1])"
        parts = [await self._redis.call(script, [keys.lines(order.id, part)]) for part in (OUTPUT, ERRORS)]
        return {int(number) for numbers in parts for number in numbers}

    async def advance(
        self, lease: Lease, order: BatchOrder, before: BatchStatus, after: BatchStatus, **fields: str | int
    ) -> bool:
        """False: it is not what it was. fields: of its hash that become known with it."""
        place = [OwnerKeys(order.owner).batch(order.id)]
        flat = [each for pair in fields.items() for each in pair]
        return bool(await self._leases.write(lease, _ADVANCE, place, before.value, after.value, *flat))

    async def record(self, lease: Lease, order: BatchOrder, results: Sequence[LineResult]) -> list[LineResult]:
        """Lines that have a result already keep it. Returns those for which the owner's quota has no room. Of a batch that is
        over nothing is written: whoever ended it had the lease."""
        keys = OwnerKeys(order.owner)
        place = [keys.batch(order.id), keys.lines(order.id, OUTPUT), keys.lines(order.id, ERRORS), *keys.use]
        flat: list[Any] = []
        for each in results:
            flat += [each.number, each.part, int(each.forced), each.content, orjson.dumps(dict(each.usage))]
        about = (self._most_bytes, self._life(order), order.output_id, order.error_id)
        said = await self._leases.write(lease, _RECORD, place, *about, *flat)
        return [each for each, answer in zip(results, said, strict=True) if answer == _FULL]

    async def finish(
        self,
        lease: Lease,
        record: BatchRecord,
        status: BatchStatus,
        files: Sequence[StoredFile],
        expires_at: int,
        errors: bytes = b"",
    ) -> bool:
        """It is over, and its files are there. False: it was over before. files: of its results. errors: of its input, JSON."""
        order, keys = record.order, OwnerKeys(record.order.owner)
        ids = {OUTPUT: order.output_id, ERRORS: order.error_id}
        about = {file.part: file.dumped() for file in files}
        place = [keys.batch(order.id), _OPEN, *(keys.lines(order.id, part) for part in ids), *keys.use]
        place += [keys.file(each) for each in ids.values()]
        flat = [each for part, file_id in ids.items() for each in (file_id, about.get(part, b""))]
        further = ["errors", errors] if errors else []
        said = (status.value, _member(order), expires_at, self._lives_s)
        done = await self._leases.write(lease, _FINISH, place, *said, *flat, *further)
        return bool(done)

    def _life(self, order: BatchOrder) -> int:
        """Seconds, from any moment of it on."""
        return order.expires_at - order.created_at + self._lives_s


def _member(order: BatchOrder) -> str:
    return f"{order.owner}:{order.id}"
