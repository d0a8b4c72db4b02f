"""The calls of the file tier to the file system, in one class, so that tests can let any of them fail."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

# Errors of a direct write that the file system does not support, in general or for these parts.
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


class Disk:
    """Calls of the machine's file system. Sizes and offsets are in bytes. Every method may raise OSError."""

    def create(self, path: Path, *, direct: bool = False) -> int:
        """Creates a file with mode 0600, or truncates an existing one, and returns its descriptor.

        Args:
            path: the file.
            direct: whether writes bypass the page cache, see pass_cache().
        """
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
        """Returns the descriptor of an existing file."""
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | _OPEN)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        """Writes at most 1024 parts.

        Returns the number of written bytes, which is smaller than their size if the disk is full.
        """
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            try:
                return os.pwritev(fd, _aligned(parts), offset)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
            _set_direct(fd, direct=False)  # for example, the disk has larger blocks than BLOCK_BYTES
        return os.pwritev(fd, parts, offset)

    def pass_cache(self, fd: int) -> None:
        """Makes later writes bypass the page cache if the file system supports it.

        Each part of a later write must consist of whole disk blocks.
        """
        try:
            _set_direct(fd, direct=True)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise

    def drop_cached(self, fd: int, offset: int, size: int) -> None:
        """Tells the system that these bytes will not be read soon. Does not block.

        The system drops bytes from its page cache if they are already on the disk, and starts to write the other bytes.
        """
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)

    def read(self, fd: int, parts: Sequence[bytearray | memoryview], offset: int) -> int:
        """Fills at most 1024 parts in order.

        Returns the number of read bytes, which is smaller than their size at the end of the file.
        """
        return os.preadv(fd, parts, offset)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Waits until the file's content is on the disk, so that it survives a power cut."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, path: Path, to: Path) -> None:
        """Renames a file and replaces an existing one atomically."""
        path.rename(to)

    def unlink(self, path: Path) -> None:
        """Deletes a file if it exists."""
        path.unlink(missing_ok=True)


def _set_direct(fd: int, *, direct: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags)


def _aligned(parts: Sequence[bytes | memoryview]) -> list[memoryview]:
    """Copies parts of type bytes to block-aligned memory, which direct writes need. A memoryview must already be aligned."""
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
