"""The routes of files and batches. None of them generates: a batch's lines are answered beside what comes over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.responses import StreamingResponse

from services.gateway.api.batches.cards import batch_card, file_card, list_of
from services.gateway.api.batches.kept import Asked, Kept
from services.gateway.api.batches.operations import BATCH, BATCHES, CANCEL, CONTENT, FILE, FILES, OPERATIONS
from services.gateway.api.batches.types import BatchRequest
from services.gateway.api.batches.upload import UploadLimits, receive_file
from services.gateway.api.body_errors import of_validation
from services.gateway.api.document.operation import BINARY
from services.gateway.api.strict_json import parse_json
from services.gateway.http.answer import HttpPort
from services.gateway.request.errors import AnswerForm, bad_request
from services.gateway.service.sink import MakeOperation
from services.gateway.state.metadata import check_metadata
from services.gateway.state.owner import owner_of
from services.gateway.state.stored_files import StoredFile
from services.shared import limits

_FILES_A_PAGE, _BATCHES_A_PAGE = (10_000, 10_000), (20, 100)  # where nothing is said, and at most


class BatchesApi:
    """One per process."""

    operations = OPERATIONS
    forms: Mapping[str, AnswerForm] = {}

    def __init__(self, port: HttpPort, kept: Kept) -> None:
        self._port = port
        self._kept = kept
        settings = port.settings
        self._limits = UploadLimits(settings.max_file_bytes, settings.body_timeout_s, kept.lives_s)

    def add_routes(self, app: FastAPI) -> Mapping[str, MakeOperation]:
        self._add_files(app)
        self._add_file(app)
        self._add_batches(app)
        self._add_batch(app)
        return {}

    def _add_files(self, app: FastAPI) -> None:
        @app.post(FILES)
        async def upload(request: Request) -> Response:
            async with self._kept.reached() as stores:
                files, bodies = stores.files, self._port.bodies.budget
                file = await receive_file(request.scope, request.receive, _owner(request), files, bodies, self._limits)
            return _json(file_card(file))

        @app.get(FILES)
        async def files(request: Request) -> Response:
            query = request.query_params
            limit, order = _limit(query, _FILES_A_PAGE), query.get("order", "desc")
            if order not in ("asc", "desc"):
                raise bad_request("order", "'order' must be asc or desc.")
            after, purpose = query.get("after", ""), query.get("purpose", "")
            found, has_more = await self._kept.files(_owner(request), after, limit, order == "asc", purpose)
            return _json(list_of([file_card(file) for file in found], has_more))

    def _add_file(self, app: FastAPI) -> None:
        @app.get(FILE)
        async def file(request: Request, file_id: str) -> Response:
            return _json(file_card(await self._kept.file(_owner(request), file_id)))

        @app.delete(FILE)
        async def forget(request: Request, file_id: str) -> Response:
            await self._kept.delete_file(_owner(request), file_id)
            return _json({"id": file_id, "object": "file", "deleted": True})

        @app.get(CONTENT)
        async def content(request: Request, file_id: str) -> Response:
            owner = _owner(request)
            found = await self._kept.file(owner, file_id)
            headers = {"content-length": str(found.size)}
            return StreamingResponse(self._content(owner, found), media_type=BINARY, headers=headers)

    async def _content(self, owner: str, file: StoredFile) -> AsyncIterator[bytes]:
        """Its head is out with the first piece: what fails from then on ends the connection."""
        async with self._kept.reached() as stores:
            async for piece in stores.files.content(owner, file):
                yield piece

    def _add_batches(self, app: FastAPI) -> None:
        @app.post(BATCHES)
        async def begin(request: Request) -> Response:
            asked = await self._read(request)
            key = request.scope["state"]["key"]
            return _json(batch_card(await self._kept.begin(_owner(request), key, asked)))

        @app.get(BATCHES)
        async def batches(request: Request) -> Response:
            query = request.query_params
            limit = _limit(query, _BATCHES_A_PAGE)
            found, has_more = await self._kept.batches(_owner(request), query.get("after", ""), limit)
            return _json(list_of([batch_card(record) for record in found], has_more))

    def _add_batch(self, app: FastAPI) -> None:
        @app.get(BATCH)
        async def batch(request: Request, batch_id: str) -> Response:
            return _json(batch_card(await self._kept.batch(_owner(request), batch_id)))

        @app.post(CANCEL)
        async def cancel(request: Request, batch_id: str) -> Response:
            return _json(batch_card(await self._kept.cancel(_owner(request), batch_id)))

    async def _read(self, request: Request) -> Asked:
        """Raises ApiError."""
        async with self._port.bodies.read(request.scope, request.receive, limits.SMALL_BODY_BYTES) as body:
            try:
                given = BatchRequest.model_validate(parse_json(body.take()))
            except ValidationError as error:
                raise of_validation(error) from None
        expires = given.output_expires_after
        return Asked(
            given.input_file_id,
            given.endpoint,
            given.completion_window,
            check_metadata(given.metadata),
            None if expires is None else expires.seconds,
        )


def _owner(request: Request) -> str:
    return owner_of(request.scope["state"]["key"])


def _limit(query: Mapping[str, str], page: tuple[int, int]) -> int:
    default, most = page
    given = query.get("limit", str(default))
    if not given.isdecimal() or len(given) > len(str(most)) or not 1 <= int(given) <= most:
        raise bad_request("limit", f"'limit' must be a number from 1 to {most}.")
    return int(given)


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
