"""The folder of a segment store. It is locked while the store is open. Opening the store deletes unfinished files in it."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path

from rootstock_llm.services.worker.exec.tiers.disk import Disk

_NUMBER = "([0-9]{8}|[1-9][0-9]{8,})"
_SEGMENT = re.compile(rf"segment-{_NUMBER}\.kv")
_INDEX = re.compile(rf"segment-{_NUMBER}\.index(\.part)?")
_PRIVATE = 0o700


class StoreBusy(ValueError):
    """Raised if another store has locked the folder."""


class StoreUnusable(ValueError):
    """Raised if the folder cannot be created, locked or written, for example because it belongs to another user."""


class StoreFolder:
    """A locked folder with mode 0700.

    Files whose names are not those of segments, indexes or the lock stay untouched. A forked child shares the lock until it
    executes another program.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        """Creates and locks the folder. Raises StoreBusy or StoreUnusable."""
        self.path = path
        self._disk = disk
        try:
            path.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
            if path.stat().st_mode & 0o777 != _PRIVATE:
                path.chmod(_PRIVATE)
            self._lock = disk.create(path / "LOCK")
        except OSError as error:
            raise StoreUnusable(f"KV pages cannot be stored in {path}: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            disk.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise StoreBusy(f"{path} is in use by another process, or by another store of this process") from error
            raise StoreUnusable(f"{path} cannot be locked: {error}") from error

    def segment(self, number: int) -> Path:
        return self.path / f"segment-{number:08d}.kv"

    def index(self, number: int) -> Path:
        return self.path / f"segment-{number:08d}.index"

    def part(self, number: int) -> Path:
        """Returns the path at which an index is written before it is renamed."""
        return self.path / f"segment-{number:08d}.index.part"

    def sweep(self) -> list[int]:
        """Deletes unfinished indexes, and indexes without a segment. Returns the numbers of the segments, in rising order."""
        names = [path.name for path in self.path.iterdir()]
        numbers = sorted(int(found[1]) for name in names if (found := _SEGMENT.fullmatch(name)))
        existing = set(numbers)
        for name in names:
            if (found := _INDEX.fullmatch(name)) and (found[2] or int(found[1]) not in existing):
                self._disk.unlink(self.path / name)
        return numbers

    def sync(self) -> None:
        """Waits until the names of the folder's files are on the disk, so that they survive a power cut."""
        fd = self._disk.open(self.path, writable=False)
        try:
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)

    def close(self) -> None:
        """Releases the lock. The files stay."""
        self._disk.close(self._lock)
