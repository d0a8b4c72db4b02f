"""Lua scripts of background_store.py. The methods of BackgroundStore describe their effects.

KEYS are those of background_store._keys(), and ARGV[1] is the lease's token. FIND_UNLEASED, RENEW, LIST_PAGE and FOLLOW have
other arguments, and READ and DELETE need no token. KEYS[12] of FINISH is the record of the conversation.

Redis needs FREES or WRITES as the first line of a script. BEGIN and TAKE contain this line. Leases.write() puts the line and a
check of the lease before WRITE, FINISH, ORDER and GIVE_UP. StateRedis.read() runs FIND_UNLEASED, READ, LIST_PAGE and FOLLOW. The
callers put FREES before all other scripts.
"""

from __future__ import annotations

from rootstock_llm.services.gateway.store.state_redis import FREES, WRITES

_ACCOUNTS = """
local now = redis.call('TIME')
local seconds = tonumber(now[1])
local function size_of(name) return tonumber(redis.call('HGET', KEYS[11], name) or '0') end
local function count(name, bytes, lives)
  local change = bytes - size_of(name)
  if change ~= 0 then redis.call('HINCRBY', KEYS[11], '!', change) end
  if bytes > 0 then
    redis.call('HSET', KEYS[11], name, bytes)
    redis.call('ZADD', KEYS[10], seconds + lives, name)
    for at = 10, 11 do
      if redis.call('TTL', KEYS[at]) < lives then redis.call('EXPIRE', KEYS[at], lives) end
    end
  else
    redis.call('HDEL', KEYS[11], name)
    redis.call('ZREM', KEYS[10], name)
  end
end
local function forget_work(member, id)
  count('work:' .. id, 0, 0)
  redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
  redis.call('ZREM', KEYS[7], member)
  redis.call('ZREM', KEYS[8], id)
end
local function is_open(status) return status == 'queued' or status == 'in_progress' end
local function events_from(first)
  local bytes = 0
  for at = first, #ARGV do
    redis.call('RPUSH', KEYS[3], ARGV[at])
    bytes = bytes + #ARGV[at]
  end
  return bytes
end
"""
BEGIN = (
    WRITES
    + _ACCOUNTS
    + """
local id, member, content, order, prompt = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local ttl, most, most_bytes = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local most_open, lives = tonumber(ARGV[11]), tonumber(ARGV[12])
if redis.call('EXISTS', KEYS[2]) == 1 then return 1 end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[10], '-inf', seconds, 'LIMIT', 0, 1000)) do count(name, 0, 0) end
redis.call('ZREMRANGEBYSCORE', KEYS[8], '-inf', seconds - lives)
if redis.call('ZCARD', KEYS[8]) >= most_open then return -1 end
local work = #order + #prompt
for at = 13, #ARGV do work = work + #ARGV[at] end
if size_of('!') + #content + work > most_bytes or redis.call('ZCARD', KEYS[10]) + 2 > most then return 0 end
redis.call('HSET', KEYS[9], 'c', content, 'v', 1)
redis.call('EXPIRE', KEYS[9], math.max(ttl, lives))
local event_bytes = events_from(13)
redis.call('HSET', KEYS[2], 'order', order, 'prompt', prompt, 'status', 'queued', 'takes', 1, 'taken', seconds, 'alive', seconds)
redis.call('HSET', KEYS[2], 'pieces', 0, 'decoded', 0, 'chars', 0, 'shown', 0, 'bytes', work, 'told', event_bytes)
redis.call('HSET', KEYS[2], 'holder', ARGV[1])
for at = 2, 3 do redis.call('EXPIRE', KEYS[at], lives) end
redis.call('ZADD', KEYS[7], seconds * 1000000 + now[2], member)
redis.call('ZADD', KEYS[8], seconds, id)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
count(id, #content, math.max(ttl, lives))
count('work:' .. id, work, lives)
return 1
"""
)
WRITE = (
    _ACCOUNTS
    + """
local number, status, id = tonumber(ARGV[2]), ARGV[3], ARGV[13]
local most_work, most_bytes, lives = tonumber(ARGV[14]), tonumber(ARGV[15]), tonumber(ARGV[16])
local found = redis.call('HMGET', KEYS[2], 'status', 'pieces', 'bytes')
if not is_open(found[1]) then return 'lost' end
local pieces = tonumber(found[2])
if pieces == number then return 1 end
if pieces ~= number - 1 then return 'lost' end
local more = #ARGV[10] + #ARGV[11] + #ARGV[12]
for at = 17, #ARGV do more = more + #ARGV[at] end
local bytes = tonumber(found[3]) + more
if bytes > most_work then return -1 end
if size_of('!') + more > most_bytes then return 0 end
local event_bytes = events_from(17)
if #ARGV[10] > 0 then redis.call('SETRANGE', KEYS[4], ARGV[9], ARGV[10]) end
if #ARGV[11] > 0 then redis.call('RPUSH', KEYS[5], ARGV[11]) end
if #ARGV[12] > 0 then redis.call('RPUSH', KEYS[6], ARGV[12]) end
redis.call('HSET', KEYS[2], 'pieces', number, 'status', status, 'bytes', bytes, 'alive', seconds)
redis.call('HINCRBY', KEYS[2], 'told', event_bytes)
redis.call('HSET', KEYS[2], 'decoded', ARGV[4], 'chars', ARGV[5], 'shown', ARGV[6])
if #ARGV[7] > 0 then redis.call('HSET', KEYS[2], 'weights', ARGV[7], 'numerics', ARGV[8]) end
for at = 2, 6 do redis.call('EXPIRE', KEYS[at], lives) end
count('work:' .. id, bytes, lives)
return 1
"""
)
FINISH = (
    _ACCOUNTS
    + """
local number, status, id, member, content = tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local ttl, replay = tonumber(ARGV[7]), tonumber(ARGV[8])
local conversation, conversation_content, most_bytes, done = ARGV[9], ARGV[11], tonumber(ARGV[12]), 1
local found = redis.call('HMGET', KEYS[2], 'status', 'pieces', 'told')
local pieces = tonumber(found[2])
if found[1] == status and pieces == number then return 1 end
if not is_open(found[1]) or pieces ~= number - 1 or redis.call('EXISTS', KEYS[9]) == 0 then return 'lost' end
if #conversation > 0 then
  if redis.call('HGET', KEYS[12], 'v') ~= ARGV[10] then return 0 end
  if size_of('!') - size_of(conversation) + #conversation_content <= most_bytes then
    redis.call('HSET', KEYS[12], 'c', conversation_content)
    redis.call('HINCRBY', KEYS[12], 'v', 1)
    redis.call('EXPIRE', KEYS[12], ttl)
    count(conversation, #conversation_content, ttl)
  else
    done = 2
  end
end
local event_bytes = tonumber(found[3]) + events_from(13)
redis.call('HSET', KEYS[2], 'status', status, 'pieces', number)
redis.call('HDEL', KEYS[2], 'order', 'prompt')
redis.call('HSET', KEYS[9], 'c', content)
redis.call('HINCRBY', KEYS[9], 'v', 1)
redis.call('EXPIRE', KEYS[9], ttl)
for at = 2, 3 do redis.call('EXPIRE', KEYS[at], replay) end
redis.call('DEL', KEYS[4], KEYS[5], KEYS[6])
redis.call('ZREM', KEYS[7], member)
redis.call('ZREM', KEYS[8], id)
count(id, #content, ttl)
count('work:' .. id, event_bytes, replay)
return done
"""
)
TAKE = (
    FREES
    + _ACCOUNTS
    + """
local found = redis.call('HMGET', KEYS[2], 'status', 'takes', 'taken', 'alive')
if not is_open(found[1]) then
  redis.call('ZREM', KEYS[7], ARGV[4])
  redis.call('ZREM', KEYS[8], ARGV[5])
  return 0
end
local token_now = redis.call('GET', KEYS[1])
if token_now == ARGV[1] then return 1 end
if token_now then return 0 end
if redis.call('EXISTS', KEYS[9]) == 0 then
  forget_work(ARGV[4], ARGV[5])
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local takes = 1
if tonumber(found[4]) - tonumber(found[3]) < tonumber(ARGV[3]) then takes = 1 + tonumber(found[2]) end
redis.call('HSET', KEYS[2], 'takes', takes, 'taken', seconds, 'alive', seconds, 'holder', ARGV[1])
return 1
"""
)
ORDER = """
local found = redis.call('HMGET', KEYS[2], 'order', 'takes')
if tonumber(found[2] or '0') > tonumber(ARGV[2]) then return false end
return found[1]
"""
GIVE_UP = (
    _ACCOUNTS
    + """
local member, id, content, ttl = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
if #content > 0 and redis.call('EXISTS', KEYS[9]) == 1 then
  redis.call('HSET', KEYS[9], 'c', content)
  redis.call('HINCRBY', KEYS[9], 'v', 1)
  redis.call('EXPIRE', KEYS[9], ttl)
  count(id, #content, ttl)
end
forget_work(member, id)
redis.call('DEL', KEYS[1])
return 1
"""
)
FIND_UNLEASED = """
local found = {}
for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if #found == tonumber(ARGV[1]) then break end
  if redis.call('EXISTS', 'state:lease:background:' .. member) == 0
    and (ARGV[2] == '0' or redis.call('HGET', 'state:background:' .. member, 'holder') == '') then
    found[#found + 1] = member
  end
end
return found
"""
RENEW = """
local now = redis.call('TIME')
local renewed = {}
for at = 1, #KEYS, 2 do
  local token = ARGV[1 + (at + 1) / 2]
  local token_now = redis.call('GET', KEYS[at])
  local found = redis.call('HMGET', KEYS[at + 1], 'status', 'cancel', 'holder')
  local is_open = found[1] == 'queued' or found[1] == 'in_progress'
  if is_open and not found[2] and (token_now == token or (not token_now and found[3] == token)) then
    redis.call('SET', KEYS[at], token, 'PX', ARGV[1])
    redis.call('HSET', KEYS[at + 1], 'alive', now[1])
    renewed[#renewed + 1] = 1
  else
    renewed[#renewed + 1] = 0
  end
end
return renewed
"""
SEIZE = (
    _ACCOUNTS
    + """
if not is_open(redis.call('HGET', KEYS[2], 'status')) then return 0 end
redis.call('HSET', KEYS[2], 'cancel', 1)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
)
RELEASE = """
local token_now = redis.call('GET', KEYS[1])
if (token_now and token_now ~= ARGV[1]) or redis.call('HGET', KEYS[2], 'holder') ~= ARGV[1] then return 0 end
redis.call('HINCRBY', KEYS[2], 'takes', -1)
redis.call('HSET', KEYS[2], 'holder', '')
redis.call('DEL', KEYS[1])
return 1
"""
READ = """
return {
  redis.call('HGETALL', KEYS[2]), redis.call('LLEN', KEYS[3]), redis.call('STRLEN', KEYS[4]),
  redis.call('LLEN', KEYS[5]), redis.call('LLEN', KEYS[6])
}
"""
_PAGES = """
local function page(key, first, last, most)
  local found, bytes = {}, 0
  for at = tonumber(first), tonumber(last), 8 do
    for _, item in ipairs(redis.call('LRANGE', key, at, math.min(at + 7, tonumber(last)))) do
      bytes = bytes + #item
      if #found > 0 and bytes > tonumber(most) then return found end
      found[#found + 1] = item
    end
  end
  return found
end
"""
LIST_PAGE = _PAGES + "return page(KEYS[1], ARGV[1], ARGV[2], ARGV[3])"  # KEYS[1]: any list
FOLLOW = (
    _PAGES
    + """
local status, total = redis.call('HGET', KEYS[1], 'status') or '', redis.call('LLEN', KEYS[2])
return {status, total, page(KEYS[2], ARGV[1], ARGV[2], ARGV[3])}
"""
)
DELETE = (
    _ACCOUNTS
    + """
local there = redis.call('DEL', KEYS[9])
count(ARGV[3], 0, 0)
count('work:' .. ARGV[3], 0, 0)
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
redis.call('ZREM', KEYS[7], ARGV[2])
redis.call('ZREM', KEYS[8], ARGV[3])
return there
"""
)
