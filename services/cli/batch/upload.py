"""A file as multipart/form-data, in pieces: none is held whole."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.cli.batch.passing import shown
from services.cli.shared.exits import CommandFailed, Exit
from services.cli.shared.server import PIECE_BYTES, Content
from services.cli.shared.terminal import Terminal


def endpoint_of(path: Path) -> str:
    """That which the first line names. Raises CommandFailed for a file without such a line."""
    try:
        with path.open("rb") as file:
            line: Any = json.loads(file.readline() or b"null")
        url = line.get("url") if isinstance(line, dict) else None
    except OSError as error:
        raise _unreadable(path, error) from None
    except ValueError as error:
        raise CommandFailed(Exit.USAGE, f"the first line of {path} is no JSON ({error}): a line must hold a request.") from None
    if not isinstance(url, str) or not url:
        raise CommandFailed(
            Exit.USAGE, f"the first line of {path} names no url: a line must hold a request, see docs/reference/cli.md."
        )
    return url


def content_of(path: Path, err: Terminal) -> Content:
    """With purpose `batch`, as OpenAI's /v1/files takes it. err: that it is shown on while it is sent. Raises CommandFailed."""
    boundary = secrets.token_hex(16)
    name = path.name.replace("\\", "_").replace('"', "_").replace("\r", "_").replace("\n", "_")
    head = _part(boundary, 'name="purpose"') + b"batch\r\n"
    head += _part(boundary, f'name="file"; filename="{name}"', "content-type: application/jsonl\r\n")
    tail = f"\r\n--{boundary}--\r\n".encode()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _unreadable(path, error) from None
    length = len(head) + size + len(tail)
    pieces = shown(_pieces(path, size, head, tail), "upload", length, err)
    return Content(f"multipart/form-data; boundary={boundary}", pieces, length)


def _unreadable(path: Path, error: OSError) -> CommandFailed:
    return CommandFailed(Exit.USAGE, f"{path} cannot be read ({error.strerror}): name a file with a request in each line.")


def _part(boundary: str, disposition: str, further: str = "") -> bytes:
    return f"--{boundary}\r\ncontent-disposition: form-data; {disposition}\r\n{further}\r\n".encode()


def _pieces(path: Path, size: int, head: bytes, tail: bytes) -> Iterator[bytes]:
    """What is appended meanwhile is not sent: the length was told."""
    yield head
    with path.open("rb") as file:
        while size and (piece := file.read(min(size, PIECE_BYTES))):
            size -= len(piece)
            yield piece
    if size:
        raise CommandFailed(Exit.FAILED, f"{path} has become shorter while it was sent: send it again.")
    yield tail
