"""Reads and writes stored files and batches for the routes of /v1/files and /v1/batches. Every method may raise ApiError."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request, unavailable
from rootstock_llm.services.gateway.store.batch_record import BatchOrder, BatchRecord, BatchStatus
from rootstock_llm.services.gateway.store.batch_store import BatchStore
from rootstock_llm.services.gateway.store.file_store import FileStore, NoSuchPlace
from rootstock_llm.services.gateway.store.state_store import StoreAway
from rootstock_llm.services.gateway.store.stored_files import StoredFile
from rootstock_llm.services.shared import limits

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class Stores:
    files: FileStore
    batches: BatchStore


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A client's request for a new batch."""

    input_file_id: str
    endpoint: str  # path to which every line of the input file is sent
    window: str  # completion_window, such as 24h
    metadata: dict[str, str]
    # Seconds for which output and error files are stored, or None for the default, BatchRecords.lives_s.
    results_live_s: int | None


class BatchRecords:
    """Reads and writes the files and batches of all clients.

    The `owner` of a record is the value of owner_of() for its API key.
    """

    def __init__(self, stores: Stores | None, lives_s: int, retry_after_s: int) -> None:
        """Makes the reader and writer of the records.

        Args:
            stores: None if this gateway has no store.
            lives_s: Seconds for which files and batches are stored by default.
            retry_after_s: Value of the Retry-After header while the store cannot be reached.
        """
        self._stores = stores
        self.lives_s = lives_s
        self._retry_after_s = retry_after_s

    @asynccontextmanager
    async def connected_stores(self) -> AsyncIterator[Stores]:
        """Yields the stores. Raises ApiError if this gateway has no store, or if the `async with` block raises StoreAway."""
        if self._stores is None:
            raise ApiError(400, "This server has no store, so it stores no files and runs no batches.", code="no_store")
        try:
            yield self._stores
        except StoreAway:
            raise unavailable("The store cannot be reached. Retry later.", self._retry_after_s, "store_unavailable") from None

    async def file(self, owner: str, file_id: str, param: str = "file_id") -> StoredFile:
        async with self.connected_stores() as stores:
            found = await stores.files.get(owner, file_id) if len(file_id) <= limits.MAX_STORED_ID_CHARS else None
        if found is None:
            raise ApiError(404, "No file has this id, or the file has expired.", param=param, code="file_not_found")
        return found

    async def files(self, owner: str, after: str, limit: int, rising: bool, purpose: str) -> tuple[list[StoredFile], bool]:
        async with self.connected_stores() as stores:
            try:
                return await stores.files.listed(owner, after, limit, rising, purpose)
            except NoSuchPlace:
                raise _no_such_place() from None

    async def delete_file(self, owner: str, file_id: str) -> None:
        file = await self.file(owner, file_id)
        async with self.connected_stores() as stores:
            if await stores.batches.is_batch_input(owner, file_id):
                raise ApiError(
                    409,
                    "A batch that has not ended reads this file. Cancel the batch first.",
                    param="file_id",
                    code="file_in_use",
                )
            await stores.files.delete(owner, file)

    async def begin(self, owner: str, key: str, new: NewBatch) -> BatchRecord:
        """Stores a new batch, which a gateway then runs.

        Args:
            key: Name of the API key that the batch counts against.
        """
        window_s = int(new.window[:-1]) * _UNITS[new.window[-1]]
        if window_s > limits.MAX_BATCH_WINDOW_S:
            message = f"'completion_window' may be at most {limits.MAX_BATCH_WINDOW_S // 86_400} days."
            raise bad_request("completion_window", message)
        file = await self.file(owner, new.input_file_id, "input_file_id")
        if file.batch:
            raise bad_request("input_file_id", "The file is the output of a batch. Name an uploaded file with the purpose batch.")
        now = int(time.time())
        order = BatchOrder(
            id=f"batch_{secrets.token_hex(16)}",
            owner=owner,
            key=key,
            endpoint=new.endpoint,
            input_file_id=file.id,
            window=new.window,
            created_at=now,
            expires_at=now + window_s,
            results_live_s=new.results_live_s or self.lives_s,
            output_id=f"file-{secrets.token_hex(16)}",
            error_id=f"file-{secrets.token_hex(16)}",
            metadata=new.metadata,
        )
        async with self.connected_stores() as stores:
            if not await stores.files.prolong(owner, file, order.expires_at + 3600):
                raise ApiError(404, "The file has just expired.", param="input_file_id", code="file_not_found")
            if not await stores.batches.begin(order):
                raise ApiError(429, "The store limit of this API key is reached. Delete stored data.", code="store_full")
        return await self.batch(owner, order.id)

    async def batch(self, owner: str, batch_id: str) -> BatchRecord:
        async with self.connected_stores() as stores:
            found = await stores.batches.get(owner, batch_id) if len(batch_id) <= limits.MAX_STORED_ID_CHARS else None
        if found is None:
            raise ApiError(404, "No batch has this id, or the batch has expired.", param="batch_id", code="batch_not_found")
        return found

    async def batches(self, owner: str, after: str, limit: int) -> tuple[list[BatchRecord], bool]:
        async with self.connected_stores() as stores:
            try:
                return await stores.batches.listed(owner, after, limit)
            except NoSuchPlace:
                raise _no_such_place() from None

    async def cancel(self, owner: str, batch_id: str) -> BatchRecord:
        """Cancels a batch that has not ended. A batch that is `cancelling` or `cancelled` does not change.

        Raises:
            ApiError: The batch does not exist, or has ended without a cancellation.
        """
        await self.batch(owner, batch_id)
        async with self.connected_stores() as stores:
            await stores.batches.cancel(owner, batch_id)
        record = await self.batch(owner, batch_id)
        if record.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            message = f"The batch cannot be cancelled, because it has the status {record.status.value}."
            raise ApiError(409, message, param="batch_id", code="batch_not_cancellable")
        return record


def _no_such_place() -> ApiError:
    return bad_request("after", "No object in the list has the id in 'after'. The object may have expired.")
