"""Receives an uploaded file and stores it in chunks, so that no whole file is in memory.

The buffer of an upload counts against the body budget. If an upload fails, its chunks are deleted. If the store cannot be reached
for the deletion, the chunks expire.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.types import Receive, Scope

from rootstock_llm.services.gateway.api.batches.form_reader import (
    BadForm,
    Event,
    FormReader,
    PartBegins,
    PartContent,
    boundary_of,
)
from rootstock_llm.services.gateway.api.batches.types import FileForm
from rootstock_llm.services.gateway.api.request_body import of_validation
from rootstock_llm.services.gateway.generation.bodies import BodyBudget, ClientGone
from rootstock_llm.services.gateway.generation.errors import CLIENT_CLOSED, ApiError, bad_request
from rootstock_llm.services.gateway.http.body import gone_of
from rootstock_llm.services.gateway.store.file_store import FileStore
from rootstock_llm.services.gateway.store.state_store import StoreAway
from rootstock_llm.services.gateway.store.stored_files import StoredFile
from rootstock_llm.services.shared import limits

logger = logging.getLogger(__name__)

FORM_BYTES = 64 << 10  # maximum bytes of the form besides the file's content
_BUFFER_BYTES = 2 * limits.FILE_CHUNK_BYTES  # an unfinished chunk, plus the network read that completes it
_FILE = "file"
MAX_DIGITS = 12  # a number of seconds with at least this many digits stays a string, which validation refuses


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Limits of one uploaded file."""

    file_bytes: int  # largest size of a file
    chunk_s: float  # seconds within which FILE_CHUNK_BYTES must arrive
    lives_s: int  # seconds for which a file is stored by default


async def receive_file(
    scope: Scope, receive: Receive, owner: str, files: FileStore, bodies: BodyBudget, allowed: UploadLimits
) -> StoredFile:
    """Stores the file of a multipart form while the form arrives.

    Raises:
        ApiError: The form or the file is invalid, too large or too slow, or the client has disconnected.
        StoreAway: The store cannot be reached.
    """
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    declared = headers.get(b"content-length", "")
    if declared.isdecimal() and int(declared) > allowed.file_bytes + FORM_BYTES:
        raise _too_large(allowed.file_bytes)
    boundary = boundary_of(headers.get(b"content-type", ""))
    if boundary is None:
        raise bad_request(None, "A file must be uploaded as multipart/form-data with a boundary.", "invalid_form")
    reservation = bodies.open(gone_of(scope))
    try:
        await reservation.grow_to(min(_BUFFER_BYTES, reservation.most))
        return await _receive(receive, Upload(files, owner, allowed), FormReader(boundary))
    except ClientGone:
        raise ApiError(CLIENT_CLOSED, "The client closed its connection.") from None
    finally:
        reservation.close()


async def _receive(receive: Receive, upload: Upload, form: FormReader) -> StoredFile:
    # Bytes that may still arrive: the largest file, and FILE_CHUNK_BYTES for the rest of the form.
    left = upload.limits.file_bytes + limits.FILE_CHUNK_BYTES
    try:
        async for piece in _pieces(receive, upload.limits.chunk_s):
            left -= len(piece)
            if left < 0:
                raise _too_large(upload.limits.file_bytes)
            for event in form.feed(piece):
                await upload.take(event)
        if not form.is_complete:
            raise BadForm("the form has no last boundary")
        return await upload.seal()
    except BadForm as bad:
        await upload.discard()
        raise bad_request(None, f"The form is invalid: {bad}.", "invalid_form") from None
    except BaseException:
        await upload.discard()
        raise


async def _pieces(receive: Receive, chunk_s: float) -> AsyncIterator[bytes]:
    """Yields the pieces of the body as they arrive.

    Raises:
        ClientGone: The client has disconnected.
        ApiError: 408 if a client needs more than `chunk_s` seconds for FILE_CHUNK_BYTES.
    """
    loop = asyncio.get_running_loop()
    deadline, received = loop.time() + chunk_s, 0
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, "The request's body did not arrive in time.", code="timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        yield piece
        received += len(piece)
        if received >= limits.FILE_CHUNK_BYTES:
            deadline, received = loop.time() + chunk_s, 0
        if not message.get("more_body", False):
            return


