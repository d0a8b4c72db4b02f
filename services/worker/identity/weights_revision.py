"""The revision of a folder of weights: a digest of every byte that decides what its model computes.

It is of config.json, of model.safetensors.index.json where there is one, and of every *.safetensors file: names, sizes, all
bytes. The folder's own name and the files' times are not in it. Files are hashed by a few threads in pieces of a fixed size,
while somebody else loads them: xxh3 runs without the interpreter's lock, as fast as memory is read, and what one of the two
has read from disk the other finds in memory.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import xxhash

logger = logging.getLogger(__name__)

VERSION = b"2"  # of what the digest is of
PIECE_BYTES = 64 << 20
BUFFER_BYTES = 1 << 20  # of each thread; fits a core's cache
MOST_THREADS = 4
CONFIG, INDEX = "config.json", "model.safetensors.index.json"


class WeightsChanged(ValueError):
    """The files changed while they were read: what was loaded may be of neither state."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it was at one time. A changed content shows in one of these, unless someone sets them back."""

    name: str
    size: int
    mtime_ns: int
    inode: int


class WeightsReading:
    """Hashes from `with` on; whoever loads the folder does so inside. Leaving the block ends what still runs.

    num_threads: 0 for one per core, at most MOST_THREADS. Memory: BUFFER_BYTES per thread.
    """

    def __init__(self, folder: Path, num_threads: int = 0) -> None:
        threads = num_threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._folder = folder
        self._pool = ThreadPoolExecutor(threads, "revision")
        self._files: list[_File] = []
        self._pieces: list[list[Future[bytes]]] = []  # by file
        self._error: OSError | None = None

    def __enter__(self) -> WeightsReading:
        try:
            self._files = _files_of(self._folder)
        except OSError as error:
            self._error = error  # whoever loads the folder may have more to say about it
        for file in self._files:
            path, ends = self._folder / file.name, range(0, file.size, PIECE_BYTES)
            self._pieces.append([self._pool.submit(_digest, path, at, min(PIECE_BYTES, file.size - at)) for at in ends])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def revision(self) -> str:
        """Hexadecimal. Once the folder has been loaded: of what was loaded, for no file has changed since `with`. Raises OSError
        if a file cannot be read, WeightsChanged."""
        if self._error is not None:
            raise self._error
        loaded = time.monotonic()
        chain = xxhash.xxh3_128(VERSION)
        for file, pieces in zip(self._files, self._pieces, strict=True):
            name = file.name.encode()
            chain.update(len(name).to_bytes(4, "little") + name + file.size.to_bytes(8, "little"))
            for piece in pieces:
                chain.update(piece.result())
        if changed := set(self._files) ^ set(_files_of(self._folder)):
            names = ", ".join(sorted({file.name for file in changed}))
            raise WeightsChanged(f"{self._folder} changed while it was read: {names}")
        size, waited = sum(file.size for file in self._files), time.monotonic() - loaded
        logger.info("weights revision %s: %.2f GB hashed, %.1f s of it after the load", chain.hexdigest(), size / 1e9, waited)
        return chain.hexdigest()


def _files_of(folder: Path) -> list[_File]:
    """Raises OSError, also where there is no config.json."""
    paths = [folder / CONFIG, *([folder / INDEX] if (folder / INDEX).exists() else []), *sorted(folder.glob("*.safetensors"))]
    found = [(path.name, path.stat()) for path in paths]
    return [_File(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found]


def _digest(path: Path, begin: int, size: int) -> bytes:
    """Of one piece. Raises OSError, WeightsChanged if the file ends within it."""
    chain, buffer, done = xxhash.xxh3_128(), memoryview(bytearray(min(BUFFER_BYTES, size))), 0
    with path.open("rb", buffering=0) as file:  # one for each piece: the system reads ahead by open file
        file.seek(begin)
        while done < size:
            count = file.readinto(buffer[: size - done])
            if not count:
                raise WeightsChanged(f"{path} became shorter while it was read")
            chain.update(buffer[:count])
            done += count
    return chain.digest()
