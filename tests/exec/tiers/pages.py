"""Test pages whose bytes are computed from their page keys, so that a test detects a wrong page."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from rootstock_llm.services.worker.core.tiers.page_keys import TAG_BYTES, UNSALTED
from rootstock_llm.services.worker.exec.contracts.page_store import PageStore, Written
from rootstock_llm.services.worker.exec.tiers.disk import Disk
from rootstock_llm.services.worker.exec.tiers.segment_format import DIRECT_PAGE_BYTES, SegmentFormat
from rootstock_llm.services.worker.exec.tiers.segment_store import SegmentStore

PAGE = 96  # bytes
SLOTS = 4  # pages per segment
# Tags of three salts. A tag is the beginning of a page key; it is derived from the cache salt.
A, B, C = (letter * TAG_BYTES for letter in (b"a", b"b", b"c"))
FORMAT = SegmentFormat(PAGE, b"")
SEGMENT = FORMAT.bytes_with_index(SLOTS)  # bytes of a full segment and its index


def key(number: int, tag: bytes = UNSALTED) -> bytes:
    return tag + hashlib.sha256(b"%d" % number).digest()


def keys(*numbers: int, tag: bytes = UNSALTED) -> list[bytes]:
    return [key(number, tag) for number in numbers]


def page(of: bytes, size: int = PAGE) -> bytes:
    return hashlib.shake_128(of).digest(size)


class QuickDisk(Disk):
    """A disk whose sync() does nothing, which makes tests fast."""

    def sync(self, fd: int) -> None:
        os.fstat(fd)


class Hours:
    """A clock that stands still, until pass_by() moves it by an hour."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self) -> None:
        self.now += 3600


def store(
    folder: Path,
    segments: int = 6,
    disk: Disk | None = None,
    clock: Hours | None = None,
    identity: bytes = b"",
    salt_bytes: int = 0,
) -> SegmentStore:
    """Opens a store with segments of SLOTS pages.

    Args:
        folder: folder of the store.
        segments: number of segments under the cap.
        disk: the file system, None for QuickDisk.
        clock: clock of pauses and ages, None for a new one.
        identity: identity of the store.
        salt_bytes: quota of a salt in bytes; 0 for no quota.
    """
    clock = clock or Hours()
    sizes = {"max_bytes": segments * SEGMENT, "segment_bytes": SEGMENT, "salt_bytes": salt_bytes}
    return SegmentStore(folder, PAGE, identity=identity, disk=disk or QuickDisk(), clock=clock, wall=clock, **sizes)


def write(into: PageStore, wanted: Sequence[bytes]) -> Written:
    """Writes the pages of these keys. Large pages are in block-aligned memory, as in the host tier."""
    return into.write(wanted, [in_memory(page(key, into.page_bytes)) for key in wanted])


def in_memory(content: bytes, offset: int = 0) -> memoryview:
    """Returns the page as a memoryview. A large page gets new memory.

    Args:
        content: bytes of a page.
        offset: bytes from a block boundary in memory to the first byte of a large page.
    """
    if len(content) < DIRECT_PAGE_BYTES:
        return memoryview(content)
    mapped = mmap.mmap(-1, offset + len(content))
    mapped[offset:] = content
    return memoryview(mapped)[offset:]


def read(of: PageStore, wanted: Sequence[bytes]) -> int:
    """Reads pages and checks their bytes. Returns the number of pages that the store returned."""
    out = bytearray(len(wanted) * of.page_bytes)
    count = of.read(wanted, memoryview(out))
    for at, key in enumerate(wanted[:count]):
        assert out[at * of.page_bytes : (at + 1) * of.page_bytes] == page(key, of.page_bytes), "the store returned a wrong page"
    return count


def readable(of: PageStore) -> list[bytes]:
    """Returns the keys of the pages that can be read, oldest first. The store drops all other keys."""
    return [key for key in list(of.keys()) if read(of, [key])]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
