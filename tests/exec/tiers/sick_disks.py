"""Doubles of Disk for tests: disks that record calls, are full or faulty, or whose process dies."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rootstock_llm.services.worker.exec.tiers.disk import Disk
from tests.exec.tiers.pages import QuickDisk, size_of

T = TypeVar("T")


class DiaryDisk(Disk):
    """A disk that records calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []  # calls of create(), pass_cache(), sync() and rename(), with the file's name
        self.dropped: list[tuple[str, int, int]] = []  # file, first and end byte of each drop_cached()

    def drop_cached(self, fd: int, offset: int, size: int) -> None:
        self.dropped.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, offset, offset + size))
        super().drop_cached(fd, offset, size)

    def create(self, path: Path, *, direct: bool = False) -> int:
        self.calls.append(f"create {path.name}")
        return super().create(path, direct=direct)

    def pass_cache(self, fd: int) -> None:
        self.calls.append(f"pass cache {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        super().pass_cache(fd)

    def sync(self, fd: int) -> None:
        self.calls.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        super().sync(fd)

    def rename(self, path: Path, to: Path) -> None:
        self.calls.append(f"rename {to.name}")
        super().rename(path, to)


class SickDisk(QuickDisk):
    """A disk with faults."""

    def __init__(self) -> None:
        self.broken: dict[str, int] = {}  # errno of each failing call, by the call's name
        self.free_bytes: int | None = None  # bytes that can still be written, None for no limit

    def _fail_if_broken(self, call: str) -> None:
        if number := self.broken.get(call):
            raise OSError(number, os.strerror(number))

    def create(self, path: Path, *, direct: bool = False) -> int:
        self._fail_if_broken("create")
        return super().create(path, direct=direct)

    def open(self, path: Path, *, writable: bool) -> int:
        self._fail_if_broken("open")
        return super().open(path, writable=writable)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        self._fail_if_broken("write")
        if self.free_bytes is None:
            return super().write(fd, parts, offset)
        some = b"".join(parts)[: self.free_bytes]
        self.free_bytes -= len(some)
        if not some:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(fd, some, offset)

    def read(self, fd: int, parts: Sequence[bytearray | memoryview], offset: int) -> int:
        self._fail_if_broken("read")
        return super().read(fd, parts, offset)

    def drop_cached(self, fd: int, offset: int, size: int) -> None:
        self._fail_if_broken("drop_cached")
        super().drop_cached(fd, offset, size)

    def truncate(self, fd: int, size: int) -> None:
        self._fail_if_broken("truncate")
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._fail_if_broken("sync")

    def rename(self, path: Path, to: Path) -> None:
        self._fail_if_broken("rename")
        super().rename(path, to)

    def unlink(self, path: Path) -> None:
        self._fail_if_broken("unlink")
        super().unlink(path)


class Killed(BaseException):
    """Raised by the call at which a process dies, and by all later calls. No code handles it."""


class MortalDisk(QuickDisk):
    """The disk of a process that dies at a call that changes files. If this call is a write, half of its bytes are written."""

    def __init__(self, folder: Path, calls: int | None = None) -> None:
        """Starts with a living process.

        Args:
            folder: folder whose size is recorded after each change.
            calls: number of calls that change files before the process dies at the next one. None if the process does not die.
        """
        self._folder = folder
        self._calls = calls
        self._open: set[int] = set()  # open descriptors
        self.sizes: list[int] = []  # size of the folder after each change

    def create(self, path: Path, *, direct: bool = False) -> int:
        return self._opened(self._change(lambda: super(MortalDisk, self).create(path, direct=direct)))

    def open(self, path: Path, *, writable: bool) -> int:
        self._check_alive()
        return self._opened(super().open(path, writable=writable))

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        whole = b"".join(parts)
        return self._change(lambda: os.pwrite(fd, whole, offset), lambda: os.pwrite(fd, whole[: len(whole) // 2], offset))

    def read(self, fd: int, parts: Sequence[bytearray | memoryview], offset: int) -> int:
        self._check_alive()
        return super().read(fd, parts, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._change(lambda: super(MortalDisk, self).truncate(fd, size))

    def rename(self, path: Path, to: Path) -> None:
        self._change(lambda: super(MortalDisk, self).rename(path, to))

    def unlink(self, path: Path) -> None:
        self._change(lambda: super(MortalDisk, self).unlink(path))

    def close(self, fd: int) -> None:
        self._check_alive()
        self._open.remove(fd)
        super().close(fd)

    def bury(self) -> None:
        """Closes the open files of the dead process, as the system does."""
        for fd in self._open:
            os.close(fd)
        self._open.clear()

    def _opened(self, fd: int) -> int:
        self._open.add(fd)
        return fd

    def _check_alive(self) -> None:
        if self._calls is not None and self._calls < 0:
            raise Killed

    def _change(self, call: Callable[[], T], half: Callable[[], object] = lambda: None) -> T:
        self._check_alive()
        if self._calls is not None:
            self._calls -= 1
            if self._calls < 0:
                half()
                raise Killed
        done = call()
        self.sizes.append(size_of(self._folder))
        return done
