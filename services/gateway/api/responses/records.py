"""Reads and writes stored responses and conversations for the Responses API. Every method may raise ApiError."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from rootstock_llm.services.gateway.api.responses.items import REFERENCE, response_of
from rootstock_llm.services.gateway.generation.bodies import Hold
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request, unavailable
from rootstock_llm.services.gateway.store.background_record import OPEN, FinalRecords, StoredConversationUpdate
from rootstock_llm.services.gateway.store.state_store import Changed, StateStore, StoreAway, StoredRecord
from rootstock_llm.services.shared import limits

logger = logging.getLogger(__name__)

NOT_FINISHED = "previous_response_not_finished"
MAX_ATTEMPTS = 16  # attempts to write a conversation that other requests change at the same time
PAUSE_S = 0.01  # seconds; the pause between two attempts is this time multiplied by a random number from 1 to MAX_ATTEMPTS
RESPONSE_PREFIX, CONVERSATION_PREFIX = "resp_", "conv_"  # prefixes of the ids of responses and conversations

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Context:
    """The stored items that precede the input of a request."""

    items: list[Json] = field(default_factory=list)  # oldest first
    chain: tuple[str, ...] = ()  # ids of the responses that have the items, oldest first; empty for a conversation
    num_bytes: int = 0  # total size of the records of `chain`


class Records:
    """Reads and writes the responses and conversations of all clients. The `owner` of a record is the value of owner_of()."""

    def __init__(self, store: StateStore | None, retry_after_s: int) -> None:
        """Makes the reader and writer of the records.

        Args:
            store: None if this gateway has no store.
            retry_after_s: Value of the Retry-After header while the store cannot be reached.
        """
        self._store = store
        self.has_store = store is not None  # whether this gateway can store responses
        self._retry_after_s = retry_after_s

    async def after(self, owner: str, response_id: str, reserve: Hold) -> Context:
        """Returns the context of a new response that follows the stored response `response_id`.

        Args:
            reserve: Reserves the bytes of the context in the body budget.
        """
        last = await self._response(owner, response_id, "previous_response_id")
        if last["response"]["status"] in OPEN:
            message = "The previous response has not ended yet. Wait until it ends, or cancel it."
            raise bad_request("previous_response_id", message, NOT_FINISHED)
        names = (*last["chain"], response_id)
        if len(names) > limits.MAX_RESPONSE_CHAIN or last["bytes"] > limits.MAX_CHAIN_BYTES:
            message = (
                f"The response would follow {len(names)} responses of {last['bytes']} bytes. At most {limits.MAX_RESPONSE_CHAIN} "
                f"responses and {limits.MAX_CHAIN_BYTES} bytes are allowed. Send the needed items in 'input' instead."
            )
            raise bad_request("previous_response_id", message, "context_length_exceeded")
        await reserve(last["bytes"])
        earlier = [None if found is None else orjson.loads(found.content) for found in await self._get(owner, last["chain"])]
        if None in earlier:
            raise _not_found(
                "previous_response_id",
                "A response before the previous response has expired or was deleted. Send the needed items in 'input'.",
                "previous_response_not_found",
            )
        turns = [*earlier, last]
        items = [item for turn in turns if turn for item in (*turn["input"], *turn["response"]["output"])]
        return Context(items, names, last["bytes"])

    async def of_conversation(self, owner: str, conversation_id: str, reserve: Hold) -> Context:
        """Returns the context of a new response in a conversation. For `reserve`, see after()."""
        found = await self._conversation_record(owner, conversation_id, "conversation")
        await reserve(len(found.content))
        return Context(orjson.loads(found.content)["items"])

    async def resolved(
        self, owner: str, items: Sequence[Json], before: Context, reserve: Hold, where: str = "input"
    ) -> list[Json]:
        """Returns the items with each reference replaced by the stored item that it names.

        A reference to an item of the context is removed, because the context already has the item. Each response is read once.
        References to the same item share one object, but each reference counts for `reserve` and for MAX_CHAIN_BYTES, because
        the prompt repeats the item.

        Args:
            reserve: Reserves the bytes of the referenced items in the body budget.
            where: The client's field of the items.
        """
        known = {item["id"] for item in before.items}
        references = Counter(item["id"] for item in items if item["type"] == REFERENCE and item["id"] not in known)
        stored: dict[str, dict[str, Json]] = {}  # the referenced items of each response by their ids
        found, num_bytes = [], 0
        for index, item in enumerate(items):
            if item["type"] != REFERENCE:
                found.append(item)
            elif item["id"] not in known:
                name = response_of(item["id"]) or ""
                if name not in stored:
                    stored[name] = await self._output_items(owner, name, references)
                    size = sum(references[each] * len(orjson.dumps(output)) for each, output in stored[name].items())
                    num_bytes += size
                    if num_bytes > limits.MAX_CHAIN_BYTES:
                        raise _references_too_large(where)
                    await reserve(size)
                if item["id"] not in stored[name]:
                    raise _not_found(f"{where}[{index}].id", "No item has this id, or the item has expired.", "item_not_found")
                found.append(stored[name][item["id"]])
        return found

    async def store_response(self, owner: str, response: Json, items: Sequence[Json], before: Context) -> bool:
        """Stores a response with the items of its input. Returns False if it could not be stored."""
        return await self._try_put(owner, response["id"], record_of(response, items, before.chain, before.num_bytes))

    async def final_records(self, owner: str, response: Json, context_bytes: int) -> FinalRecords:
        """Returns the final record of a background response, and the new record of the conversation that it extends, if any.

        Args:
            context_bytes: Total size of the stored responses that precede this response.
        """
        last = await self._response(owner, response["id"], "response_id")
        talk = None
        if response["conversation"] is not None and response["status"] in ("completed", "incomplete"):
            talk = await self._extended_conversation(owner, response["conversation"]["id"], [*last["input"], *response["output"]])
        return FinalRecords(orjson.dumps(record_of(response, last["input"], last["chain"], context_bytes)), talk)

    async def changed_record(self, owner: str, response_id: str, change: Json) -> bytes:
        """Returns the final record of a response: the stored record with the fields of `change`.

        Raises:
            ValueError, TypeError, LookupError: The record is not a response.
        """
        last = await self._response(owner, response_id, "response_id")
        context_bytes = last["bytes"] - len(orjson.dumps({**last, "bytes": 0}))
        return orjson.dumps(record_of({**last["response"], **change}, last["input"], last["chain"], context_bytes))

    async def _extended_conversation(
        self, owner: str, conversation_id: str, items: Sequence[Json]
    ) -> StoredConversationUpdate | None:
        try:
            conversation, version = await self._conversation(owner, conversation_id, "conversation")
        except ApiError as error:
            if error.status == 503:
                raise
            logger.warning("did not extend a conversation: %s", error.message)
            return None
        _extend(conversation, items)
        content = orjson.dumps(conversation)
        if len(content) > limits.MAX_RECORD_BYTES:
            logger.warning("did not extend a conversation, because its record would be too large")
            return None
        return StoredConversationUpdate(conversation_id, version, content)

    async def response(self, owner: str, response_id: str) -> Json:
        found: Json = (await self._response(owner, response_id, "response_id"))["response"]
        return found

    async def input_items(self, owner: str, response_id: str) -> list[Json]:
        found: list[Json] = (await self._response(owner, response_id, "response_id"))["input"]
        return found

    async def delete_response(self, owner: str, response_id: str) -> None:
        await self._delete(owner, response_id, RESPONSE_PREFIX, "response_id")

    async def delete_conversation(self, owner: str, conversation_id: str) -> None:
        await self._delete(owner, conversation_id, CONVERSATION_PREFIX, "conversation_id")

    async def _delete(self, owner: str, name: str, kind: str, param: str) -> None:
        if not name.startswith(kind):
            raise object_not_found(param)
        async with self._connected_store() as store:
            existed = await store.delete(owner, name)
        if not existed:
            raise object_not_found(param)

    async def begin_conversation(self, owner: str, items: Sequence[Json], metadata: Json) -> Json:
        """Stores a new conversation and returns it."""
        conversation: Json = {
            "id": f"{CONVERSATION_PREFIX}{secrets.token_hex(24)}",
            "created_at": int(time.time()),
            "metadata": metadata,
            "items": list(items),
        }
        async with self._connected_store() as store:
            is_stored = await store.put(owner, conversation["id"], orjson.dumps(conversation), version=0)
        if not is_stored:
            raise _store_full()
        return conversation

    async def conversation(self, owner: str, conversation_id: str) -> Json:
        return (await self._conversation(owner, conversation_id, "conversation_id"))[0]

    async def update_conversation(self, owner: str, conversation_id: str, metadata: Json) -> Json:
        return await self._change(owner, conversation_id, lambda conversation: conversation.update(metadata=metadata))

    async def extend(self, owner: str, conversation_id: str, items: Sequence[Json]) -> Json:
        """Adds the items whose ids the conversation does not have yet at its end, and returns the conversation."""
        return await self._change(owner, conversation_id, lambda conversation: _extend(conversation, items))

    async def remove_item(self, owner: str, conversation_id: str, item_id: str) -> Json:
        def removed(conversation: Json) -> None:
            conversation["items"] = [item for item in conversation["items"] if item["id"] != item_id]

        return await self._change(owner, conversation_id, removed)

    async def _change(self, owner: str, conversation_id: str, change: Any) -> Json:
        for _ in range(MAX_ATTEMPTS):
            conversation, version = await self._conversation(owner, conversation_id, "conversation_id")
            change(conversation)
            try:
                async with self._connected_store() as store:
                    is_stored = await store.put(owner, conversation_id, orjson.dumps(conversation), version)
            except Changed:
                await asyncio.sleep(PAUSE_S * (1 + secrets.randbelow(MAX_ATTEMPTS)))
                continue
            if not is_stored:
                raise _store_full()
            return conversation
        raise ApiError(
            409, "Other requests are changing this conversation. Retry later.", param="conversation", code="conversation_locked"
        )

    async def _conversation(self, owner: str, conversation_id: str, param: str) -> tuple[Json, int]:
        found = await self._conversation_record(owner, conversation_id, param)
        return orjson.loads(found.content), found.version

    async def _conversation_record(self, owner: str, conversation_id: str, param: str) -> StoredRecord:
        (found,) = await self._get(owner, [conversation_id]) if conversation_id.startswith(CONVERSATION_PREFIX) else [None]
        if found is None:
            raise _not_found(param, "No conversation has this id, or the conversation has expired.", "conversation_not_found")
        return found

    async def _response(self, owner: str, response_id: str, param: str) -> Json:
        (found,) = await self._get(owner, [response_id]) if response_id.startswith(RESPONSE_PREFIX) else [None]
        if found is None:
            code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
            raise _not_found(param, "No response has this id, or the response has expired.", code)
        record: Json = orjson.loads(found.content)
        return record

    async def _output_items(self, owner: str, response_id: str, item_ids: Container[str]) -> dict[str, Json]:
        """Returns the output items of a response whose ids are in `item_ids`, by id. Empty if no response has this id."""
        (found,) = await self._get(owner, [response_id]) if response_id else [None]
        output = () if found is None else orjson.loads(found.content)["response"]["output"]
        return {item["id"]: item for item in output if item["id"] in item_ids}

    async def _get(self, owner: str, names: Sequence[str]) -> list[StoredRecord | None]:
        async with self._connected_store() as store:
            return await store.get(owner, names)

    async def _try_put(self, owner: str, name: str, record: Json) -> bool:
        """Stores a record. Returns False instead of raising, because the client gets the response even if it is not stored."""
        if self._store is None:
            return False
        try:
            return await self._store.put(owner, name, orjson.dumps(record))
        except StoreAway as away:
            logger.warning("could not store a response: %s", away)
            return False

    @asynccontextmanager
    async def _connected_store(self) -> AsyncIterator[StateStore]:
        if self._store is None:
            raise ApiError(400, "This server has no store, so it has no stored responses and no conversations.", code="no_store")
        try:
            yield self._store
        except StoreAway:
            raise unavailable("The store cannot be reached. Retry later.", self._retry_after_s, "store_unavailable") from None


def _extend(conversation: Json, items: Sequence[Json]) -> None:
    known = {item["id"] for item in conversation["items"]}
    conversation["items"] += [item for item in items if item["id"] not in known]


def record_of(response: Json, items: Sequence[Json], chain: Sequence[str], context_bytes: int) -> Json:
    """Returns the record of a response.

    Args:
        items: The response's input.
        chain: Ids of the stored responses that precede the response, oldest first.
        context_bytes: Total size of the records of `chain`.
    """
    record: Json = {"response": response, "input": list(items), "chain": list(chain), "bytes": 0}
    record["bytes"] = context_bytes + len(orjson.dumps(record))
    return record


def _not_found(param: str, message: str, code: str) -> ApiError:
    return ApiError(404, message, param=param, code=code)


def object_not_found(param: str) -> ApiError:
    return _not_found(param, "No object has this id, or the object has expired.", "not_found")


def _references_too_large(where: str) -> ApiError:
    message = f"The items that '{where}' refers to have more than {limits.MAX_CHAIN_BYTES} bytes. Refer to fewer items."
    return ApiError(413, message, param=where, code="request_too_large")


def _store_full() -> ApiError:
    return ApiError(
        429, "The store limit of this API key or of this conversation is reached. Delete stored data.", code="store_full"
    )
