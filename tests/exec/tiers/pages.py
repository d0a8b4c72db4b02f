"""Small pages whose bytes follow from their keys, so that a wrong one is known wherever it comes from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from services.worker.exec.contracts.page_store import PageStore, Written
from services.worker.exec.tiers.disk import Disk
from services.worker.exec.tiers.segment_format import SegmentFormat
from services.worker.exec.tiers.segment_store import SegmentStore

PAGE = 96
SLOTS = 4  # of a segment
FORMAT = SegmentFormat(PAGE, b"")
SEGMENT = FORMAT.bytes_with_index(SLOTS)


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


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
    folder: Path, segments: int = 6, disk: Disk | None = None, clock: Hours | None = None, identity: bytes = b""
) -> SegmentStore:
    """Segments of SLOTS pages, so many under the cap."""
    return SegmentStore(folder, PAGE, segments * SEGMENT, SEGMENT, identity, disk=disk or QuickDisk(), clock=clock or Hours())


def write(into: PageStore, wanted: Sequence[bytes]) -> Written:
    return into.write(wanted, [memoryview(page(key, into.page_bytes)) for key in wanted])


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
