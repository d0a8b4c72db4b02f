"""Routes of files and batches. The routes do not generate, because gateways run the lines of a batch in the background."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rootstock_llm.services.gateway.api.batches.cards import batch_card, file_card, list_of
from rootstock_llm.services.gateway.api.batches.kept import BatchRecords, NewBatch
from rootstock_llm.services.gateway.api.batches.operations import BATCH, BATCHES, CANCEL, CONTENT, FILE, FILES, OPERATIONS
from rootstock_llm.services.gateway.api.batches.types import BatchRequest
from rootstock_llm.services.gateway.api.batches.upload import UploadLimits, receive_file
from rootstock_llm.services.gateway.api.document.operation import BINARY
from rootstock_llm.services.gateway.api.request_body import of_validation, parse_json
from rootstock_llm.services.gateway.generation.bodies import ClientGone
from rootstock_llm.services.gateway.generation.errors import AnswerForm, bad_request
from rootstock_llm.services.gateway.http.answer import READ_AHEAD_BYTES, HttpPort, json_response, send_while_read
from rootstock_llm.services.gateway.service.sink import MakeOperation
from rootstock_llm.services.gateway.store.metadata import check_metadata
from rootstock_llm.services.gateway.store.owner import owner_of
from rootstock_llm.services.gateway.store.stored_files import StoredFile
from rootstock_llm.services.shared import limits

_FILES_A_PAGE, _BATCHES_A_PAGE = (10_000, 10_000), (20, 100)  # (default, maximum) of the query parameter 'limit'


class FileContent(StreamingResponse):
    """The content of a file. If the client does not read it, the connection is closed; see send_while_read()."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send_while_read(scope, send))
        except ClientGone:
            return


class BatchesApi:
    """The routes of OpenAI's files and batches. Each process has one instance."""

    operations = OPERATIONS
    forms: Mapping[str, AnswerForm] = {}

    def __init__(self, port: HttpPort, records: BatchRecords) -> None:
        self._port = port
        self._records = records
        settings = port.settings
        self._limits = UploadLimits(settings.max_file_bytes, settings.body_timeout_s, records.lives_s)

    def generating(self) -> Mapping[str, MakeOperation]:
        """Returns an empty mapping, because no route generates."""
        return {}

    def routes(self) -> list[Route]:
        return [
            Route(FILES, self._upload, methods=["POST"]),
            Route(FILES, self._list_files),
            Route(FILE, self._get_file),
            Route(FILE, self._delete_file, methods=["DELETE"]),
            Route(CONTENT, self._get_content),
            Route(BATCHES, self._begin, methods=["POST"]),
            Route(BATCHES, self._list_batches),
            Route(BATCH, self._get_batch),
            Route(CANCEL, self._cancel, methods=["POST"]),
        ]

    async def _upload(self, request: Request) -> Response:
        async with self._records.connected_stores() as stores:
            files, bodies = stores.files, self._port.bodies.budget
            file = await receive_file(request.scope, request.receive, _owner(request), files, bodies, self._limits)
        return json_response(file_card(file))

    async def _list_files(self, request: Request) -> Response:
        query = request.query_params
        limit, order = _limit(query, _FILES_A_PAGE), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad_request("order", "'order' must be asc or desc.")
        after, purpose = query.get("after", ""), query.get("purpose", "")
        found, has_more = await self._records.files(_owner(request), after, limit, order == "asc", purpose)
        return json_response(list_of([file_card(file) for file in found], has_more))

    async def _get_file(self, request: Request) -> Response:
        return json_response(file_card(await self._records.file(_owner(request), request.path_params["file_id"])))

    async def _delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await self._records.delete_file(_owner(request), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def _get_content(self, request: Request) -> Response:
        owner = _owner(request)
        found = await self._records.file(owner, request.path_params["file_id"])
        headers = {"content-length": str(found.size)}
        return FileContent(self._content(owner, found), media_type=BINARY, headers=headers)

    async def _content(self, owner: str, file: StoredFile) -> AsyncIterator[bytes]:
        """Yields the file's content in pieces of at most READ_AHEAD_BYTES.

        If reading fails after the first piece, the connection is closed, because the status was already sent.
        """
        async with self._records.connected_stores() as stores:
            async for chunk in stores.files.content(owner, file):
                for at in range(0, len(chunk), READ_AHEAD_BYTES):
                    yield chunk[at : at + READ_AHEAD_BYTES]

    async def _begin(self, request: Request) -> Response:
        new = await self._parsed_body(request)
        return json_response(batch_card(await self._records.begin(_owner(request), request.scope["state"]["key"], new)))

    async def _list_batches(self, request: Request) -> Response:
        query = request.query_params
        limit = _limit(query, _BATCHES_A_PAGE)
        found, has_more = await self._records.batches(_owner(request), query.get("after", ""), limit)
        return json_response(list_of([batch_card(record) for record in found], has_more))

    async def _get_batch(self, request: Request) -> Response:
        return json_response(batch_card(await self._records.batch(_owner(request), request.path_params["batch_id"])))

    async def _cancel(self, request: Request) -> Response:
        return json_response(batch_card(await self._records.cancel(_owner(request), request.path_params["batch_id"])))

    async def _parsed_body(self, request: Request) -> NewBatch:
        """Returns the client's request for a new batch. Raises ApiError if the body is invalid."""
        async with self._port.bodies.read(request.scope, request.receive, limits.SMALL_BODY_BYTES) as body:
            try:
                given = BatchRequest.model_validate(parse_json(body.take()))
            except ValidationError as error:
                raise of_validation(error) from None
        expires = given.output_expires_after
        return NewBatch(
            given.input_file_id,
            given.endpoint,
            given.completion_window,
            check_metadata(given.metadata),
            None if expires is None else expires.seconds,
        )


def _owner(request: Request) -> str:
    return owner_of(request.scope["state"]["key"])


def _limit(query: Mapping[str, str], page: tuple[int, int]) -> int:
    default, maximum = page
    given = query.get("limit", str(default))
    if not given.isdecimal() or len(given) > len(str(maximum)) or not 1 <= int(given) <= maximum:
        raise bad_request("limit", f"'limit' must be a number from 1 to {maximum}.")
    return int(given)
