"""A FUSE file system with faults: python -m tests.exec.tiers.sick_file_system SOURCE MOUNT ORDERS.

It shows the content of the folder SOURCE at the folder MOUNT. Each call reads the JSON file ORDERS: `read_s` is the duration of a
read in seconds, and `full` and `read_only` make writes fail.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mfusepy

STATUS = ("st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid")
SPACE = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_flag", "f_frsize", "f_namemax")


class SickFileSystem(mfusepy.Operations):  # type: ignore[misc]
    """The file system. Paths are absolute paths within the mount. Every method may raise OSError."""

    use_ns = False

    def __init__(self, source: Path, orders: Path) -> None:
        self._source, self._orders = source, orders

    def _at(self, path: str) -> Path:
        return self._source / path.lstrip("/")

    def _read_orders(self) -> dict[str, Any]:
        orders: dict[str, Any] = json.loads(self._orders.read_text())
        return orders

    def _check_writable(self) -> None:
        orders = self._read_orders()
        if orders.get("read_only"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if orders.get("full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._at(path))
        return {name: getattr(status, name) for name in STATUS}

    def readdir(self, path: str, fh: int) -> Iterable[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def statfs(self, path: str) -> dict[str, int]:
        space = os.statvfs(self._at(path))
        return {name: getattr(space, name) for name in SPACE}

    def open(self, path: str, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and self._read_orders().get("read_only"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return os.open(self._at(path), flags & ~(os.O_NOFOLLOW | os.O_DIRECT))

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._check_writable()
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        time.sleep(self._read_orders().get("read_s", 0.0))
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._check_writable()
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._check_writable()
        os.truncate(self._at(path), length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._check_writable()
        self._at(path).mkdir(mode)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        self._at(path).chmod(mode)
        return 0

    def rename(self, old: str, new: str) -> int:
        self._check_writable()
        self._at(old).rename(self._at(new))
        return 0

    def unlink(self, path: str) -> int:
        if self._read_orders().get("read_only"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        self._at(path).unlink()
        return 0


def main() -> None:
    source, mount, orders = map(Path, sys.argv[1:])
    with suppress(KeyboardInterrupt):
        mfusepy.FUSE(SickFileSystem(source, orders), str(mount), foreground=True, direct_io=True)


if __name__ == "__main__":
    main()
