"""Files in the store, as chunks. A file exists from seal() until it expires or is deleted.

A chunk counts against its owner's quota as soon as it is written. Chunks of an upload that is never sealed expire after UPLOAD_S.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from rootstock_llm.services.gateway.store.state_redis import FREES, WRITES, StateRedis
from rootstock_llm.services.gateway.store.stored_files import FileGone, OwnerKeys, StoredFile, accounts, loaded
from rootstock_llm.services.shared.limits import FILE_CHUNK_BYTES

UPLOAD_S = 3600  # lifetime of a chunk before its file is sealed, in seconds

_ADD = (
    accounts(2)
    + """
local id, content, most, lives = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local before = redis.call('STRLEN', KEYS[1])
if used() - before + #content > most then return 0 end
redis.call('SET', KEYS[1], content, 'EX', lives)
redis.call('ZADD', KEYS[u], seconds + lives, id)
count(id, #content - before)
return 1
"""
)
_SEAL = (
    accounts(2)
    + """
local id, about, expires_at, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('EXISTS', KEYS[1]) == 1 then return 1 end
if redis.call('ZCARD', KEYS[u + 2]) >= most then return 0 end
for at = u + 3, #KEYS do
  if redis.call('EXPIREAT', KEYS[at], expires_at) == 0 then return -1 end
end
redis.call('SET', KEYS[1], about, 'EXAT', expires_at)
redis.call('ZADD', KEYS[u + 2], now[1] * 1000000 + now[2], id)
redis.call('ZADD', KEYS[u], expires_at, id)
return 1
"""
)
_DELETE = (
    accounts(2)
    + """
local id = ARGV[1]
local there = redis.call('DEL', KEYS[1])
for at = u + 3, #KEYS do redis.call('UNLINK', KEYS[at]) end
forget(id)
return there
"""
)
_PROLONG = """
local expires_at = tonumber(ARGV[2])
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if redis.call('EXPIRETIME', KEYS[1]) >= expires_at then return 1 end
for at = 3, #KEYS do
  if redis.call('EXPIREAT', KEYS[at], expires_at) == 0 then return 0 end
end
redis.call('SET', KEYS[1], ARGV[3], 'EXAT', expires_at)
redis.call('ZADD', KEYS[2], expires_at, ARGV[1])
return 1
"""
# Returns the result lines of a batch from number ARGV[1] to ARGV[2], until they have ARGV[3] bytes. The first item of the reply
# is the number of the next line to read.
_LINES = """
local number, last, most, found, bytes = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), {}, 0
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
while number <= last and bytes < most do
  local line = redis.call('HGET', KEYS[1], number)
  if line then
    found[#found + 1] = line
    bytes = bytes + #line
  end
  number = number + 1
end
return {number, unpack(found)}
"""
# Returns the ids after ARGV[1], the last id of the previous page.
_PAGE = """
local after, begin, stop, rising = ARGV[1], 0, tonumber(ARGV[2]), ARGV[3] == '1'
if after ~= '' then
  local rank = redis.call(rising and 'ZRANK' or 'ZREVRANK', KEYS[1], after)
  if not rank then return -1 end
  begin = rank + 1
end
return redis.call(rising and 'ZRANGE' or 'ZREVRANGE', KEYS[1], begin, begin + stop - 1)
"""
_AT_ONCE = 1000  # items per call; more would block the store's other calls for too long


class NoSuchPlace(Exception):
    """The id after which a page should begin does not exist."""


async def page(redis: StateRedis, key: str, after: str, count: int, rising: bool) -> list[str]:
    """Returns a page of ids of a sorted set.

    Args:
        after: Last id of the previous page; "" for the first page.
        count: Largest number of ids.
        rising: True lists the oldest ids first; False the newest.

    Raises:
        NoSuchPlace: The id `after` does not exist.
        StoreAway: The store cannot be reached.
    """
    found = await redis.read(_PAGE, [key], after, count, int(rising))
    if found == -1:
        raise NoSuchPlace
    return [str(each, "ascii") for each in found]


class FileStore:
    """The files in the store. Every method raises StoreAway if the store cannot be reached."""

    def __init__(self, redis: StateRedis, most: int, most_bytes: int) -> None:
        """Makes the store.

        Args:
            most: Largest number of files per owner.
            most_bytes: Largest number of bytes of files per owner, including the results of batches.
        """
        self._redis = redis
        self._most, self.most_bytes = most, most_bytes

    async def add(self, owner: str, file_id: str, number: int, content: bytes) -> bool:
        """Writes a chunk of a file that is not sealed yet. Returns False if the owner's quota is full."""
        keys = OwnerKeys(owner)
        script = WRITES + _ADD
        redis_keys = [keys.chunk(file_id, number), *keys.use]
        return bool(await self._redis.call(script, redis_keys, file_id, content, self.most_bytes, UPLOAD_S))

    async def seal(self, owner: str, file: StoredFile) -> bool:
        """Makes an uploaded file visible. Returns False if the owner already has `most` files, or a chunk has expired."""
        keys = OwnerKeys(owner)
        redis_keys = [keys.file(file.id), *keys.use, *keys.chunks(file)]
        script = WRITES + _SEAL
        return int(await self._redis.call(script, redis_keys, file.id, file.dumped(), file.expires_at, self._most)) == 1

    async def discard(self, owner: str, file_id: str, chunks: int) -> None:
        """Deletes the chunks of a file that was not sealed."""
        keys = OwnerKeys(owner)
        redis_keys = [keys.file(file_id), *keys.use, *(keys.chunk(file_id, number) for number in range(chunks))]
        await self._redis.call(FREES + _DELETE, redis_keys, file_id)

    async def get(self, owner: str, file_id: str) -> StoredFile | None:
        (found,) = await self._get_all(owner, [file_id])
        return found

    async def delete(self, owner: str, file: StoredFile) -> bool:
        """Deletes a file with its content. Returns whether it existed."""
        keys = OwnerKeys(owner)
        content = [keys.lines(file.batch, file.part)] if file.batch else keys.chunks(file)
        redis_keys = [keys.file(file.id), *keys.use, *content]
        return await self._redis.deletes(FREES + _DELETE, redis_keys, file.id)

    async def prolong(self, owner: str, file: StoredFile, until: int) -> bool:
        """Extends the lifetime of a file to at least `until`, in Unix seconds. Returns False if the file no longer exists."""
        if file.expires_at >= until:
            return True
        keys, later = OwnerKeys(owner), replace(file, expires_at=until)
        redis_keys = [keys.file(file.id), keys.use[0], *keys.chunks(file)]
        return bool(await self._redis.call(WRITES + _PROLONG, redis_keys, file.id, until, later.dumped()))

    async def listed(self, owner: str, after: str, limit: int, rising: bool, purpose: str) -> tuple[list[StoredFile], bool]:
        """Lists files in the order of their creation.

        Args:
            after: Id of the last file of the previous page; "" for the first page.
            rising: True lists the oldest files first; False the newest.
            purpose: Lists only files with this purpose; "" for all.

        Returns:
            The files, and whether there are more.

        Raises:
            NoSuchPlace: The file `after` does not exist.
        """
        found: list[StoredFile] = []
        at_once = min(limit + 1, _AT_ONCE)
        while len(found) <= limit:
            ids = await page(self._redis, OwnerKeys(owner).files, after, at_once, rising)
            there = [file for file in await self._get_all(owner, ids) if file is not None]
            found += [file for file in there if purpose in ("", file.purpose)]
            if len(ids) < at_once:
                break
            after = ids[-1]
        return found[:limit], len(found) > limit

    async def content(self, owner: str, file: StoredFile) -> AsyncIterator[bytes]:
        """Yields the content of a file in pieces. Raises FileGone."""
        keys = OwnerKeys(owner)
        if file.batch:
            async for piece in self._lines(keys.lines(file.batch, file.part), file.lines):
                yield piece
            return
        for number in range(file.chunks):
            yield await self.chunk(owner, file, number)

    async def chunk(self, owner: str, file: StoredFile, number: int) -> bytes:
        """Returns one chunk of a file. Raises FileGone."""
        key = OwnerKeys(owner).chunk(file.id, number)
        found: bytes | None = await self._redis.read("return redis.call('GET', KEYS[1])", [key])
        if found is None:
            raise FileGone
        return found

    async def _lines(self, key: str, last: int) -> AsyncIterator[bytes]:
        number = 1
        while number <= last:
            until = min(last, number + _AT_ONCE - 1)
            found = await self._redis.read(_LINES, [key], number, until, FILE_CHUNK_BYTES)
            if not found:
                raise FileGone
            number = int(found[0])
            if len(found) > 1:
                yield b"".join(found[1:])

    async def _get_all(self, owner: str, ids: Sequence[str]) -> list[StoredFile | None]:
        if not ids:
            return []
        keys = [OwnerKeys(owner).file(each) for each in ids]
        found = await self._redis.read("return redis.call('MGET', unpack(KEYS))", keys)
        return [None if each is None else loaded(each) for each in found]
