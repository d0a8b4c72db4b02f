"""Packs and parses segments and their indexes. Little-endian; a checksum is the xxh3-128 of all bytes before it.

    segment-00000012.kv       header 128 | record 0 | record 1 | ...          record: head 64 | page
    segment-00000012.index    header 40 | slots, uint32[n] | keys, [n, 40] | checksum 16

A slot is the index of a record. Records have equal sizes, so the records after a damaged one can be read. The head of a record
has the page key and a checksum of key and page. The checksum's seed is from the segment's header, so a record is valid only in
its own file and under one identity. All pages of a segment have the same tag, which is derived from their cache salt. The header
has this tag and the time of the first page.

If pages are large and consist of whole disk blocks, the header and each head also take one block, with zeros before their
checksums. Every write then begins and ends at a block boundary, and can bypass the page cache.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from rootstock_llm.services.worker.core.tiers.page_keys import KEY_BYTES, TAG_BYTES

FORMAT_VERSION = 2  # version of segments with small heads, and of all indexes
BLOCK_VERSION = 3  # version of segments whose header and heads take whole blocks of the disk
MOST_IDENTITY_BYTES = 64
HEADER_BYTES = 128
HEAD_BYTES = 64
BLOCK_BYTES = 4096  # a multiple of the block size of nearly all disks
DIRECT_PAGE_BYTES = 1 << 16  # smallest page size for which heads take whole blocks; for smaller pages, they would waste space
# Largest size of one append, unless a single record is larger. One system call writes many small pages, and a large page is still
# in the CPU cache when it is written.
_BATCH_BYTES = 16 << 20
_BATCH_RECORDS = 256  # largest number of records in one append; they have 512 parts, and Disk.write() takes at most 1024
# magic, version, length of the identity, page_bytes, number, identity, tag, began_ms
_HEADER = struct.Struct(f"<8sIIQQ64s{TAG_BYTES}sQ")
_HEAD = struct.Struct(f"<8s{KEY_BYTES}s")  # magic, key
_INDEX = struct.Struct("<8sIIQ16s")  # magic, version, number of records, bytes of the segment, checksum of its header
_CHECKSUM_BYTES = 16
_SLOT_BYTES = 4


@dataclass(frozen=True, slots=True)
class SegmentHead:
    """The fields of a header that differ between the segments of a store."""

    number: int  # number in the file's name
    tag: bytes  # tag of the cache salt of all pages
    began_ms: int  # wall clock in ms when the segment was created, which is shortly before its first page is written


def index_bytes(records: int) -> int:
    return _INDEX.size + records * (_SLOT_BYTES + KEY_BYTES) + _CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class SegmentFormat:
    """The format of all segments of a store."""

    page_bytes: int  # bytes of a page
    identity: bytes  # at most 64 bytes; segments with another identity are not read

    @property
    def is_direct(self) -> bool:
        """Whether header, heads and pages consist of whole disk blocks, so that writes can bypass the page cache."""
        return self.page_bytes >= DIRECT_PAGE_BYTES and self.page_bytes % BLOCK_BYTES == 0

    @property
    def header_bytes(self) -> int:
        return BLOCK_BYTES if self.is_direct else HEADER_BYTES

    @property
    def head_bytes(self) -> int:
        return BLOCK_BYTES if self.is_direct else HEAD_BYTES

    @property
    def record_bytes(self) -> int:
        return self.head_bytes + self.page_bytes

    def segment_bytes(self, slots: int) -> int:
        """Returns the size of a segment with `slots` slots, which is also the offset of the next slot."""
        return self.header_bytes + slots * self.record_bytes

    def bytes_with_index(self, slots: int) -> int:
        return self.segment_bytes(slots) + index_bytes(slots)

    def slots_within(self, size: int) -> int:
        """Returns the largest number of slots of a segment that takes at most `size` bytes with its index; 0 if none fits."""
        fixed = self.bytes_with_index(0)
        return max(0, size - fixed) // (self.bytes_with_index(1) - fixed)

    @property
    def records_at_once(self) -> int:
        """Largest number of records in one append."""
        return min(_BATCH_RECORDS, max(1, _BATCH_BYTES // self.record_bytes))

    def header(self, head: SegmentHead) -> bytes:
        """Returns the header, bytes[header_bytes]. Headers of other identities, page sizes or versions differ from it."""
        assert len(self.identity) <= MOST_IDENTITY_BYTES, "the identity fits into the header"
        fields = _HEADER.pack(
            b"RSTKVSEG",
            BLOCK_VERSION if self.is_direct else FORMAT_VERSION,
            len(self.identity),
            self.page_bytes,
            head.number,
            self.identity.ljust(MOST_IDENTITY_BYTES, b"\0"),
            head.tag,
            head.began_ms,
        )
        padded = fields.ljust(self.header_bytes - _CHECKSUM_BYTES, b"\0")
        return padded + xxhash.xxh3_128_digest(padded)

    def head_of(self, header: bytes, number: int) -> SegmentHead | None:
        """Parses a header.

        Returns:
            None if the bytes are not a valid header for this number, identity, page size and version.
        """
        *_, tag, began_ms = _HEADER.unpack_from(header)
        head = SegmentHead(number, tag, began_ms)
        return head if self.header(head) == header else None

    def record_head(self, header: bytes, key: bytes, page: memoryview) -> bytes:
        """Returns the head, bytes[head_bytes], of a record with this key and page in a segment with this header."""
        assert len(key) == KEY_BYTES, "a page key has KEY_BYTES bytes"
        fields = _HEAD.pack(b"RSTKVREC", key).ljust(self.head_bytes - _CHECKSUM_BYTES, b"\0")
        seed = int.from_bytes(header[-8:], "little")
        return fields + xxhash.xxh3_128_digest(fields + xxhash.xxh3_128_digest(page), seed)


def key_of(head: bytes | bytearray) -> bytes:
    return bytes(head[_HEAD.size - KEY_BYTES : _HEAD.size])


def pack_index(header: bytes, size: int, records: Mapping[int, bytes]) -> bytes:
    """Returns the index of a segment.

    Args:
        header: the segment's header.
        size: bytes of the segment without the index.
        records: page keys by slot.
    """
    fields = _INDEX.pack(b"RSTKVIDX", FORMAT_VERSION, len(records), size, header[-_CHECKSUM_BYTES:])
    body = fields + np.fromiter(records, "<u4", len(records)).tobytes() + b"".join(records.values())
    packed = body + xxhash.xxh3_128_digest(body)
    assert len(packed) == index_bytes(len(records)), "an index has the size that index_bytes() returns"
    return packed


def unpack_index(packed: bytes, header: bytes, size: int) -> dict[int, bytes] | None:
    """Parses an index.

    Returns:
        Page keys by slot. None if the bytes are not a valid index of a segment with this header and size.
    """
    body, checksum = packed[:-_CHECKSUM_BYTES], packed[-_CHECKSUM_BYTES:]
    if len(packed) < index_bytes(0) or xxhash.xxh3_128_digest(body) != checksum:
        return None
    magic, version, count, segment_size, header_checksum = _INDEX.unpack_from(body)
    if (magic, version, segment_size, header_checksum) != (b"RSTKVIDX", FORMAT_VERSION, size, header[-_CHECKSUM_BYTES:]):
        return None
    assert len(packed) == index_bytes(count), "an index with a valid checksum is complete"
    slots = np.frombuffer(body, "<u4", count, _INDEX.size).tolist()
    first = _INDEX.size + count * _SLOT_BYTES
    return {slot: body[at : at + KEY_BYTES] for slot, at in zip(slots, range(first, len(body), KEY_BYTES), strict=True)}
