"""Exchanges the gateways' shares of limits through the Redis of the prefix index. All Redis keys have a TTL.

ShareRefill is the background task of a gateway. A turn is one exchange with Redis: it reports the shares of at most KEYS_A_TURN
API keys and receives their grants. Requests never wait for Redis. ShareStore makes the exchange in one round trip, with one
call of a script per API key. The script uses these Redis keys:

    rl:key:DIGEST   hash   one field per gateway: its sub-bucket; then per limit the held amount, the unmet amount and the used
                           amounts by sub-bucket. Field "!": Unix seconds at which the hash was created
    rl:gateways     zset   gateways by the Unix seconds of their last report
    rl:need         zset   digests of API keys whose shares all gateways should report, by the Unix seconds of the demand

A gateway always replaces its whole field, so it may repeat a call, for example after a lost reply. If Redis has lost a hash,
the next report creates it again. The script grants nothing from a new hash for SETTLE_S, so that every gateway can report
first. Gateways send their own times and sub-buckets, so their clocks must agree within about a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redis.exceptions import RedisError

from rootstock_llm.services.gateway.keys.key_budget import KeyBudget
from rootstock_llm.services.gateway.keys.share import ShareReply, ShareReport
from rootstock_llm.services.gateway.keys.usage import bucket_of
from rootstock_llm.services.shared.index.redis_client import redis_client

logger = logging.getLogger(__name__)

TURN_S = 0.1  # seconds between two turns while a share must be reported
SOON_S = 0.02  # seconds until the next turn if a share runs low
IDLE_S = 1.0  # seconds between two turns if nothing must be reported; a turn also shows that the gateway is alive
RETRY_S = 0.5  # seconds between two turns while Redis is unreachable
RENEW_S = 30.0  # seconds after which unchanged shares are reported again, so that the hash in Redis does not expire
KEYS_A_TURN = 1000  # maximum number of API keys per turn
TIMEOUT_S = 1.0  # seconds; time limit of a call of Redis
SETTLE_S = 4.0  # seconds from the creation of a hash to the first grant
DEAD_S = 15.0  # seconds without a report after which a gateway counts as dead
NEED_S = 2.0  # seconds for which a demand for reports in rl:need is valid
TTL_S = 75  # seconds; TTL of all Redis keys
GATEWAYS, NEED = "rl:gateways", "rl:need"

# Reports this gateway's shares of the limits of one API key, and grants amounts of them.
#
# KEYS: rl:key:DIGEST, rl:gateways, rl:need.
# ARGV: name of the gateway, Unix seconds, sub-bucket, digest of the API key, SETTLE_S, DEAD_S, TTL_S, number of limits; then for
# each limit the number n of its used amounts, the limit, least, most, held, unmet (see ShareReport), and n used amounts.
# Reply: 1 if the hash is at least SETTLE_S old, else 0; then for each limit the granted amount, the unmet amount of the other
# live gateways, and n amounts that the other gateways have used.
# A gateway's record is a list of whole numbers: its sub-bucket, then for each limit the held, the unmet and the used amounts.
#
# The free amount is the part of the limit that no gateway has used or holds. `least` is granted completely if it is free,
# because a request of this size was refused. For `most`, at most half of the free amount is granted, so that other gateways can
# get a part. The grant is the larger of the two, and never more than the free amount. If the gateways use and hold more than
# the limit together, the grant is negative and takes back a part of the amount that this gateway holds. The unmet amount is
# the part of the requested amount that could not be granted, because it was not free. While a gateway has an unmet amount,
# rl:need makes the other gateways report and give up a part of their held amounts.
_SCRIPT = """
local gateway, now, bucket, digest = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local settle_s, dead_s, ttl_s, num_limits = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])

-- sizes[k]: number of used amounts of limit k, one per sub-bucket (the newest first), or 1 if the limit has no sub-buckets.
local sizes, own, arg = {}, {}, 9
for k = 1, num_limits do
  local size = tonumber(ARGV[arg])
  local share = {limit = tonumber(ARGV[arg + 1]), least = tonumber(ARGV[arg + 2]), most = tonumber(ARGV[arg + 3]),
                 held = tonumber(ARGV[arg + 4]), unmet = tonumber(ARGV[arg + 5]), used = {}}
  for i = 1, size do share.used[i] = tonumber(ARGV[arg + 5 + i]) end
  sizes[k], own[k] = size, share
  arg = arg + 6 + size
end

-- Adds up the records of the other gateways.
local live = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], now - dead_s, '+inf')) do live[name] = true end
local others = {}
for k = 1, num_limits do
  others[k] = {held = 0, unmet = 0, used = {}}
  for i = 1, sizes[k] do others[k].used[i] = 0 end
