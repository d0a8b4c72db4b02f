"""Follows the file of API keys, or a folder of such files (*.json), while the gateway runs.

A change by an editor or by Kubernetes, which replaces a symbolic link, takes effect within POLL_S. If a file is invalid, the
previous keys stay valid, and a log line and a metric report the fault. Files are read and parsed in a thread. The event loop
replaces `table` as a whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.gateway.keys.key_table import BadKeys, KeyTable, parse_keys
from services.shared.limits import MAX_KEYS_FILE_BYTES
from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

POLL_S = 1.0  # seconds between two looks at the files
REREAD_POLLS = 4  # every fourth look reads the files even if their stamp is unchanged, because a change may leave it unchanged


@dataclass(frozen=True, slots=True)
class _Read:
    """The state of the files at their last reading."""

    stamp: tuple[tuple[int, ...], ...]  # device, inode, size and mtime_ns of each file
    digest: bytes  # SHA-256 of the contents


class KeyFile:
    """The API keys of a file or folder. Its public methods belong to the event loop."""

    def __init__(self, path: str, foreign: Mapping[bytes, str] | None = None) -> None:
        """Reads the files.

        Args:
            foreign: Digests of secrets that must not be API keys, and the name of each secret.

        Raises:
            BadKeys: A file is unreadable or invalid.
        """
        self._path = Path(path)
        self._foreign = foreign or {}
        self._listeners: list[Callable[[KeyTable], None]] = []
        self._read: _Read | None
        self._complaint = ""
        contents, self._read = self._load()
        self.table = self._parse(contents)

    def listen(self, changed: Callable[[KeyTable], None]) -> None:
        """Registers a function that the event loop calls with every new table."""
        self._listeners.append(changed)

    @property
    def is_valid(self) -> bool:
        """Whether the last reading of the files succeeded, so that `table` has their content."""
        return not self._complaint

    async def run(self) -> None:
        """Looks for changes every POLL_S, until cancelled."""
        polls = 0
        while True:
            await asyncio.sleep(POLL_S)
            polls += 1
            await self.refresh(whole=polls % REREAD_POLLS == 0)

    async def refresh(self, whole: bool = True) -> None:
        """Applies a change of the files, if there is one.

        Args:
            whole: Reads the files even if their stamp is unchanged.
        """
        try:
            table = await asyncio.to_thread(self._changed, whole)
        except BadKeys as error:
            if self._complaint != str(error):
                logger.error("the file of API keys is invalid, the previous keys stay valid: %s", error)
            self._complaint = str(error)
            return
        self._complaint = ""
        if table is not None:
            self.table = table
            logger.info("read API keys", extra=fields(path=str(self._path), keys=len(table)))
            for changed in self._listeners:
                changed(table)

    def _changed(self, whole: bool) -> KeyTable | None:
        """Returns the new table, or None if nothing has changed. Runs in a thread. Raises BadKeys while a file is invalid."""
        before, self._read = self._read, None  # an invalid file is read again at every look
        if before is not None and not whole and before.stamp == self._stamp():
            self._read = before
            return None
        contents, read = self._load()
        table = None if before is not None and before.digest == read.digest else self._parse(contents)
        self._read = read
        return table

    def _load(self) -> tuple[list[bytes], _Read]:
        stamp, contents, digest, left = self._stamp(), [], hashlib.sha256(), MAX_KEYS_FILE_BYTES
        for path in self._paths():
            try:
                with path.open("rb") as file:
                    content = file.read(left + 1)
            except OSError as error:
                raise BadKeys(f"{path}: {error.strerror}") from None
            left -= len(content)
            if left < 0:
                raise BadKeys(f"{path}: with this file, the API keys are larger than {MAX_KEYS_FILE_BYTES} bytes")
            contents.append(content)
            digest.update(b"%d:" % len(content) + content)
        return contents, _Read(stamp, digest.digest())

    def _parse(self, contents: list[bytes]) -> KeyTable:
        try:
            return parse_keys(contents, self._foreign)
        except BadKeys as error:
            raise BadKeys(f"{self._path}: {error}") from None

    def _paths(self) -> list[Path]:
        if not self._path.is_dir():
            return [self._path]
        found = sorted(self._path.glob("*.json"))
        if not found:
            raise BadKeys(f"{self._path}: the folder has no *.json file")
        return found

    def _stamp(self) -> tuple[tuple[int, ...], ...]:
        try:
            found = [path.stat() for path in self._paths()]
        except OSError as error:
            raise BadKeys(f"{self._path}: {error.strerror}") from None
        return tuple((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


class KeyShares(Mapping[str, float]):
    """The weights of the API keys by name, read from the present table. Unknown names raise KeyError."""

    def __init__(self, table: Callable[[], KeyTable]) -> None:
        self._table = table

    def __getitem__(self, name: str) -> float:
        key = self._table().named(name)
        if key is None:
            raise KeyError(name)
        return key.weight

    def __iter__(self) -> Iterator[str]:
        return (key.name for key in self._table())

    def __len__(self) -> int:
        return len(self._table())
