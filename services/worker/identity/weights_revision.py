"""Computes the revision of a folder of weights: a digest of all files and settings that determine the model's outputs.

The digest covers names, sizes and all bytes of config.json, of the files in OPTIONAL that exist, and of every *.safetensors file.
For quantized weights, it also covers the settings of quantization and CODES_VERSION. It does not cover the folder's name and the
files' times.

A few threads hash the files in pieces of a fixed size while another thread loads them. xxh3 releases the interpreter's lock and
runs at memory speed. Each file is read from disk only once, because the page cache serves its second reader.
"""

from __future__ import annotations

import json
import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import xxhash

from rootstock_llm.services.shared.quantization_config import quantization_of

logger = logging.getLogger(__name__)

VERSION = b"2"  # version of the digest's input format; a new version gives every folder a new revision
PIECE_BYTES = 64 << 20  # largest number of bytes that one task hashes
BUFFER_BYTES = 1 << 20  # read buffer of a thread; fits into a core's cache
MOST_THREADS = 4
CODES_VERSION = 1  # version of the code for codes (quantized weights); a new version changes the revisions of such weights
CONFIG = "config.json"
OPTIONAL = ("hf_quant_config.json", "model.safetensors.index.json", "quantize_config.json")  # index, files of quantization tools


def weight_form(quantization: str, quantize_head: bool) -> bytes:
    """Returns the form of a worker's weights, as input of the digest. Empty if the settings quantize nothing.

    Args:
        quantization: the worker's setting.
        quantize_head: the worker's setting.
    """
    if quantization == "auto" and not quantize_head:
        return b""
    return f"quantization {quantization}, head {quantize_head}".encode()


class WeightsChanged(ValueError):
    """The files changed while they were read. The loaded weights may be a mixture of two versions and must not be used."""


@dataclass(frozen=True, slots=True)
class _File:
    """The metadata of a file at one time. A changed file has other metadata, unless size, mtime and inode are restored."""

    name: str
    size: int
    mtime_ns: int
    inode: int


class WeightsReading:
    """A context manager that hashes a folder while its block loads the folder's weights.

    Leaving the block cancels unfinished hashing. Each thread uses BUFFER_BYTES of memory.
    """

    def __init__(self, folder: Path, form: bytes = b"", num_threads: int = 0) -> None:
        """Creates the hashing threads.

        Args:
            folder: the model folder.
            form: result of weight_form().
            num_threads: number of threads; 0: one per core, at most MOST_THREADS.
        """
        threads = num_threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._folder, self._form = folder, form
        self._pool = ThreadPoolExecutor(threads, "revision")
        self._files: list[_File] = []
        self._pieces: list[list[Future[bytes]]] = []  # digests of the pieces of each file
        self._error: OSError | None = None

    def __enter__(self) -> WeightsReading:
        try:
            self._files = _files_of(self._folder)
        except OSError as error:
            self._error = error  # raised by revision(), which is called after loading; loading may fail with a better message
        for file in self._files:
            path, ends = self._folder / file.name, range(0, file.size, PIECE_BYTES)
            self._pieces.append([self._pool.submit(_digest, path, at, min(PIECE_BYTES, file.size - at)) for at in ends])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def revision(self) -> str:
        """Returns the revision in hexadecimal. Must be called after the weights are loaded, inside the block.

        Checks that no file has changed since the block was entered, so that the loaded weights have the returned revision.

        Raises:
            OSError: a file cannot be read.
            WeightsChanged: a file has changed since the block was entered.
        """
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
        if self._form or quantization_of(json.loads((self._folder / CONFIG).read_bytes())) is not None:
            # Other weights keep the revision that releases before quantization computed, so that both share a fleet.
            chain.update(f"codes {CODES_VERSION}, ".encode() + self._form)
        size, waited = sum(file.size for file in self._files), time.monotonic() - loaded
        logger.info("weights revision %s: hashed %.2f GB, until %.1f s after the load", chain.hexdigest(), size / 1e9, waited)
        return chain.hexdigest()


def _files_of(folder: Path) -> list[_File]:
    """Returns the files that the revision covers. Raises OSError if config.json is missing or metadata cannot be read."""
    optional = [folder / name for name in OPTIONAL if (folder / name).exists()]
    paths = [folder / CONFIG, *optional, *sorted(folder.glob("*.safetensors"))]
    found = [(path.name, path.stat()) for path in paths]
    return [_File(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found]


def _digest(path: Path, begin: int, size: int) -> bytes:
    """Returns the digest of one piece of a file. Raises OSError, or WeightsChanged if the file ends within the piece."""
    chain, buffer, done = xxhash.xxh3_128(), memoryview(bytearray(min(BUFFER_BYTES, size))), 0
    with path.open("rb", buffering=0) as file:  # opened for each piece, because the kernel tracks read-ahead for each open file
        file.seek(begin)
        while done < size:
            count = file.readinto(buffer[: size - done])
            if not count:
                raise WeightsChanged(f"{path} became shorter while it was read")
            chain.update(buffer[:count])
            done += count
    return chain.digest()
