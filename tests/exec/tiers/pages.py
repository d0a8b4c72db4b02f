"""Small pages whose bytes follow from their keys, so that a wrong one is known wherever it comes from."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from services.worker.core.tiers.page_keys import TAG_BYTES, UNSALTED
from services.worker.exec.contracts.page_store import PageStore, Written
from services.worker.exec.tiers.disk import Disk
from services.worker.exec.tiers.segment_format import DIRECT_PAGE_BYTES, SegmentFormat
from services.worker.exec.tiers.segment_store import SegmentStore

PAGE = 96
SLOTS = 4  # of a segment
A, B, C = (letter * TAG_BYTES for letter in (b"a", b"b", b"c"))  # tags of three salts
FORMAT = SegmentFormat(PAGE, b"")
SEGMENT = FORMAT.bytes_with_index(SLOTS)


def key(number: int, tag: bytes = UNSALTED) -> bytes:
    return tag + hashlib.sha256(b"%d" % number).digest()


def keys(*numbers: int, tag: bytes = UNSALTED) -> list[bytes]:
    return [key(number, tag) for number in numbers]


def page(of: bytes, size: int = PAGE) -> bytes:
    return hashlib.shake_128(of).digest(size)


class QuickDisk(Disk):
    """Does not wait for a real one to sync."""

    def sync(self, fd: int) -> None:
        os.fstat(fd)


class Hours:
    """A clock that jumps an hour whenever it is asked to."""

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
    """Segments of SLOTS pages, so many under the cap. clock: of pauses and of ages."""
    clock = clock or Hours()
    sizes = {"max_bytes": segments * SEGMENT, "segment_bytes": SEGMENT, "salt_bytes": salt_bytes}
    return SegmentStore(folder, PAGE, identity=identity, disk=disk or QuickDisk(), clock=clock, wall=clock, **sizes)


def write(into: PageStore, wanted: Sequence[bytes]) -> Written:
    """As from a host tier: large pages begin with a block."""
    return into.write(wanted, [placed(page(key, into.page_bytes)) for key in wanted])


def placed(content: bytes, beside: int = 0) -> memoryview:
    """beside: bytes from where a block begins, for large ones."""
    if len(content) < DIRECT_PAGE_BYTES:
        return memoryview(content)
    mapped = mmap.mmap(-1, beside + len(content))
    mapped[beside:] = content
    return memoryview(mapped)[beside:]


def read(of: PageStore, wanted: Sequence[bytes]) -> int:
    """How many of the first pages it returns: each of them has to be the key's."""
    out = bytearray(len(wanted) * of.page_bytes)
    count = of.read(wanted, memoryview(out))
    for at, key in enumerate(wanted[:count]):
        assert out[at * of.page_bytes : (at + 1) * of.page_bytes] == page(key, of.page_bytes), "a wrong page"
    return count


def readable(of: PageStore) -> list[bytes]:
    """Those of its keys that it has whole pages of, oldest first; it forgets the others."""
    return [key for key in list(of.keys()) if read(of, [key])]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
