"""A log with the names of the blocks whose pages are in a page store.

The prefix index needs the names of blocks, and a name cannot be computed from a page key. With the log, a worker can report its
stored blocks to the prefix index again after a restart.

    header 64 | record | record | ...        record: head 20 | keys, [n, 40] | checksum 8        little-endian

Names are hints. If a name is missing, torn or of another identity, the only effect is that a request may be routed to another
worker. The log therefore syncs nothing, and only logs disk errors. It has one owner, which calls it on one thread.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import xxhash

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.worker.core.contracts.transfers import TierBlock
from rootstock_llm.services.worker.core.tiers.page_keys import KEY_BYTES
from rootstock_llm.services.worker.exec.tiers.disk import Disk
from rootstock_llm.services.worker.exec.tiers.write_pause import WritePause

logger = logging.getLogger(__name__)
_HEADER = struct.Struct("<8sII32s8x")  # magic, version, length of the identity, identity
_HEAD = struct.Struct("<I8s8s")  # number of keys, block name, model version (weights)
_MAGIC, _VERSION = b"RSTKVBLK", 1
_CHECKSUM_BYTES = 8
MOST_KEYS = 64  # largest number of page keys of a block, which has 64 tokens
SPARE_BYTES = 4 << 20  # append() rewrites a file that would exceed 2 * S + SPARE_BYTES; S is its size after the last rewrite


class BlockLog:
    """The log of one page store."""

    def __init__(
        self, path: Path, identity: bytes, stored_keys: Callable[[], Collection[bytes]], disk: Disk | None = None
    ) -> None:
        """Opens no file yet.

        Args:
            path: the log's file.
            identity: identity of the store, at most 32 bytes.
            stored_keys: returns the page keys in the store.
            disk: the file system, None for the machine's.
        """
        begin = _HEADER.pack(_MAGIC, _VERSION, len(identity), identity)
        self._header = begin + xxhash.xxh3_64_digest(begin)
        self._path, self._stored_keys, self._disk = path, stored_keys, disk or Disk()
        self._pause = WritePause(time.monotonic)
        self._fd: int | None = None
        self._size = self._most = 0  # bytes of the file, and largest size to which append() enlarges it without a rewrite

    def read(self) -> list[TierBlock]:
        """Returns the blocks that have a page in the store, oldest first, and removes all other names from the file."""
        try:
            blocks = self._with_pages(self._found())
            self._rewrite(blocks)
        except OSError as error:
            self._failed(error)
            return []
        return blocks

    def append(self, blocks: Iterable[TierBlock]) -> None:
        """Appends the names of blocks whose pages have been stored. Does nothing during the pause after a disk error."""
        records = b"".join(map(_record, blocks))
        if not records or not self._pause.over:
            return
        try:
            if self._fd is None or self._size + len(records) > self._most:
                self._rewrite(self._with_pages(self._found()))
            self._write(records)
            self._pause.worked()
        except OSError as error:
            self._failed(error)

    def sweep(self) -> None:
        """Removes the names of blocks without a page in the store. Called after pages were deleted."""
        try:
            self._rewrite(self._with_pages(self._found()))
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Closes the file. No other call may follow. If it raises OSError, the file is closed nevertheless."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self._disk.close(fd)

    def _found(self) -> list[TierBlock]:
        """Reads the file's blocks, see _parsed(). Empty if the file is missing or has another identity. Raises OSError."""
        try:
            fd = self._disk.open(self._path, writable=False)
        except FileNotFoundError:
            return []
        try:
            content = bytearray(self._disk.size(fd))
            content = content[: self._disk.read(fd, [content], 0)]
        finally:
            self._disk.close(fd)
        return _parsed(bytes(content), len(self._header)) if content.startswith(self._header) else []

    def _with_pages(self, blocks: list[TierBlock]) -> list[TierBlock]:
        """Returns the blocks that have a page in the store."""
        stored = set(self._stored_keys())
        return [block for block in blocks if not stored.isdisjoint(block.keys)]

    def _rewrite(self, blocks: list[TierBlock]) -> None:
        """Replaces the file atomically by a file with these blocks. Raises OSError."""
        part = self._path.with_name(f"{self._path.name}.part")
        fd = self._disk.create(part)
        try:
            self._write_all(fd, b"".join((self._header, *map(_record, blocks))), 0)
            size = self._disk.size(fd)
            self._disk.rename(part, self._path)
        except OSError:
            self._disk.close(fd)
            raise
        before, self._fd, self._size = self._fd, fd, size
        self._most = 2 * size + SPARE_BYTES
        if before is not None:
            self._disk.close(before)

    def _write(self, records: bytes) -> None:
        assert self._fd is not None, "the log is open"
        self._write_all(self._fd, records, self._size)
        self._size += len(records)

    def _write_all(self, fd: int, data: bytes, offset: int) -> None:
        """Writes all bytes. Raises OSError."""
        written = self._disk.write(fd, [data], offset)
        if written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written")

    def _failed(self, error: OSError) -> None:
        seconds = self._pause.failed()
        logger.warning("could not store block names", extra=fields(error=str(error), pause_seconds=seconds))


def _record(block: TierBlock) -> bytes:
    body = _HEAD.pack(len(block.keys), block.name, block.weights) + b"".join(block.keys)
    return body + xxhash.xxh3_64_digest(body)


def _parsed(content: bytes, at: int) -> list[TierBlock]:
    """Parses records from the index `at` on, up to the first damaged one. Of records with the same name, only the last counts."""
    blocks: dict[bytes, TierBlock] = {}
    while at + _HEAD.size <= len(content):
        count, name, weights = _HEAD.unpack_from(content, at)
        end = at + _HEAD.size + count * KEY_BYTES
        if not 0 < count <= MOST_KEYS or content[end : end + _CHECKSUM_BYTES] != xxhash.xxh3_64_digest(content[at:end]):
            break
        keys = range(at + _HEAD.size, end, KEY_BYTES)
        blocks.pop(name, None)
        blocks[name] = TierBlock(name, weights, tuple(content[key : key + KEY_BYTES] for key in keys))
        at = end + _CHECKSUM_BYTES
    return list(blocks.values())
