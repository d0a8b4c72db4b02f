"""The immutable record of a stored file, and the Redis keys of one owner's files and batches."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson

OUTPUT, ERRORS = "output", "errors"  # the two result files of a batch


class FileGone(Exception):
    """Some or all of the file's content has expired or is deleted."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The record of a file. The content of a batch's result file is stored by line, and the content of other files in chunks."""

    id: str
    size: int  # bytes
    created_at: int  # Unix seconds
    expires_at: int  # Unix seconds
    name: str
    purpose: str
    chunks: int = 0  # number of chunks; 0 for a result file
    batch: str = ""  # id of the batch of a result file; "" for any other file
    part: str = ""  # OUTPUT or ERRORS for a result file
    lines: int = 0  # number of the last line of the batch's input; 0 for any other file

    def dumped(self) -> bytes:
        return orjson.dumps(asdict(self))


def loaded(content: bytes) -> StoredFile:
    return StoredFile(**orjson.loads(content))


@dataclass(frozen=True, slots=True)
class OwnerKeys:
    """The Redis keys of one owner's files and batches.

    state:files:OWNER          zset    ids of files, by the microsecond of their creation
    state:file:OWNER:ID        string  record of a file; expires together with the file's content
    state:chunk:OWNER:ID:N     string  chunk N of a file's content
    state:lines:OWNER:ID:PART  hash    results of a batch, by the number of the line in its input
    state:filebytes:OWNER      hash    bytes by file id; field "!" has the total
    state:fileuse:OWNER        zset    ids of files, by the Unix second at which they expire
    state:batches:OWNER        zset    ids of batches, by the microsecond of their creation
    state:batch:OWNER:ID       hash    record of a batch
    """

    owner: str  # owner_of() of an API key

    @property
    def files(self) -> str:
        return f"state:files:{self.owner}"

    @property
    def use(self) -> list[str]:
        """Keys of the quota's counts, in the order that accounts() expects."""
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
    """Returns the beginning of a script that changes the use of a quota. The script first removes the counts of expired files.

    Args:
        at: Index in KEYS of the first key of OwnerKeys.use, from 1.
    """
    return f"local u = {at}\n{_ACCOUNTS}"
