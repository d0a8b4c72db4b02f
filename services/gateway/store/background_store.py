"""Background responses in the store. Each has an order, its output so far and a lease.

    state:of:OWNER:ID                 hash    record of the response with its input, as clients see it (redis_store.py); written
                                              at the request, with status queued, and at the end
    state:background:OWNER:ID         hash    state of a response; the fields are listed below
    state:background:events:OWNER:ID  list    events by sequence number, as streams send them
    state:background:ids:OWNER:ID     string  output ids, 4 bytes each
    state:background:texts:OWNER:ID   list    unparsed text of the ids, one item per piece with text
    state:background:probs:OWNER:ID   list    logprobs of the ids, one item per piece with logprobs
    state:background:open             zset    OWNER:ID of open responses, by the microsecond of the request
    state:background:of:OWNER         zset    ids of one owner's open responses, by the second of the request
    state:lease:background:OWNER:ID   string  lease of the response (lease.py)
    state:use:OWNER, state:size:OWNER         expiry and bytes of the record (as ID) and of all other data (as work:ID), see
                                              redis_store.py

Fields of state:background:OWNER:ID:

    order, prompt       the request; deleted at the end of the response
    status, cancel      status of the response; whether its client has cancelled it
    takes, taken        number of gateways in a row that took the response; Unix second of the last take
    alive               Unix second of the last write or lease renewal by the gateway that took the response last
    holder              lease token of the gateway that took the response last; "" after this gateway has released it (release())
    pieces              number of stored pieces
    decoded, chars, shown, weights, numerics    values of the last piece, see EarlierOutput
    bytes, told         bytes of all data except the record; bytes of the events

Each write is one script:

1. begin() stores the request, the first events and the lease.
2. write() stores a piece, and finish() stores the end with the extended conversation. Only the lease holder can call them.
3. take() takes an expired or released lease. Any gateway may call it.
4. seize() takes the lease by force for a client's cancellation. delete() removes all data. After either call, the gateway that
   runs the response can no longer write.

Pieces have numbers, so a repeated write after a lost reply has no effect.

| fault | effect |
|---|---|
| a gateway dies | its leases expire, and other gateways continue after the last piece |
| a gateway is suspended and wakes up | its writes fail, because another gateway has the lease or the response has ended |
| the store dies | its append-only file has the acknowledged writes; gateways buffer new output (journal.py) |
| no gateway takes the response before its data expires | the record says queued; reads report it as failed |
| no gateway can read or end the response | after GIVEN_UP takes, only the record remains, with status failed (give_up()) |
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import orjson

from rootstock_llm.services.gateway.generation.request import ModelVersion
from rootstock_llm.services.gateway.store import background_scripts as scripts
from rootstock_llm.services.gateway.store.background_past import ID_BYTES, PAGE_BYTES, PAGE_ITEMS, BackgroundPast, Lengths
from rootstock_llm.services.gateway.store.background_record import (
    BackgroundOrder,
    BackgroundStatus,
    FinalRecords,
    Page,
    Piece,
    Stored,
    order_of,
)
from rootstock_llm.services.gateway.store.lease import Lease, Leases
from rootstock_llm.services.gateway.store.state_redis import FREES, StateRedis
from rootstock_llm.services.shared.limits import MAX_BACKGROUND_BYTES
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

GIVEN_UP = 8  # if `takes` is larger, the gateway that takes the response ends it with status failed
SURVIVED_S = 60  # a gateway that has run the response for this many seconds resets `takes`: the next take is number 1
FINISHING_S = 600  # seconds after a response's deadline until its data expires

_OPEN = "state:background:open"
_NOT_EXTENDED = 2  # result of scripts.FINISH: the conversation was not extended, because the quota is full


class Begun(Enum):
    """Result of begin(): whether the response is stored."""

    YES = auto()
    STORE_FULL = auto()  # the owner's quota is full
    TOO_MANY = auto()  # the owner has too many open responses


class WriteResult(Enum):
    """Result of write(): whether the piece is stored."""

    YES = auto()
    STORE_FULL = auto()  # the owner's quota is full
    TOO_LARGE = auto()  # the response would exceed MAX_BACKGROUND_BYTES


_BEGUN = {1: Begun.YES, 0: Begun.STORE_FULL, -1: Begun.TOO_MANY}
_WRITE_RESULTS = {1: WriteResult.YES, 0: WriteResult.STORE_FULL, -1: WriteResult.TOO_LARGE}


@dataclass(frozen=True, slots=True)
class BackgroundLimits:
    """Lifetimes of background responses, and quotas per owner."""

    ttl_s: int  # lifetime of a record in seconds
    replay_s: int  # lifetime of the events after the end of their response, in seconds
    records: int  # largest number of records per owner, including those of other responses
    record_bytes: int  # largest number of bytes of an owner's records and background responses
    most_open: int  # largest number of open responses per owner


class BackgroundStore:
    """The background responses in the store.

    Raises:
        StoreAway: From every method that calls the store.
        LeaseLost: From write(), finish(), order() and give_up(), if another gateway has the lease or the response has ended.
    """

    def __init__(self, redis: StateRedis, lease_s: float, limits: BackgroundLimits) -> None:
        """Makes the store. A lease lasts `lease_s` seconds after its last renewal."""
        self.lease_s = lease_s
        self._redis = redis
        self._leases = Leases(redis, lease_s)
        self._lease_ms = int(lease_s * 1000)
        self._limits = limits

    async def begin(self, lease: Lease, order: BackgroundOrder, content: bytes, prompt: bytes, events: Sequence[bytes]) -> Begun:
        """Stores a new response and takes its lease. Has no effect if a response with this id is already stored.

        Args:
            content: Content of the record.
            prompt: Prompt ids, as in Stored.
            events: First events of the response.
        """
        limits = self._limits
        request = (order.id, order.member, content, order.dumped(), prompt)
        quota = (limits.ttl_s, limits.records, limits.record_bytes, limits.most_open, self._lives(order))
        keys = _keys(order.owner, order.id)
        found = await self._redis.call(scripts.BEGIN, keys, lease.token, self._lease_ms, *request, *quota, *events)
        return _BEGUN[found]

    async def write(self, lease: Lease, order: BackgroundOrder, piece: Piece) -> WriteResult:
        """Stores a piece if it fits into the owner's quota and into MAX_BACKGROUND_BYTES. Raises LeaseLost."""
        weights = b"" if piece.weights is None else orjson.dumps(list(piece.weights))
        state = (piece.decoded, piece.chars, piece.shown, weights, piece.numerics)
        new = (piece.offset * ID_BYTES, piece.ids, piece.text, piece.logprobs)
        quota = (order.id, MAX_BACKGROUND_BYTES, self._limits.record_bytes, self._lives(order))
        keys = _keys(order.owner, order.id)[1:]
        found = await self._leases.write(
            lease, scripts.WRITE, keys, piece.number, piece.status.value, *state, *new, *quota, *piece.events
        )
        return _WRITE_RESULTS[found]

    async def finish(
        self,
        lease: Lease,
        order: BackgroundOrder,
        number: int,
        status: BackgroundStatus,
        records: FinalRecords,
        events: Sequence[bytes],
    ) -> bool:
        """Ends the response. Writes its record and its conversation, and deletes its other data except for the events.

        The record is written even if the quota is full, because the response was accepted and its end frees most of its data.
        The conversation is written only if it fits into the quota.

        Args:
            number: Number of the last piece, plus 1.
            events: Last events of the response.

        Returns:
            False if the conversation has changed since its version was read. Nothing is written then.

        Raises:
            LeaseLost: Another gateway has the lease, or the response has ended or is deleted.
        """
        limits, update, keys = self._limits, records.conversation, _keys(order.owner, order.id)[1:]
        about = (number, status.value, order.id, order.member, records.record, limits.ttl_s, limits.replay_s)
        conversation: tuple[Any, ...] = ("", 0, b"")
        if update is not None:
            conversation = (update.name, update.version, update.content)
            keys.append(f"state:of:{order.owner}:{update.name}")
        found = await self._leases.write(
            lease, scripts.FINISH, keys, *about, *conversation, limits.record_bytes, *events, frees=True
        )
        if found == _NOT_EXTENDED:
            logger.warning(
                "did not extend a conversation, because the store limit of its API key is reached",
                extra=fields(response=order.id),
            )
        return bool(found)

    async def take(self, owner: str, response_id: str) -> Lease | None:
        """Takes the lease of a response. Returns None if another gateway has the lease or the response has ended."""
        lease = new_lease(owner, response_id)
        about = (SURVIVED_S, f"{owner}:{response_id}", response_id)
        found = await self._redis.call(scripts.TAKE, _keys(owner, response_id), lease.token, self._lease_ms, *about)
        return lease if found else None

    async def order(self, lease: Lease, owner: str, response_id: str) -> BackgroundOrder | None:
        """Returns the order of a response whose lease the caller has taken.

        Returns:
            None if `takes` is greater than GIVEN_UP: no gateway could read or end the response. The caller then calls give_up().

        Raises:
            LeaseLost: The caller has lost the lease.
            ValueError, TypeError: The stored order cannot be read.
        """
        found = await self._leases.write(lease, scripts.ORDER, _keys(owner, response_id)[1:], GIVEN_UP, frees=True)
        return None if found is None else order_of(found)

    async def give_up(self, lease: Lease, owner: str, response_id: str, record: bytes) -> None:
        """Replaces the record of a response, even if the quota is full, and deletes all other data. Raises LeaseLost.

        Args:
            record: New content of the record; b"" leaves the record unchanged.
        """
        about = (f"{owner}:{response_id}", response_id, record, self._limits.ttl_s)
        await self._leases.write(lease, scripts.GIVE_UP, _keys(owner, response_id)[1:], *about, frees=True)

    async def renew(self, leases: Mapping[Lease, BackgroundOrder]) -> list[Lease]:
        """Renews leases.

        Returns:
            The lost leases. Another gateway has the lease, or the response is cancelled, ended or deleted.
        """
        if not leases:
            return []
        keys = [key for lease, order in leases.items() for key in _keys(order.owner, order.id)[:2]]
        tokens = [lease.token for lease in leases]
        renewed = await self._redis.call(FREES + scripts.RENEW, keys, self._lease_ms, *tokens)
        return [lease for lease, is_renewed in zip(leases, renewed, strict=True) if not is_renewed]

    async def seize(self, owner: str, response_id: str) -> Lease | None:
        """Marks a response as cancelled and takes its lease by force.

        The caller then ends the response. If the caller fails, the next gateway that takes the response ends it.

        Returns:
            None if the response does not exist or has ended.
        """
        lease = new_lease(owner, response_id)
        found = await self._redis.call(FREES + scripts.SEIZE, _keys(owner, response_id), lease.token, self._lease_ms)
        return lease if found else None

    async def release(self, lease: Lease, owner: str, response_id: str) -> None:
        """Releases a lease, so that another gateway can take the response immediately. Decreases `takes` by 1.

        Idempotent. Has no effect if another gateway has taken the response.
        """
        await self._redis.call(FREES + scripts.RELEASE, _keys(owner, response_id)[:2], lease.token)

    def initial_state(self, order: BackgroundOrder, prompt: bytes, num_events: int) -> Stored:
        """Returns the state that begin() will store for this order."""
        return Stored(order, BackgroundStatus.QUEUED, prompt, False, 1, 0, self._past(order.owner, order.id, Lengths(num_events)))

    async def read(self, owner: str, response_id: str) -> Stored | None:
        """Returns the state of an open response without its output, or None if it has ended or does not exist."""
        found, events, id_bytes, texts, rows = await self._redis.read(scripts.READ, _keys(owner, response_id))
        fields = {name.decode(): value for name, value in zip(found[::2], found[1::2], strict=True)}
        if "order" not in fields:
            return None
        weights = fields.get("weights")
        return Stored(
            order=order_of(fields["order"]),
            status=BackgroundStatus(fields["status"].decode()),
            prompt=fields["prompt"],
            cancelled="cancel" in fields,
            takes=int(fields["takes"]),
            pieces=int(fields["pieces"]),
            past=self._past(owner, response_id, Lengths(events, id_bytes // ID_BYTES, texts, rows)),
            decoded=int(fields["decoded"]),
            chars=int(fields["chars"]),
            shown=int(fields["shown"]),
            weights=None if weights is None else ModelVersion(*orjson.loads(weights)),
            numerics=fields.get("numerics", b"").decode(),
        )

    def _past(self, owner: str, response_id: str, lengths: Lengths) -> BackgroundPast:
        return BackgroundPast(self._redis, _keys(owner, response_id)[2:6], lengths)

    async def status(self, owner: str, response_id: str) -> BackgroundStatus | None:
        """Returns the status of a response, or None if its state is not stored or has expired."""
        (_, hash_key, *_) = _keys(owner, response_id)
        found = await self._redis.read("return redis.call('HGET', KEYS[1], 'status')", [hash_key])
        return None if found is None else BackgroundStatus(found.decode())

    async def follow(self, owner: str, response_id: str, first: int) -> Page | None:
        """Returns a page of events from the sequence number `first` on. None if no events are stored, or if they have expired.

        The page has the limits of BackgroundPast.
        """
        keys, last = _keys(owner, response_id)[1:3], first + PAGE_ITEMS - 1
        status, total, events = await self._redis.read(scripts.FOLLOW, keys, first, last, PAGE_BYTES)
        return Page(BackgroundStatus(status.decode()), total, events) if status and total else None

    async def delete(self, owner: str, response_id: str) -> bool:
        """Deletes a response, even if a gateway has its lease. Returns whether the response existed."""
        script, member = FREES + scripts.DELETE, f"{owner}:{response_id}"
        return await self._redis.deletes(script, _keys(owner, response_id), "", member, response_id)

    async def find_unleased(self, most: int, released_only: bool = False) -> list[tuple[str, str]]:
        """Returns owner and id of up to `most` open responses without a lease holder, the oldest first.

        Args:
            released_only: Whether to return only responses that release() has released.
        """
        members = await self._redis.read(scripts.FIND_UNLEASED, [_OPEN], most, int(released_only))
        found = [str(each, "ascii").partition(":") for each in members]
        return [(owner, response_id) for owner, _, response_id in found]

    def _lives(self, order: BackgroundOrder) -> int:
        """Returns the lifetime of an open response's data, in seconds."""
        return order.ends_at - order.created_at + FINISHING_S


def new_lease(owner: str, response_id: str) -> Lease:
    """Returns a lease with a new token, which no gateway has taken yet."""
    return Lease(f"background:{owner}:{response_id}", secrets.token_hex(16))


def _keys(owner: str, response_id: str) -> list[str]:
    """Returns the Redis keys of a response in the order of KEYS of all scripts."""
    name = f"{owner}:{response_id}"
    return [
        f"state:lease:background:{name}",
        f"state:background:{name}",
        *(f"state:background:{kind}:{name}" for kind in ("events", "ids", "texts", "probs")),
        _OPEN,
        f"state:background:of:{owner}",
        f"state:of:{name}",
        f"state:use:{owner}",
        f"state:size:{owner}",
    ]
