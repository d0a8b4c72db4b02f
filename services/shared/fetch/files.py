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
COPIES = "consolidated*.safetensors"  # a second copy of the weights for other loaders, in Mistral's repositories
CHUNK = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """A file of a model in a store."""

    name: str  # path in the model's folder
    size: int  # in bytes
    version: str  # changes with the content
    url: str  # for GET requests, also with a Range header
    headers: Callable[[], Headers]  # returns the headers of such a request
    wrong: Callable[[Path], str]  # returns the fault of a downloaded copy, or ""


class Unfetchable(Exception):
    """A model cannot be downloaded. The message names the fault of the model or of its folder."""


class Unserved(Unfetchable):
    """No worker serves the model. The message is the worker's sentence, which names the model."""


class DownloadStore(Protocol):
    """The files of one model in a store."""

    mark: str  # name of the file in the model's folder that contains `wanted` once the download is complete

    @property
    def wanted(self) -> str:
        """Description of the wanted model. For a store that tracks changes, it changes with the files."""
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
    """Returns a check of files against a checksum in hexadecimal.

    Args:
        first: returns bytes that precede the file's content in the checksum.
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
