"""Uploads and downloads files in pieces, with a progress bar. A file is never completely in memory."""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit
from rootstock_llm.services.cli.shared.server import PIECE_BYTES, Content
from rootstock_llm.services.cli.shared.terminal import Terminal
from rootstock_llm.services.shared.observe.progress import Progress

SHOW_EVERY_S = 0.2  # seconds between two updates of the progress bar


def endpoint_of(path: Path) -> str:
    """Returns the `url` in the first line of a batch file. Raises CommandFailed if there is no such file, line or `url`."""
    try:
        with path.open("rb") as file:
            line: Any = json.loads(file.readline() or b"null")
        url = line.get("url") if isinstance(line, dict) else None
    except OSError as error:
        raise _unreadable(path, error) from None
    except ValueError as error:
        raise CommandFailed(Exit.USAGE, f"the first line of {path} is not JSON ({error}): a line must be a request.") from None
    if not isinstance(url, str) or not url:
        raise CommandFailed(
            Exit.USAGE, f"the first line of {path} has no url: a line must be a request, see docs/reference/cli.md."
        )
    return url


def content_of(path: Path, err: Terminal) -> Content:
    """Returns the form that /v1/files takes for a file with purpose `batch`.

    Args:
        err: terminal that shows the progress of the upload.

    Raises:
        CommandFailed: The file cannot be read, or is no regular file, so that its size is unknown.
    """
    boundary = secrets.token_hex(16)
    name = path.name.replace("\\", "_").replace('"', "_").replace("\r", "_").replace("\n", "_")
    head = _part(boundary, 'name="purpose"') + b"batch\r\n"
    head += _part(boundary, f'name="file"; filename="{name}"', "content-type: application/jsonl\r\n")
    tail = f"\r\n--{boundary}--\r\n".encode()
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
    except OSError as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(about.st_mode):
        raise CommandFailed(Exit.USAGE, f"{path} is not a regular file: write the requests to a file, and name this file.")
    size = about.st_size
    length = len(head) + size + len(tail)
    pieces = with_progress(_pieces(path, size, head, tail), "upload", length, err)
    return Content(f"multipart/form-data; boundary={boundary}", pieces, length)


def _unreadable(path: Path, error: OSError) -> CommandFailed:
    return CommandFailed(Exit.USAGE, f"{path} cannot be read ({error.strerror}): name a file with a request in each line.")


def _part(boundary: str, disposition: str, headers: str = "") -> bytes:
    return f"--{boundary}\r\ncontent-disposition: form-data; {disposition}\r\n{headers}\r\n".encode(errors="replace")


def _pieces(path: Path, size: int, head: bytes, tail: bytes) -> Iterator[bytes]:
    """Yields the form of content_of() in pieces. If the file has become longer than `size`, only its first `size` bytes are sent.

    Raises:
        CommandFailed: The file has become shorter than `size`.
    """
    yield head
    with path.open("rb") as file:
        while size and (piece := file.read(min(size, PIECE_BYTES))):
            size -= len(piece)
            yield piece
    if size:
        raise CommandFailed(Exit.FAILED, f"{path} became shorter during the upload: submit it again.")
    yield tail


def with_progress(pieces: Iterable[bytes], title: str, total: int, err: Terminal) -> Iterator[bytes]:
    """Yields the given pieces, and shows the number of bytes yielded so far.

    Args:
        total: bytes of all pieces; 0 if unknown, so that no progress is shown.
        err: stream for the progress. If it is not a terminal, no progress is shown.
    """
    begun = updated_at = time.monotonic()
    done, is_shown = 0, err.is_tty and total > 0
    try:
        for piece in pieces:
            yield piece
            done, now = done + len(piece), time.monotonic()
            if is_shown and now - updated_at >= SHOW_EVERY_S:
                err.overwrite(Progress(title, min(done, total), total, now - begun).bar())
                updated_at = now
    finally:
        if is_shown:
            err.overwrite("")
