"""Key names and event form of the prefix index in Redis (docs/design/fleet.md#the-index). Workers write it, gateways read it.

    kv:{MODEL}:v1:b:HASH   hash   field WORKER:GEN, value "": that worker holds the block on its device
    own:WORKER:GEN         set    the hashes that this generation of the worker holds on its device: the reverse index
    own:WORKER:GEN:TIER    set    those that it holds below, TIER is host or storage; gone BELOW_TTL_S after the worker is
    gens:WORKER            set    generations of the worker that may have an own: set
    workers:{MODEL}        set    workers that may have a gens: set
    lease:WORKER           string the worker's current generation; gone LEASE_TTL_S after the worker is
    models                 set    models whose workers may have left something
    ev:{MODEL}             stream one entry per batch of changes; trimmed to about EVENTS_KEPT

Hashes are 8 raw bytes everywhere but in key names, where they are hex. Nothing ever scans the keyspace: whoever wants to know
what a generation holds reads its own: set. A generation is random at every start and changes whenever the cache is flushed or
Redis has lost something, so that one new lease makes all of a worker's older entries void.

Events of one generation are numbered from 1 without gaps. Event 1 is always `cleared`: what follows is all there is. A reader
that sees a gap, or a generation from its middle, reads the own: sets instead, and goes on from the event's number.

Who knows nothing of tiers sees what is on devices and nothing else: a block that goes to the host is removed in the same event
that names it among the host's, and what is below devices has keys of its own, which end by themselves where a sweep of such a
worker leaves them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from services.shared.index.block_hash import HASH_BYTES
from services.shared.index.block_tier import BlockTier

INDEX_FORMAT = "v1"
MODELS_KEY = "models"
LEASE_TTL_S = 10
RENEW_S = 3.0
EVENTS_KEPT = 10_000
BELOW_TTL_S = 300


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """They hold one after the other: stored on the device, removed from wherever the worker had it, host, storage. A hash stands
    in one of them at most, but that one that leaves the device for a tier below is removed, and then there. cleared: everything
    older of the worker is void."""

    worker: str
    generation: int
    seq: int
    cleared: bool
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    host: tuple[bytes, ...] = ()
    storage: tuple[bytes, ...] = ()

    @property
    def num_blocks(self) -> int:
        return len(self.stored) + len(self.removed) + len(self.host) + len(self.storage)

    def fields(self) -> dict[bytes, bytes]:
        """As a stream entry."""
        return {
            b"worker": self.worker.encode(),
            b"gen": str(self.generation).encode(),
            b"seq": str(self.seq).encode(),
            b"cleared": b"1" if self.cleared else b"0",
            b"stored": b"".join(self.stored),
            b"removed": b"".join(self.removed),
            **{name: b"".join(hashes) for name, hashes in ((b"host", self.host), (b"storage", self.storage)) if hashes},
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
            tuple(split_hashes(fields.get(b"host", b""))),
            tuple(split_hashes(fields.get(b"storage", b""))),
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


def own_key(worker: str, generation: int, tier: BlockTier = BlockTier.DEVICE) -> str:
    device = f"own:{worker}:{generation}"
    return device if tier is BlockTier.DEVICE else f"{device}:{tier.name.lower()}"


def generations_key(worker: str) -> str:
    return f"gens:{worker}"


def workers_key(model: str) -> str:
    return f"workers:{{{model}}}"


def lease_key(worker: str) -> str:
    return f"lease:{worker}"


def events_key(model: str) -> str:
    return f"ev:{{{model}}}"
