"""Batches in the store: their records and the results of their lines. OwnerKeys lists the Redis keys of one owner.

    state:batches:open   zset   OWNER:ID of open batches, by the microsecond of their creation

The gateway that runs a batch needs the batch's lease, named by batch_lease(), for every write. The result of a line is written
once, even if several gateways compute the line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from rootstock_llm.services.gateway.store.batch_record import BatchOrder, BatchRecord, BatchStatus, Unreadable, record_of
from rootstock_llm.services.gateway.store.file_store import page
from rootstock_llm.services.gateway.store.lease import Lease, Leases
from rootstock_llm.services.gateway.store.state_redis import FREES, WRITES, StateRedis
from rootstock_llm.services.gateway.store.stored_files import ERRORS, OUTPUT, OwnerKeys, StoredFile, accounts
from rootstock_llm.services.shared.limits import MAX_BATCH_WINDOW_S

_OPEN = "state:batches:open"
# If waiting() has found `each` runnable batches of an owner, it checks only one in SAMPLES of the owner's newer batches.
SAMPLES = 10
_RECORDED, _THERE, _FULL = 1, 0, -1  # codes that _RECORD returns per line: stored, stored before, quota full

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
  local is_below_limit = (of[owner] or 0) < each
  if (is_below_limit or at % samples == now % samples) and redis.call('EXISTS', 'state:lease:batch:' .. member) == 0 then
    local known = redis.call('HMGET', 'state:batch:' .. member, 'status', 'order')
    local ends = not known[1] or known[1] == 'cancelling' or cjson.decode(known[2]).expires_at <= now
    if is_below_limit and not ends then of[owner] = (of[owner] or 0) + 1 end
    if is_below_limit or ends then
      found[#found + 1] = member
      found[#found + 1] = ends and 1 or 0
    end
  end
end
return found
"""
_IS_BATCH_INPUT = """
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
# _ADVANCE, _RECORD and _FINISH run after the fence of Leases.write(). KEYS[1] is the lease's key, and ARGV[1] its token.
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
local outcomes, status = {}, redis.call('HGET', batch, 'status')
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
for at = 6, #ARGV, 5 do outcomes[#outcomes + 1] = one(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]) end
return outcomes
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
    """The result of one line of a batch."""

    number: int  # number of the line in the input, from 1
    part: str  # result file that gets the line: OUTPUT or ERRORS
    content: bytes  # line of the output or error file, with its line end
    forced: bool = False  # written even if the owner's quota is full
    usage: Mapping[str, int] = field(default_factory=dict)  # tokens, by the names of USAGE


@dataclass(frozen=True, slots=True)
class WaitingBatch:
    """An open batch without a lease holder."""

    owner: str
    id: str
    ends: bool  # whether the batch only has to be ended, because it is cancelled, expired or without a record


def batch_lease(owner: str, batch_id: str) -> str:
    """Returns the name of a batch's lease."""
    return f"batch:{owner}:{batch_id}"


