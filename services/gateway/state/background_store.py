"""Responses in the background, in the store: what is asked, what has come of it so far, and who is at it.

    state:of:OWNER:ID                 hash    the response as it is shown, with its input, see redis_store.py: written when it is
                                              asked for, with status queued, and when it is over
    state:background:OWNER:ID         hash    order, prompt: what is asked; status; cancel; takes, taken, alive, holder: gateways
                                              that had it, since when the last one has, when that was last heard of, and its
                                              lease's token, "" once it has left it to others; pieces, decoded, chars, shown,
                                              weights, numerics: how far it has come; bytes; told: of events
    state:background:events:OWNER:ID  list    events by sequence number, as its streams have them
    state:background:ids:OWNER:ID     string  output ids, 4 bytes each
    state:background:texts:OWNER:ID   list    their text, a piece at a time, before anything is made of it
    state:background:probs:OWNER:ID   list    their log probabilities, where they are wanted
    state:background:open             zset    OWNER:ID of those that are not over, by the microsecond in which they were asked for
    state:background:of:OWNER         zset    the same of one owner, by id
    state:lease:background:OWNER:ID   string  who is at it, see lease.py
    state:use:OWNER, state:size:OWNER         bytes of the response (ID) and of the rest (work:ID), as redis_store.py counts them

begin() writes all at once, the lease too. What follows is written by who has the lease, in one script each: a piece (write()),
and the end (finish()), what its conversation gets with it. Anybody may take a lease that has run out (take()); a client that
cancels has it taken by force (seize()), which fences off whoever is at it; delete() removes all there is, so that nobody writes
any more. Each write is numbered: one that comes again, since its answer was lost, is not written twice.

What fails: a gateway dies: its leases run out, others go on from the last piece. A gateway is stopped and wakes up: its writes
find another lease, or an end, and write nothing. The store dies: its append-only file has what was acknowledged; whoever has a
response holds back what is new, see journal.py. Nobody comes until all of it expires: the record says queued, and without the
rest it is told as failed. Nobody can read or end it: who takes it behind GIVEN_UP takes gives it up (give_up()), with the lease
of that take: nothing is left of it but its record, which says failed then.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import orjson

from services.gateway.request.generation import ModelVersion
from services.gateway.state import background_scripts as scripts
from services.gateway.state.background_past import ID_BYTES, PAGE_BYTES, PAGE_ITEMS, BackgroundPast, Lengths
from services.gateway.state.background_record import BackgroundOrder, BackgroundStatus, Kept, Page, Piece, Stored, order_of
from services.gateway.state.lease import Lease, Leases
from services.gateway.state.state_redis import READS, StateRedis
from services.shared.limits import MAX_BACKGROUND_BYTES
from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

GIVEN_UP = 8  # takes, behind which one that nobody could even end is not taken any more
SURVIVED_S = 60  # with one gateway: the takes before that one are forgotten
FINISHING_S = 600  # behind its end in time, that what is kept of one may still be there for

_OPEN = "state:background:open"
_WITHOUT_TALK = 2  # of finish()


class Begun(Enum):
    """Whether a response is there from here on."""

    YES = auto()
    STORE_FULL = auto()
    TOO_MANY = auto()  # of the owner's are not over


class Room(Enum):
    """Whether a piece has been written."""

    YES = auto()
    STORE_FULL = auto()
    TOO_LARGE = auto()


_BEGUN = {1: Begun.YES, 0: Begun.STORE_FULL, -1: Begun.TOO_MANY}
_ROOM = {1: Room.YES, 0: Room.STORE_FULL, -1: Room.TOO_LARGE}


@dataclass(frozen=True, slots=True)
class BackgroundLimits:
    """ttl_s: seconds that a response is kept. replay_s: that its events are, once it is over. records, record_bytes: of an owner,
    as of all responses. most_open: of an owner."""

    ttl_s: int
    replay_s: int
    records: int
    record_bytes: int
    most_open: int


class BackgroundStore:
    """lease_s: from the last keep() on. Every method raises StoreAway; write() and finish() LeaseLost."""

    def __init__(self, redis: StateRedis, lease_s: float, limits: BackgroundLimits) -> None:
        self.lease_s = lease_s
        self._redis = redis
        self._leases = Leases(redis, lease_s)
        self._lease_ms = int(lease_s * 1000)
        self._limits = limits

    async def begin(self, lease: Lease, order: BackgroundOrder, content: bytes, prompt: bytes, events: Sequence[bytes]) -> Begun:
        """content: of its record. prompt: as Stored has it. The lease is its caller's from here on."""
        limits = self._limits
        asked = (order.id, order.member, content, order.dumped(), prompt)
        room = (limits.ttl_s, limits.records, limits.record_bytes, limits.most_open, self._lives(order))
        keys = _keys(order.owner, order.id)
        found = await self._redis.call(scripts.BEGIN, keys, lease.token, self._lease_ms, *asked, *room, *events)
        return _BEGUN[found]

    async def write(self, lease: Lease, order: BackgroundOrder, piece: Piece) -> Room:
        """What does not fit is not written."""
        weights = b"" if piece.weights is None else orjson.dumps(list(piece.weights))
        said = (piece.decoded, piece.chars, piece.shown, weights, piece.numerics)
        new = (piece.offset * ID_BYTES, piece.ids, piece.text, piece.logprobs)
        room = (order.id, MAX_BACKGROUND_BYTES, self._limits.record_bytes, self._lives(order))
        keys = _keys(order.owner, order.id)[1:]
        found = await self._leases.write(
            lease, scripts.WRITE, keys, piece.number, piece.status.value, *said, *new, *room, *piece.events
        )
        return _ROOM[found]

    async def finish(
        self, lease: Lease, order: BackgroundOrder, number: int, status: BackgroundStatus, kept: Kept, events: Sequence[bytes]
    ) -> bool:
        """It is over. number: as of a piece. Its record is kept whatever the quota says: it has been answered, and what it is
        made of goes; its conversation where there is room. False: that has changed, and nothing has been written."""
        limits, talk, keys = self._limits, kept.talk, _keys(order.owner, order.id)[1:]
        about = (number, status.value, order.id, order.member, kept.record, limits.ttl_s, limits.replay_s)
        said: tuple[Any, ...] = ("", 0, b"")
        if talk is not None:
            said = (talk.name, talk.version, talk.content)
            keys.append(f"state:of:{order.owner}:{talk.name}")
        found = await self._leases.write(lease, scripts.FINISH, keys, *about, *said, limits.record_bytes, *events, frees=True)
        if found == _WITHOUT_TALK:
            logger.warning("a conversation is not extended: its API key has no room", extra=fields(response=order.id))
        return bool(found)

    async def take(self, owner: str, response_id: str) -> Lease | None:
        """None: somebody else has it, or it is over."""
        lease = new_lease(owner, response_id)
        about = (SURVIVED_S, f"{owner}:{response_id}", response_id)
        found = await self._redis.call(scripts.TAKE, _keys(owner, response_id), lease.token, self._lease_ms, *about)
        return lease if found else None

    async def order(self, lease: Lease, owner: str, response_id: str) -> BackgroundOrder | None:
        """Of what has been taken. None: so many could neither read nor end it that it is to be given up. Raises LeaseLost, and
        ValueError, TypeError or the like where it cannot be read."""
        found = await self._leases.write(lease, scripts.ORDER, _keys(owner, response_id)[1:], GIVEN_UP, frees=True)
        return None if found is None else order_of(found)

    async def give_up(self, lease: Lease, owner: str, response_id: str, record: bytes) -> None:
        """Nothing is left of it but its record, whatever the quota says; empty: as it is. Raises LeaseLost."""
        about = (f"{owner}:{response_id}", response_id, record, self._limits.ttl_s)
        await self._leases.write(lease, scripts.GIVE_UP, _keys(owner, response_id)[1:], *about, frees=True)

    async def keep(self, held: Mapping[Lease, BackgroundOrder]) -> list[Lease]:
        """All for as long again. Returns those that are lost: somebody else has them, or their response is over, or gone."""
        if not held:
            return []
        keys = [key for lease, order in held.items() for key in _keys(order.owner, order.id)[:2]]
        tokens = [lease.token for lease in held]
        kept = await self._redis.call(READS + scripts.KEEP, keys, self._lease_ms, *tokens)
        return [lease for lease, is_kept in zip(held, kept, strict=True) if not is_kept]

    async def seize(self, owner: str, response_id: str) -> Lease | None:
        """It is to be cancelled: by the caller, or by whoever takes it next. None: there is none, or it is over."""
        lease = new_lease(owner, response_id)
        found = await self._redis.call(READS + scripts.SEIZE, _keys(owner, response_id), lease.token, self._lease_ms)
        return lease if found else None

    async def leave(self, lease: Lease, owner: str, response_id: str) -> None:
        """For others to take at once. It is no take that counts: its gateway is well. No effect where somebody has had it since,
        and the second time."""
        await self._redis.call(READS + scripts.LEAVE, _keys(owner, response_id)[:2], lease.token)

    def asked(self, order: BackgroundOrder, prompt: bytes, num_events: int) -> Stored:
        """As begin() will have it."""
        return Stored(order, BackgroundStatus.QUEUED, prompt, False, 1, 0, self._past(order.owner, order.id, Lengths(num_events)))

    async def read(self, owner: str, response_id: str) -> Stored | None:
        """Of one that is not over. What has come of it stays in the store until somebody asks for it."""
        found, events, id_bytes, texts, rows = await self._redis.call(READS + scripts.READ, _keys(owner, response_id))
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
        """None: nothing is known of it beside its record."""
        (_, hash_key, *_) = _keys(owner, response_id)
        found = await self._redis.call(READS + "return redis.call('HGET', KEYS[1], 'status')", [hash_key])
        return None if found is None else BackgroundStatus(found.decode())

    async def follow(self, owner: str, response_id: str, first: int) -> Page | None:
        """Its events from that sequence number on, a page as those of BackgroundPast. None: there are none, or not any more."""
        keys, last = _keys(owner, response_id)[1:3], first + PAGE_ITEMS - 1
        status, total, events = await self._redis.call(READS + scripts.FOLLOW, keys, first, last, PAGE_BYTES)
        return Page(BackgroundStatus(status.decode()), total, events) if status and total else None

    async def delete(self, owner: str, response_id: str) -> bool:
        """Whatever response it is, and whoever is at it. Whether there was one."""
        script, member = READS + scripts.DELETE, f"{owner}:{response_id}"
        return await self._redis.deletes(script, _keys(owner, response_id), "", member, response_id)

    async def free(self, most: int, left: bool = False) -> list[tuple[str, str]]:
        """Owner and id of those that are not over and that nobody has, the oldest first. left: only those that were left."""
        members = await self._redis.call(READS + scripts.FREE, [_OPEN], most, int(left))
        found = [str(each, "ascii").partition(":") for each in members]
        return [(owner, response_id) for owner, _, response_id in found]

    def _lives(self, order: BackgroundOrder) -> int:
        """Seconds."""
        return order.ends_at - order.created_at + FINISHING_S


def new_lease(owner: str, response_id: str) -> Lease:
    """That nobody holds yet."""
    return Lease(f"background:{owner}:{response_id}", secrets.token_hex(16))


def _keys(owner: str, response_id: str) -> list[str]:
    """As all scripts have them."""
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
