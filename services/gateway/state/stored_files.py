"""What is known of a file beside its content. Frozen and plain; owner: see owner_of()."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson

OUTPUT, ERRORS = "output", "errors"  # parts of a batch's results


class FileGone(Exception):
    """Its content is not there any more, or not all of it."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """size: bytes. created_at, expires_at: Unix seconds. chunks: that its content is kept in; 0 for a part of a batch's results,
    which is kept by line. batch, part, lines: the batch's id, which part of its results it is, and the last line's number."""

    id: str
    size: int
    created_at: int
    expires_at: int
    name: str
    purpose: str
    chunks: int = 0
    batch: str = ""
    part: str = ""
    lines: int = 0

    def dumped(self) -> bytes:
        return orjson.dumps(asdict(self))


def loaded(content: bytes) -> StoredFile:
    return StoredFile(**orjson.loads(content))


@dataclass(frozen=True, slots=True)
class OwnerKeys:
    """Of an owner, in the store.

    state:files:OWNER          zset   ids of files, by the microsecond in which they were made
    state:file:OWNER:ID        string what is known of one; like all of its content it ends by itself when it expires
    state:chunk:OWNER:ID:N     string a chunk of its content
    state:lines:OWNER:ID:PART  hash   results of a batch, by the number of the input's line
    state:filebytes:OWNER      hash   bytes by file; "!": of all of them
    state:fileuse:OWNER        zset   files by the second in which they expire
    state:batches:OWNER        zset   ids of batches, by the microsecond in which they were made
    state:batch:OWNER:ID       hash   what is known of one
    """

    owner: str

    @property
    def files(self) -> str:
        return f"state:files:{self.owner}"

    @property
    def use(self) -> list[str]:
        """What the accounts are kept in."""
        return [f"state:fileuse:{self.owner}", f"state:filebytes:{self.owner}", self.files]

    @property
    def batches(self) -> str:
        return f"state:batches:{self.owner}"

    def file(self, file_id: str) -> str:
        return f"state:file:{self.owner}:{file_id}"

    def chunk(self, file_id: str, number: int) -> str:
        return f"state:chunk:{self.owner}:{file_id}:{number}"

    def chunks(self, file: StoredFile) -> list[str]:
        return [self.chunk(file.id, number) for number in range(file.chunks)]

    def batch(self, batch_id: str) -> str:
        return f"state:batch:{self.owner}:{batch_id}"

    def lines(self, batch_id: str, part: str) -> str:
        return f"state:lines:{self.owner}:{batch_id}:{part}"


_ACCOUNTS = """
local now = redis.call('TIME')
local seconds = tonumber(now[1])
local function forget(id)
  local size = tonumber(redis.call('HGET', KEYS[u + 1], id) or '0')
  redis.call('HDEL', KEYS[u + 1], id)
  if size > 0 then redis.call('HINCRBY', KEYS[u + 1], '!', -size) end
  redis.call('ZREM', KEYS[u], id)
  redis.call('ZREM', KEYS[u + 2], id)
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[u], '-inf', seconds, 'LIMIT', 0, 1000)) do forget(id) end
local function used() return tonumber(redis.call('HGET', KEYS[u + 1], '!') or '0') end
local function count(id, bytes)
  redis.call('HINCRBY', KEYS[u + 1], id, bytes)
  redis.call('HINCRBY', KEYS[u + 1], '!', bytes)
end
"""


def accounts(at: int) -> str:
    """How scripts that touch a quota begin. at: where OwnerKeys.use begins in KEYS. What has expired is counted no more."""
    return f"local u = {at}\n{_ACCOUNTS}"
