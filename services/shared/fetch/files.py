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
COPIES = "consolidated*.safetensors"  # Mistral's repositories have a second copy of the weights for other loaders
CHUNK = 1 << 20  # bytes per read


@dataclass(frozen=True)
class RemoteFile:
    """A file of a model in a store."""

    name: str  # path in the model's folder
    size: int  # in bytes
    version: str  # differs if the content differs
    url: str  # URL for GET requests; it supports the header Range
    headers: Callable[[], Headers]  # returns the headers of a request to `url`
    wrong: Callable[[Path], str]  # checks a downloaded copy; returns its fault, or ""


class Unfetchable(Exception):
    """A model cannot be downloaded. The message has the reason and the remedy."""


class Unserved(Unfetchable):
    """No worker serves the model. The message is that of the worker; it names the model."""


class DownloadStore(Protocol):
    """The files of one model in a store."""

    mark: str  # name of the file in a completely downloaded folder that contains `wanted`

    @property
    def wanted(self) -> str:
        """Text that identifies the download: the source, or for a mounted folder the state of its files."""
        ...

    def files(self) -> list[RemoteFile]:
        """Returns the files of the model. Raises OSError if the store cannot be read."""
        ...


def digest(file: BinaryIO, kind: str, first: bytes = b"", length: int = sys.maxsize) -> bytes:
    """Returns the checksum of `first` and the next `length` bytes of a file."""
    sums = hashlib.new(kind, first, usedforsecurity=False)
    while length and (chunk := file.read(min(CHUNK, length))):
        sums.update(chunk)
        length -= len(chunk)
    return sums.digest()


def unequal(kind: str, wanted: str, first: Callable[[Path], bytes] = lambda _: b"") -> Callable[[Path], str]:
    """Returns a function that compares a file with a hexadecimal checksum and returns the fault, or "".

    Args:
        first: returns the bytes before the file's content that the checksum covers, too.
    """

    def wrong(path: Path) -> str:
        with path.open("rb") as file:
            found = digest(file, kind, first(path)).hex()
        return "" if found == wanted else f"its {kind} is {found}, not {wanted}"

    return wrong


def is_wanted(name: str) -> bool:
    """Whether the file with this name is downloaded."""
    if fnmatch(name, COPIES):
        return False
    return any(fnmatch(name, each) for each in (TOKENIZER if os.environ.get("MODEL_FILES") == "tokenizer" else WANTED))
