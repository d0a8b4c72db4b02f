"""The bytes of a segment and of its index. Little-endian; a checksum is the xxh3-128 of all that stands before it.

    segment-00000012.kv       header 128 | record 0 | record 1 | ...          record: head 64 | page
    segment-00000012.index    header 40 | slots, uint32[n] | keys, [n, 40] | checksum 16

A record stands at a slot: all of them have one size, so a bad one hides none behind it. Its head has the key and a checksum of
key and page, seeded by the segment's header: a record counts in no file but its own, and so under one identity. All pages of a
segment are of one tag, which its header names, and when the first of them was written.

Where pages are large and made of whole blocks of a disk, header and head take up a block each, zeros in front of their checksums:
what is written then begins and ends with a block, and needs no page cache.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from services.worker.core.tiers.page_keys import KEY_BYTES, TAG_BYTES

FORMAT_VERSION = 2  # of an index too
BLOCK_VERSION = 3  # of segments of whole blocks
MOST_IDENTITY_BYTES = 64
HEADER_BYTES = 128
HEAD_BYTES = 64
BLOCK_BYTES = 4096  # of nearly all disks a multiple of their own
DIRECT_PAGE_BYTES = 1 << 16  # from which a block for a head is little
_BATCH_BYTES = 16 << 20  # of an append: one call of the system for small pages, and a large one is written while it is cached
_BATCH_RECORDS = 256  # two parts each: half of what a call takes
_HEADER = struct.Struct(
    f"<8sIIQQ64s{TAG_BYTES}sQ"
)  # magic, version, length of the identity, page_bytes, number, identity, tag, began
_HEAD = struct.Struct(f"<8s{KEY_BYTES}s")  # magic, key
_INDEX = struct.Struct("<8sIIQ16s")  # magic, version, records, bytes of the segment, checksum of its header
_CHECKSUM_BYTES = 16
_SLOT_BYTES = 4


@dataclass(frozen=True, slots=True)
class SegmentHead:
    """What a segment's header says of it alone. began_ms: when its first page was written, or a moment before, by the wall clock
    in ms."""

    number: int
    tag: bytes
    began_ms: int


def index_bytes(records: int) -> int:
    return _INDEX.size + records * (_SLOT_BYTES + KEY_BYTES) + _CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class SegmentFormat:
    """identity: at most 64 bytes, of whatever else decides what a page's bytes mean."""

    page_bytes: int
    identity: bytes

    @property
    def is_direct(self) -> bool:
        """All that is appended is of whole blocks."""
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
        """Of a file with so many slots; where the next one begins."""
        return self.header_bytes + slots * self.record_bytes

    def bytes_with_index(self, slots: int) -> int:
        return self.segment_bytes(slots) + index_bytes(slots)

    def slots_within(self, size: int) -> int:
        """The most slots of a segment that takes up at most `size` bytes, its index included; 0 if not one fits."""
        fixed = self.bytes_with_index(0)
        return max(0, size - fixed) // (self.bytes_with_index(1) - fixed)

    @property
    def records_at_once(self) -> int:
        """That one append takes."""
        return min(_BATCH_RECORDS, max(1, _BATCH_BYTES // self.record_bytes))

    def header(self, head: SegmentHead) -> bytes:
        """bytes[header_bytes]: one of another identity, page size or version begins otherwise."""
        assert len(self.identity) <= MOST_IDENTITY_BYTES, "the header has room for the identity"
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
        """None: these bytes are not the whole header of a segment of this number, identity, page size and version."""
        *_, tag, began_ms = _HEADER.unpack_from(header)
        head = SegmentHead(number, tag, began_ms)
        return head if self.header(head) == header else None

    def record_head(self, header: bytes, key: bytes, page: memoryview) -> bytes:
        """bytes[head_bytes]: what stands before `page` in the segment that begins with `header`, if it is whole and the key's."""
        assert len(key) == KEY_BYTES, "a key is as long as keys are"
        fields = _HEAD.pack(b"RSTKVREC", key).ljust(self.head_bytes - _CHECKSUM_BYTES, b"\0")
        seed = int.from_bytes(header[-8:], "little")
        return fields + xxhash.xxh3_128_digest(fields + xxhash.xxh3_128_digest(page), seed)


def key_of(head: bytes | bytearray) -> bytes:
    return bytes(head[_HEAD.size - KEY_BYTES : _HEAD.size])


def pack_index(header: bytes, size: int, records: Mapping[int, bytes]) -> bytes:
    """The index of the segment that begins with `header` and has `size` bytes. records: keys by slot."""
    fields = _INDEX.pack(b"RSTKVIDX", FORMAT_VERSION, len(records), size, header[-_CHECKSUM_BYTES:])
    body = fields + np.fromiter(records, "<u4", len(records)).tobytes() + b"".join(records.values())
    packed = body + xxhash.xxh3_128_digest(body)
    assert len(packed) == index_bytes(len(records)), "an index is as large as was reckoned"
    return packed


def unpack_index(packed: bytes, header: bytes, size: int) -> dict[int, bytes] | None:
    """Keys by slot; None if these bytes are not the whole index of the segment that begins with `header` and has `size` bytes."""
    body, checksum = packed[:-_CHECKSUM_BYTES], packed[-_CHECKSUM_BYTES:]
    if len(packed) < index_bytes(0) or xxhash.xxh3_128_digest(body) != checksum:
        return None
    magic, version, count, indexed, segment = _INDEX.unpack_from(body)
    if (magic, version, indexed, segment) != (b"RSTKVIDX", FORMAT_VERSION, size, header[-_CHECKSUM_BYTES:]):
        return None
    assert len(packed) == index_bytes(count), "an index whose checksum is right was written whole"
    slots = np.frombuffer(body, "<u4", count, _INDEX.size).tolist()
    first = _INDEX.size + count * _SLOT_BYTES
    return {slot: body[at : at + KEY_BYTES] for slot, at in zip(slots, range(first, len(body), KEY_BYTES), strict=True)}