class BatchStore:
    """The batches in the store.

    Raises:
        StoreAway: From every method, if the store cannot be reached.
        LeaseLost: From every method with a lease, if another gateway has it.
    """

    def __init__(self, redis: StateRedis, leases: Leases, lives_s: int, most: int, most_bytes: int) -> None:
        """Makes the store.

        Args:
            lives_s: Lifetime of a batch's record after its end, in seconds.
            most: Largest number of batches per owner.
            most_bytes: Largest number of bytes of files per owner, including the results of batches.
        """
        self._redis = redis
        self._leases = leases
        self._lives_s, self._most, self._most_bytes = lives_s, most, most_bytes

    async def begin(self, order: BatchOrder) -> bool:
        """Stores a new batch. Returns False if the owner already has `most` batches."""
        keys = OwnerKeys(order.owner)
        redis_keys = [keys.batch(order.id), keys.batches, _OPEN]
        oldest = self._lives_s + MAX_BATCH_WINDOW_S
        begun = (order.id, _member(order), order.dumped(), self._life(order), oldest, self._most)
        return bool(await self._redis.call(WRITES + _BEGIN, redis_keys, *begun))

    async def get(self, owner: str, batch_id: str) -> BatchRecord | None:
        found = await self._redis.read("return redis.call('HGETALL', KEYS[1])", [OwnerKeys(owner).batch(batch_id)])
        pairs = zip(found[::2], found[1::2], strict=True)
        return record_of({name.decode(): value for name, value in pairs}) if found else None

    async def listed(self, owner: str, after: str, limit: int) -> tuple[list[BatchRecord], bool]:
        """Lists batches, the newest first. Leaves out batches that this gateway cannot read.

        Args:
            after: Id of the last batch of the previous page; "" for the first page.

        Returns:
            The batches, and whether there are more.

        Raises:
            NoSuchPlace: The batch `after` does not exist.
        """
        ids = await page(self._redis, OwnerKeys(owner).batches, after, limit + 1, rising=False)
        found: list[BatchRecord] = []
        for each in ids[:limit]:
            with suppress(Unreadable):
                if (record := await self.get(owner, each)) is not None:
                    found.append(record)
        return found, len(ids) > limit

    async def cancel(self, owner: str, batch_id: str) -> None:
        """Marks a batch as cancelling. Has no effect on a batch that has ended or is being finalized."""
        await self._redis.call(FREES + _CANCEL, [OwnerKeys(owner).batch(batch_id)])

    async def is_batch_input(self, owner: str, file_id: str) -> bool:
        """Returns whether an open batch of the owner has this input file."""
        return bool(await self._redis.read(_IS_BATCH_INPUT, [_OPEN], f"{owner}:", file_id))

    async def waiting(self, most: int, each: int, now: int) -> list[WaitingBatch]:
        """Finds open batches without a lease holder, the oldest first.

        Returns at most `each` runnable batches per owner, and any number of batches that only have to be ended.

        After the first `each` runnable batches of an owner, a call checks only one in SAMPLES of the owner's newer batches, and
        returns it only if it has to be ended. `now` selects the checked batches. With a call per second, each newer batch is
        checked once in SAMPLES seconds.

        Args:
            most: Largest number of batches to return.
            each: Largest number of runnable batches to return per owner.
            now: Unix seconds.
        """
        found = await self._redis.read(_WAITING, [_OPEN], most, each, now, SAMPLES)
        members = [str(member, "ascii").partition(":") for member in found[::2]]
        return [
            WaitingBatch(owner, batch_id, bool(ends)) for (owner, _, batch_id), ends in zip(members, found[1::2], strict=True)
        ]

    async def forget(self, owner: str, batch_id: str) -> None:
        """Removes a batch whose record has expired from the set of open batches."""
        await self._redis.call(FREES + "return redis.call('ZREM', KEYS[1], ARGV[1])", [_OPEN], f"{owner}:{batch_id}")

    async def lines_with_result(self, order: BatchOrder) -> set[int]:
        """Returns the numbers of the lines that have a result."""
        keys = OwnerKeys(order.owner)
        script = "return redis.call('HKEYS', KEYS[1])"
        parts = [await self._redis.read(script, [keys.lines(order.id, part)]) for part in (OUTPUT, ERRORS)]
        return {int(number) for numbers in parts for number in numbers}

    async def advance(
        self, lease: Lease, order: BatchOrder, before: BatchStatus, after: BatchStatus, **fields: str | int
    ) -> bool:
        """Changes the status of a batch.

        Args:
            before: Expected current status.
            fields: Fields of the batch's hash to set together with the status.

        Returns:
            False if the status is neither `before` nor `after`.
        """
        redis_keys = [OwnerKeys(order.owner).batch(order.id)]
        flat = [each for pair in fields.items() for each in pair]
        return bool(await self._leases.write(lease, _ADVANCE, redis_keys, before.value, after.value, *flat))

    async def record(self, lease: Lease, order: BatchOrder, results: Sequence[LineResult]) -> list[LineResult]:
        """Stores results of lines. Does not replace the existing result of a line.

        Returns:
            The results that were not stored, because the owner's quota is full.

        Raises:
            LeaseLost: Another gateway has the lease, or the batch has ended.
        """
        keys = OwnerKeys(order.owner)
        redis_keys = [keys.batch(order.id), keys.lines(order.id, OUTPUT), keys.lines(order.id, ERRORS), *keys.use]
        flat: list[Any] = []
        for each in results:
            flat += [each.number, each.part, int(each.forced), each.content, orjson.dumps(dict(each.usage))]
        about = (self._most_bytes, self._life(order), order.output_id, order.error_id)
        outcomes = await self._leases.write(lease, _RECORD, redis_keys, *about, *flat)
        return [each for each, outcome in zip(results, outcomes, strict=True) if outcome == _FULL]

    async def finish(
        self,
        lease: Lease,
        record: BatchRecord,
        status: BatchStatus,
        files: Sequence[StoredFile],
        expires_at: int,
        errors: bytes = b"",
    ) -> bool:
        """Ends a batch and makes its result files visible.

        Args:
            files: Result files.
            expires_at: Unix seconds at which the result files expire.
            errors: Faults of the input as JSON; b"" for none.

        Returns:
            False if the batch had already ended.
        """
        order, keys = record.order, OwnerKeys(record.order.owner)
        ids = {OUTPUT: order.output_id, ERRORS: order.error_id}
        about = {file.part: file.dumped() for file in files}
        redis_keys = [keys.batch(order.id), _OPEN, *(keys.lines(order.id, part) for part in ids), *keys.use]
        redis_keys += [keys.file(each) for each in ids.values()]
        flat = [each for part, file_id in ids.items() for each in (file_id, about.get(part, b""))]
        error_fields = ["errors", errors] if errors else []
        end_fields = (status.value, _member(order), expires_at, self._lives_s)
        done = await self._leases.write(lease, _FINISH, redis_keys, *end_fields, *flat, *error_fields)
        return bool(done)

    def _life(self, order: BatchOrder) -> int:
        """Returns the lifetime of the batch's data after a write, in seconds."""
        return order.expires_at - order.created_at + self._lives_s


def _member(order: BatchOrder) -> str:
    return f"{order.owner}:{order.id}"
