"""The files of a model in a download store: their URLs and checks."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO, Protocol

from rootstock_llm.services.shared.fetch.http_client import Headers

TOKENIZER = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
WANTED = (*TOKENIZER, "*.safetensors")  # other formats, such as pickles, are not downloaded
# A second copy of the weights in Mistral's repositories, for other loaders. It is not downloaded.
COPIES = "consolidated*.safetensors"
CHUNK = 1 << 20  # bytes per read


@dataclass(frozen=True)
class RemoteFile:
    """A file of a model in a store."""

    name: str  # path in the model's folder
    size: int  # in bytes
    version: str  # identifies the content; it changes if the content changes
    url: str  # URL for GET requests; it supports the header Range
    headers: Callable[[], Headers]  # returns the headers of a request to `url`
    find_fault: Callable[[Path], str]  # checks a downloaded copy; returns the difference from the source, or ""


class Unfetchable(Exception):
    """A model cannot be downloaded. The message has the reason and the remedy."""


class Unserved(Unfetchable):
    """No worker serves the model. The message is the worker's error message, which names the model."""


class DownloadStore(Protocol):
    """The files of one model in a store."""

    mark: str  # name of the file that marks a folder as complete; its content is `wanted`

    @property
    def wanted(self) -> str:
        """Text that identifies the download: the source; for a mounted folder, the names, sizes and times of its files."""
        ...

    def files(self) -> list[RemoteFile]:
        """Returns the files of the model. Raises OSError if the store cannot be read."""
        ...


def digest(file: BinaryIO, kind: str, prefix: bytes = b"", length: int = sys.maxsize) -> bytes:
    """Returns the checksum of `prefix` and the next `length` bytes of a file. `kind` is an algorithm of hashlib."""
    sums = hashlib.new(kind, prefix, usedforsecurity=False)
    while length and (chunk := file.read(min(CHUNK, length))):
        sums.update(chunk)
        length -= len(chunk)
    return sums.digest()


def checksum_check(kind: str, wanted: str, prefix: Callable[[Path], bytes] = lambda _: b"") -> Callable[[Path], str]:
    """Returns a function that compares a file with a hexadecimal checksum and returns the fault, or "".

    Args:
        kind: algorithm of hashlib.
        prefix: returns the bytes that the checksum covers before the file's content.
    """

    def find_fault(path: Path) -> str:
        with path.open("rb") as file:
            found = digest(file, kind, prefix(path)).hex()
        return "" if found == wanted else f"its {kind} is {found}, not {wanted}"

    return find_fault


def is_wanted(name: str) -> bool:
    """Whether a file of a model is downloaded from the hub, GCS or S3. MODEL_FILES=tokenizer excludes weights."""
    if fnmatch(name, COPIES):
        return False
    return any(fnmatch(name, pattern) for pattern in (TOKENIZER if os.environ.get("MODEL_FILES") == "tokenizer" else WANTED))