class Upload:
    """Stores the file of one form from the events of its FormReader. The last call is seal() or discard()."""

    def __init__(self, files: FileStore, owner: str, allowed: UploadLimits) -> None:
        self._files = files
        self._owner = owner
        self.limits = allowed
        self._id = f"file-{secrets.token_hex(16)}"
        self._fields: dict[str, str] = {}
        self._name = ""
        self._field: str | None = ""  # name of the form field that is being received, or None while the file is received
        self._value = bytearray()  # received bytes of the current field's value
        self._chunk = bytearray()  # received bytes of the file that are not stored, less than one chunk between two calls
        self._size = self._chunks = 0  # received bytes of the file, and number of its stored chunks
        self._other_bytes = 0  # received bytes of all fields besides the file

    async def take(self, event: Event) -> None:
        """Stores or buffers the content of the next event. Raises BadForm, ApiError, StoreAway."""
        if isinstance(event, PartBegins):
            self._begin(event)
        elif isinstance(event, PartContent):
            await self._add(event.content)
        elif self._field is not None:
            try:
                self._fields[self._field] = self._value.decode()
            except UnicodeDecodeError:
                raise BadForm("the value of a field is not UTF-8") from None
            self._value.clear()

    def _begin(self, part: PartBegins) -> None:
        if part.name != _FILE:
            self._field = part.name
            return
        if self._name:
            raise BadForm("the form has more than one file")
        self._field, self._name = None, (part.filename or _FILE)[: limits.MAX_FILE_NAME_CHARS]

    async def _add(self, content: bytes) -> None:
        if self._field is not None:
            self._other_bytes += len(content)
            if self._other_bytes > FORM_BYTES:
                raise BadForm(f"the fields of the form have more than {FORM_BYTES} bytes")
            self._value += content
            return
        self._size += len(content)
        if self._size > self.limits.file_bytes:
            raise _too_large(self.limits.file_bytes)
        self._chunk += content
        while len(self._chunk) >= limits.FILE_CHUNK_BYTES:
            await self._store(bytes(self._chunk[: limits.FILE_CHUNK_BYTES]))
            del self._chunk[: limits.FILE_CHUNK_BYTES]

    async def _store(self, content: bytes) -> None:
        number = self._chunks
        # Counted before the write, because a write that raises may still have stored the chunk, and discard() must delete it.
        self._chunks += 1
        if not await self._files.add(self._owner, self._id, number, content):
            raise _store_full()

    async def seal(self) -> StoredFile:
        """Stores the last chunk and the record of the file, which makes the file visible. Raises ApiError, StoreAway."""
        if not self._name:
            raise bad_request(_FILE, f"'{_FILE}' is required.", "missing_required_parameter")
        form = _form(self._fields)
        if self._chunk:
            await self._store(bytes(self._chunk))
        if not self._size:
            raise bad_request(_FILE, f"'{_FILE}' is empty.")
        now = int(time.time())
        lives_s = self.limits.lives_s if form.expires_after is None else form.expires_after.seconds
        file = StoredFile(self._id, self._size, now, now + lives_s, self._name, form.purpose, chunks=self._chunks)
        if not await self._files.seal(self._owner, file):
            raise _store_full()
        return file

    async def discard(self) -> None:
        if self._chunks:
            try:
                await self._files.discard(self._owner, self._id, self._chunks)
            except StoreAway as away:
                logger.warning("could not delete the chunks of a failed upload; they expire by themselves: %s", away)


def _form(fields: Mapping[str, str]) -> FileForm:
    """Returns the validated fields of the form. Raises ApiError."""
    given: dict[str, Any] = {_FILE: b"", **{name: fields[name] for name in ("purpose",) if name in fields}}
    expires = {name: fields[f"expires_after[{name}]"] for name in ("anchor", "seconds") if f"expires_after[{name}]" in fields}
    if expires:
        seconds = expires.get("seconds", "")
        given["expires_after"] = {
            **expires,
            **({"seconds": int(seconds)} if seconds.isdecimal() and len(seconds) < MAX_DIGITS else {}),
        }
    try:
        return FileForm.model_validate(given)
    except ValidationError as error:
        raise of_validation(error) from None


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The file is larger than {most} bytes. Split it.", param=_FILE, code="file_too_large")


def _store_full() -> ApiError:
    return ApiError(429, "The store limit of this API key is reached. Delete stored data.", param=_FILE, code="store_full")