end
local created_at = false
local fields = redis.call('HGETALL', KEYS[1])
for f = 1, #fields, 2 do
  local name = fields[f]
  if name == '!' then
    created_at = tonumber(fields[f + 1])
  elseif name ~= gateway then
    local numbers = {}
    for number in string.gmatch(fields[f + 1], '%d+') do numbers[#numbers + 1] = tonumber(number) end
    local age, index, is_live = bucket - numbers[1], 2, live[name]  -- age in sub-buckets
    if not is_live and age >= sizes[1] then redis.call('HDEL', KEYS[1], name) end
    for k = 1, num_limits do
      local other, size = others[k], sizes[k]
      local held = numbers[index]
      if is_live then
        other.held, other.unmet = other.held + held, other.unmet + numbers[index + 1]
      end
      for i = 1, size do
        local used = numbers[index + 1 + i]
        -- A dead gateway may have used its held amount after its last report, so the amount counts as used.
        if i == 1 and not is_live then used = used + held end
        if size == 1 then
          if is_live then other.used[1] = other.used[1] + used end
        else
          -- The amounts of an older record move to older sub-buckets. A record from the future counts in the newest one.
          local shifted = math.max(i + age, 1)
          if shifted <= size then other.used[shifted] = other.used[shifted] + used end
        end
      end
      index = index + 2 + size
    end
  end
end

-- Grants amounts of each limit, and writes the record of this gateway.
local settled = created_at and now - created_at >= settle_s
local reply, record, has_unmet = {settled and 1 or 0}, {string.format('%d', bucket)}, false
for k = 1, num_limits do
  local share, other = own[k], others[k]
  local free = share.limit - share.held - other.held
  for i = 1, sizes[k] do free = free - share.used[i] - other.used[i] end
  local granted = 0
  if settled and free > 0 then
    granted = math.min(free, math.max(share.least, math.min(share.most, math.ceil(free / 2))))
  elseif settled then
    granted = -math.min(-free, share.held)
  end
  local unmet = math.max(share.least, share.unmet) - math.max(granted, 0)
  if unmet < 0 or granted < free then unmet = 0 end
  has_unmet = has_unmet or unmet > 0
  reply[#reply + 1], reply[#reply + 2] = granted, other.unmet
  for i = 1, sizes[k] do reply[#reply + 1] = other.used[i] end
  record[#record + 1], record[#record + 2] = string.format('%d', share.held + granted), string.format('%d', unmet)
  for i = 1, sizes[k] do record[#record + 1] = string.format('%d', share.used[i]) end
end
redis.call('HSET', KEYS[1], gateway, table.concat(record, ' '))
if not created_at then redis.call('HSET', KEYS[1], '!', ARGV[2]) end
redis.call('EXPIRE', KEYS[1], ttl_s)
if has_unmet or not settled then
  redis.call('ZADD', KEYS[3], now, digest)
  redis.call('EXPIRE', KEYS[3], ttl_s)
end
return reply
"""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The result of one exchange with Redis."""

    gateways: int  # number of live gateways, including this one
    in_need: Sequence[str]  # digests of API keys whose shares all gateways should report
    # For each reported API key: whether its hash grants amounts yet, and one reply per limit.
    answers: Sequence[tuple[bool, list[ShareReply]]]


class ShareStore:
    """The client of the Redis that has the shares."""

    def __init__(self, url: str, name: str) -> None:
        """Makes the client.

        Args:
            name: Unique name of this gateway, of letters and digits.

        Raises:
            ValueError: The URL is invalid.
        """
        self._client = redis_client(url, TIMEOUT_S)
        self._name = name
        self._script = ""  # SHA of the script in Redis; "" if Redis may not have the script

    async def close(self) -> None:
        await self._client.aclose()

    async def exchange(self, now: float, reports: Sequence[tuple[str, Sequence[ShareReport]]]) -> Exchanged:
        """Reports shares and returns the grants, in one round trip.

        Args:
            now: Unix seconds.
            reports: For each API key its digest, and one report per limit.

        Raises:
            RedisError, OSError: Redis is unreachable or refuses the call. The reports may still have arrived.
        """
        name, self._script = self._script, ""
        if not name:
            name = str(await self._client.script_load(_SCRIPT))
        pipe = self._client.pipeline(transaction=False)
        pipe.zadd(GATEWAYS, {self._name: now})
        pipe.zremrangebyscore(GATEWAYS, "-inf", now - DEAD_S)
        pipe.expire(GATEWAYS, TTL_S)
        pipe.zcard(GATEWAYS)
        pipe.zremrangebyscore(NEED, "-inf", now - NEED_S)
        pipe.zrange(NEED, 0, -1)
        for digest, each in reports:
            pipe.evalsha(name, 3, f"rl:key:{digest}", GATEWAYS, NEED, *self._arguments(digest, each, now))
        replies = await pipe.execute()
        self._script = name
        in_need = [member.decode(errors="replace") for member in replies[5]]
        sizes = [[len(report.amounts) for report in each] for _, each in reports]
        return Exchanged(int(replies[3]), in_need, [_replies(*pair) for pair in zip(replies[6:], sizes, strict=True)])

    def _arguments(self, digest: str, reports: Sequence[ShareReport], now: float) -> list[Any]:
        found: list[Any] = [self._name, f"{now:.3f}", bucket_of(now), digest, SETTLE_S, DEAD_S, TTL_S, len(reports)]
        for one in reports:
            found += [len(one.amounts), one.limit, one.least, one.most, one.held, one.unmet, *one.amounts]
        return found


def _replies(reply: list[int], sizes: Sequence[int]) -> tuple[bool, list[ShareReply]]:
    found, at = [], 1
    for size in sizes:
        granted, unmet = reply[at], reply[at + 1]
        found.append(ShareReply(granted, unmet > 0, reply[at + 2 : at + 2 + size]))
        at += 2 + size
    return reply[0] == 1, found


class Store(Protocol):
    async def exchange(self, now: float, reports: Sequence[tuple[str, Sequence[ShareReport]]]) -> Exchanged: ...

    async def close(self) -> None: ...


class ShareRefill:
    """The background task that exchanges the shares of all budgets with Redis. It owns the connection."""

    def __init__(self, store: Store, budgets: Mapping[str, KeyBudget], clock: Callable[[], float]) -> None:
        """Makes the task.

        Args:
            budgets: Budgets of the API keys with limits, by digest.
            clock: Returns Unix seconds.
        """
        self._store = store
        self._budgets = budgets
        self._clock = clock
        self._requested: set[str] = set()  # digests of the API keys in rl:need: another gateway needs a part of their shares
        self._low = asyncio.Event()
        self._num_postponed = 0  # API keys that exceeded KEYS_A_TURN in the last turn
        self._num_gateways = 0  # 0 until Redis is reached for the first time
        # Time since which Redis lists fewer gateways than `_num_gateways`; None while Redis does not list fewer.
        self._fewer_since: float | None = None
        self.is_up = False  # whether the last exchange succeeded

    @property
    def gateways(self) -> int:
        """Last known number of live gateways, including this one; 0 if Redis was never reached."""
        return self._num_gateways

    def runs_low(self) -> None:
        """Requests an early turn, because a share runs low."""
        self._low.set()

    async def run(self) -> None:
        """Exchanges shares until it is cancelled, and then closes the connection."""
        try:
            while True:
                await self.turn()
                await self._pause()
        finally:
            await self._store.close()

    async def turn(self) -> None:
        """Exchanges the shares of at most KEYS_A_TURN API keys.

        If Redis is unreachable, all shares change to the alone mode; see share.py.
        """
        now = self._clock()
        self._low.clear()
        due = list(self._due(now))
        self._num_postponed = max(0, len(due) - KEYS_A_TURN)
        due = due[:KEYS_A_TURN]
        gateways = max(1, self._num_gateways)
        reports = [(budget.digest, budget.report(now, gateways)) for budget in due]
        try:
            exchanged = await self._store.exchange(now, reports)
        except (RedisError, OSError) as error:
            self._lose_redis(error)
            return
        if not self.is_up:
            logger.info("gateways share the limits of API keys in Redis")
            self.is_up = True
        self._count(exchanged.gateways, now)
        self._requested = set(exchanged.in_need)
        now = self._clock()
        for budget, (settled, answers) in zip(due, exchanged.answers, strict=True):
            budget.answered(answers, settled, now)

    def _due(self, now: float) -> Iterator[KeyBudget]:
        """Yields the budgets that must be reported.

        Budgets that have changed, or whose API keys were in rl:need at the last turn, come first.
        """
        found = self._budgets.values()
        late: list[KeyBudget] = []
        for budget in found:
            if budget.dirty or budget.digest in self._requested:
                yield budget
            elif now - budget.reported_at >= RENEW_S:
                late.append(budget)
        yield from late

    def _count(self, gateways: int, now: float) -> None:
        """Updates the number of gateways.

        If the number has risen, all shares are reported, so that they yield a part to the new gateway. A smaller number counts
        only after DEAD_S, because a restarted Redis does not list all gateways at first.
        """
        if gateways > self._num_gateways:
            for budget in self._budgets.values():
                budget.gateway_joined()
        if gateways >= self._num_gateways:
            self._num_gateways, self._fewer_since = gateways, None
        elif self._fewer_since is None:
            self._fewer_since = now
        elif now - self._fewer_since >= DEAD_S:
            self._num_gateways, self._fewer_since = gateways, None

    def _lose_redis(self, error: Exception) -> None:
        if self.is_up:
            logger.warning("redis is unreachable; each gateway applies its part of the limits of API keys: %s", error)
        self.is_up = False
        now = self._clock()
        for budget in self._budgets.values():
            budget.go_alone(now)

    async def _pause(self) -> None:
        if not self.is_up:
            await asyncio.sleep(RETRY_S)
            return
        await asyncio.sleep(SOON_S)
        if self._num_postponed:
            return
        busy = self._requested or any(budget.dirty for budget in self._budgets.values())
        try:
            async with asyncio.timeout((TURN_S if busy else IDLE_S) - SOON_S):
                await self._low.wait()
        except TimeoutError:
            return
