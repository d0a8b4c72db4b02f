"""The prefix index in Redis as workers write it and gateways read it (docs/fleet.md#the-index): key names and the event's form.

    kv:{MODEL}:v1:b:HASH   hash   field WORKER:GEN, value "": that worker holds the block
    own:WORKER:GEN         set    the hashes that this generation of the worker holds: the reverse index
    gens:WORKER            set    generations of the worker that may have an own: set
    workers:{MODEL}        set    workers that may have a gens: set
    lease:WORKER           string the worker's current generation; gone LEASE_TTL_S after the worker is
    ev:{MODEL}             stream one entry per batch of changes; trimmed to about EVENTS_KEPT

Hashes are 8 raw bytes everywhere but in key names, where they are hex. Nothing ever scans the keyspace: whoever wants to know
what a generation holds reads its own: set. A generation is random at every start and changes whenever the cache is flushed or
Redis has lost something, so that one new lease makes all of a worker's older entries void.

Events of one generation are numbered from 1 without gaps. Event 1 is always `cleared`: what follows is all there is. A reader
that sees a gap, or a generation from its middle, reads the own: set instead, and goes on from the event's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from services.shared.index.block_hash import HASH_BYTES

INDEX_FORMAT = "v1"
LEASE_TTL_S = 10
RENEW_S = 3.0
EVENTS_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """`removed` holds after `stored`; a hash is in one of them at most. cleared: everything older of the worker is void."""

    worker: str
    generation: int
    seq: int
    cleared: bool
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]

    def fields(self) -> dict[bytes, bytes]:
        """As a stream entry."""
        return {
            b"worker": self.worker.encode(),
            b"gen": str(self.generation).encode(),
            b"seq": str(self.seq).encode(),
            b"cleared": b"1" if self.cleared else b"0",
            b"stored": b"".join(self.stored),
            b"removed": b"".join(self.removed),
        }


def event_from(fields: Mapping[bytes, bytes]) -> IndexEvent:
    """Raises ValueError for anything that is no event."""
    try:
        return IndexEvent(
            fields[b"worker"].decode(),
            int(fields[b"gen"]),
            int(fields[b"seq"]),
            fields[b"cleared"] == b"1",
            tuple(split_hashes(fields[b"stored"])),
            tuple(split_hashes(fields[b"removed"])),
        )
    except KeyError as error:
        raise ValueError(f"the event has no field {error}") from None


def split_hashes(joined: bytes) -> Iterator[bytes]:
    """Raises ValueError if it is not whole hashes."""
    if len(joined) % HASH_BYTES:
        raise ValueError("not a whole number of hashes")
    return (joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))


def block_key(model: str, block: bytes) -> str:
    return f"kv:{{{model}}}:{INDEX_FORMAT}:b:{block.hex()}"


def owner_field(worker: str, generation: int) -> str:
    return f"{worker}:{generation}"


def own_key(worker: str, generation: int) -> str:
    return f"own:{worker}:{generation}"


def generations_key(worker: str) -> str:
    return f"gens:{worker}"


def workers_key(model: str) -> str:
    return f"workers:{{{model}}}"


def lease_key(worker: str) -> str:
    return f"lease:{worker}"


def events_key(model: str) -> str:
    return f"ev:{{{model}}}"
