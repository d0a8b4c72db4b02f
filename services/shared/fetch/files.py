"""What a store has of a model: its files, where each is and how it is checked."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO, Protocol

from services.shared.fetch.http_client import Headers

TOKENIZER = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
WANTED = (*TOKENIZER, "*.safetensors")  # no pickles
COPIES = "consolidated*.safetensors"  # of the same weights, for other loaders, as Mistral's repositories have them
CHUNK = 1 << 20


@dataclass(frozen=True)
class File:
    """name: below the model's folder. url, headers: of a GET that takes Range. wrong: what is wrong with the bytes at a path;
    empty: nothing. version: changes with the bytes."""

    name: str
    size: int
    version: str
    url: str
    headers: Callable[[], Headers]
    wrong: Callable[[Path], str]


class Unfetchable(Exception):
    """The text says what is wrong with a model, or with the place for it."""


class Unserved(Unfetchable):
    """A model that no worker serves. The text is the worker's sentence, which names the model."""


class Store(Protocol):
    """mark: name of a file in the model's folder that holds `wanted` once all is there. wanted: what is to be there; of a source
    that has changed since it is another."""

    mark: str

    @property
    def wanted(self) -> str: ...

    def files(self) -> list[File]: ...


def digest(file: BinaryIO, kind: str, first: bytes = b"", length: int = sys.maxsize) -> bytes:
    """Of the next `length` bytes."""
    sums = hashlib.new(kind, first, usedforsecurity=False)
    while length and (chunk := file.read(min(CHUNK, length))):
        sums.update(chunk)
        length -= len(chunk)
    return sums.digest()


def unequal(kind: str, wanted: str, first: Callable[[Path], bytes] = lambda _: b"") -> Callable[[Path], str]:
    """wanted: the sum, in hex."""

    def wrong(path: Path) -> str:
        with path.open("rb") as file:
            found = digest(file, kind, first(path)).hex()
        return "" if found == wanted else f"its {kind} is {found}, not {wanted}"

    return wrong


def is_wanted(name: str) -> bool:
    if fnmatch(name, COPIES):
        return False
    return any(fnmatch(name, each) for each in (TOKENIZER if os.environ.get("MODEL_FILES") == "tokenizer" else WANTED))
