"""What the store asks of a file system. A seam: tests have it fail, fill up, or stop at any call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


class Disk:
    """Sizes and offsets in bytes. Every call raises OSError."""

    def create(self, path: Path) -> int:
        """A descriptor of an empty file of mode 0600, whatever the umask; what was there under this name is cut to nothing."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | _OPEN, 0o600)
        try:
            os.fchmod(fd, 0o600)
        except OSError:
            os.close(fd)
            raise
        return fd

    def open(self, path: Path, *, writable: bool) -> int:
        """A descriptor of a file that is there."""
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | _OPEN)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        """Bytes written: fewer than there are where the disk has no room for the rest. At most 1024 parts."""
        return os.pwritev(fd, parts, offset)

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
