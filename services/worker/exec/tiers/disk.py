"""What the store asks of a file system. A seam: tests have it fail, fill up, or stop at any call."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

_NO_WAY = (errno.EINVAL, errno.EOPNOTSUPP)  # past the page cache, for what is to be written or for all
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


class Disk:
    """Sizes and offsets in bytes. Every call raises OSError."""

    def create(self, path: Path, *, direct: bool = False) -> int:
        """A descriptor of an empty file of mode 0600, whatever the umask; what was there under this name is cut to nothing.
        direct: see pass_cache."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | _OPEN, 0o600)
        try:
            os.fchmod(fd, 0o600)
            if direct:
                self.pass_cache(fd)
        except OSError:
            os.close(fd)
            raise
        return fd

    def open(self, path: Path, *, writable: bool) -> int:
        """A descriptor of a file that is there."""
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | _OPEN)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        """Bytes written: fewer than there are where the disk has no room for the rest. At most 1024 parts."""
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            try:
                return os.pwritev(fd, _aligned(parts), offset)
            except OSError as error:
                if error.errno not in _NO_WAY:
                    raise
            _turn(fd, direct=False)  # blocks of this disk, or the parts, are others than was thought
        return os.pwritev(fd, parts, offset)

    def pass_cache(self, fd: int) -> None:
        """What is written from now on is of whole blocks, each part in itself, and goes past the page cache, without a copy,
        where the file system has a way."""
        try:
            _turn(fd, direct=True)
        except OSError as error:
            if error.errno not in _NO_WAY:
                raise

    def drop_cached(self, fd: int, offset: int, size: int) -> None:
        """Nobody reads these bytes soon: the system begins to put them on the disk, and keeps in memory none that is there
        already. Does not wait until they are."""
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)

    def read(self, fd: int, parts: Sequence[bytearray | memoryview], offset: int) -> int:
        """Bytes read into parts, in their order: fewer than fit where the file ends. At most 1024 parts."""
        return os.preadv(fd, parts, offset)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Returns when a power cut takes none of it."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, path: Path, to: Path) -> None:
        """Replaces what is there under that name, at once."""
        path.rename(to)

    def unlink(self, path: Path) -> None:
        """Nothing if there is no such file."""
        path.unlink(missing_ok=True)


def _turn(fd: int, *, direct: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags)


def _aligned(parts: Sequence[bytes | memoryview]) -> list[memoryview]:
    """bytes are copied to where a block begins; a memoryview is there already."""
    copied = memoryview(mmap.mmap(-1, sum(len(part) for part in parts if isinstance(part, bytes)) or 1))
    at, out = 0, list[memoryview]()
    for part in parts:
        if isinstance(part, bytes):
            copied[at : at + len(part)] = part
            out.append(copied[at : at + len(part)])
            at += len(part)
        else:
            out.append(part)
    return out
