"""The prefix index: the hashes of token blocks, the names of the keys in Redis and the form of events. No I/O.

Workers write the index, gateways read it. The hash of a block includes the hash of the block before it. The first block is
chained to a root hash of everything that makes equal tokens give different KV: model, revision, tokenizer, adapter
and cache salt. The index alone does not reveal token ids. Incomplete blocks have no hash.

| key | type | content |
| --- | --- | --- |
| kv:{MODEL}:v1:b:HASH | hash | field WORKER:GEN, value "": this worker has the block on its device |
| own:WORKER:GEN | set | hashes that this generation of the worker has on its device (the reverse index) |
| own:WORKER:GEN:TIER | set | hashes in a lower tier, host or storage; expires BELOW_TTL_S after the worker ends |
| gens:WORKER | set | generations of the worker that may have an own: set |
| workers:{MODEL} | set | workers that may have a gens: set |
| lease:WORKER | string | the worker's current generation; expires LEASE_TTL_S after the worker ends |
| models | set | models whose workers may have left entries |
| ev:{MODEL} | stream | one entry per batch of changes; trimmed to about EVENTS_KEPT entries |

A hash is 8 raw bytes in values and hexadecimal in key names. No code scans the keyspace: the own: sets list the blocks.
A worker draws a random generation at its start, after a flush of its cache, and after a loss of data in Redis. A lease with a new
generation invalidates all older entries of the worker.

The events of a generation are numbered from 1 without gaps. Event 1 always has `cleared` set; it and later events list the blocks
of the generation. A reader that misses an event, or that starts in the middle of a generation, reads the own: sets. It then
continues after the number of the event that it has just received.

With windowed or recurrent layers, a prefix hit needs the windows and states that the next token reads. A worker has them for few
page ends, so a hit can end only there. For each of these page ends, the worker also publishes the mark of the last block before
it. The mark is a hash made from the block's hash (end_mark()), and it is handled like a block. Readers of older versions never
look up a mark.

A reader of an older version that does not know tiers sees only blocks on devices. A block that moves to the host is in `removed`
and in `host` of the same event. Entries of lower tiers have their own keys, which expire if an old sweeper does not delete them.
See docs/design/fleet.md#the-index.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

INDEX_VERSION = "1"  # part of each root hash
BLOCK_TOKENS = 64
END_MARK = b"end"  # hashed in place of tokens for a mark; shorter than the tokens of a block, so that no mark is a block hash
HASH_BYTES = 8  # xxh3
INDEX_FORMAT = "v1"  # part of the keys of blocks
MODELS_KEY = "models"
LEASE_TTL_S = 10  # seconds from the last renewal of a lease to its expiry
RENEW_S = 3.0  # pause between two renewals of a lease
EVENTS_KEPT = 10_000  # approximate number of entries to which a stream is trimmed
BELOW_TTL_S = 300  # seconds from the end of a worker to the expiry of its entries of lower tiers


def cache_namespace(lora: str, salt: str) -> str:
    """Returns the cache namespace of an adapter and a cache salt. Requests share KV only within one namespace.

    Different pairs give different namespaces. Without an adapter and a salt, the namespace is "".
    """
    return f"{len(lora)}:{lora}{salt}" if lora or salt else ""


def salt_of(namespace: str) -> str:
    """Returns the cache salt in a result of cache_namespace()."""
    length, _, rest = namespace.partition(":")
    return rest[int(length) :] if namespace else ""


def root_hash(model: str, revision: str, tokenizer: str, namespace: str) -> bytes:
    """Returns the hash to which the first block of a prompt is chained, HASH_BYTES long.

    Args:
        namespace: adapter and cache salt, as cache_namespace() joins them.
    """
    chain = xxhash.xxh3_64()
    for part in (INDEX_VERSION, model, revision, tokenizer, namespace):
        data = part.encode()
        chain.update(len(data).to_bytes(4, "little"))
        chain.update(data)
    return chain.digest()


def block_hash(before: bytes, tokens: bytes) -> bytes:
    """Returns the hash of a block, HASH_BYTES long.

    Args:
        before: hash of the block before, or the root hash.
        tokens: BLOCK_TOKENS token ids as little-endian int32.
    """
    return xxhash.xxh3_64_digest(before + tokens)


def end_mark(block: bytes) -> bytes:
    """Returns the mark of a block after which a prefix hit can end, HASH_BYTES long. `block` is the block's hash."""
    return block_hash(block, END_MARK)


def block_hashes(root: bytes, ids: Sequence[int]) -> bytes:
    """Returns the concatenated hashes of all full blocks of a prompt."""
    tokens = np.asarray(ids, dtype=np.uint32).astype("<i4", copy=False).tobytes()
    size = BLOCK_TOKENS * 4
    hashes, last = [], root
    for at in range(0, len(tokens) - size + 1, size):
        last = xxhash.xxh3_64_digest(last + tokens[at : at + size])
        hashes.append(last)
    return b"".join(hashes)


class BlockTier(enum.IntEnum):
    """The tier of a block: the tier of its slowest page. A smaller value is faster. The names are part of Redis keys."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """A batch of changes of the blocks that one worker caches, applied in the order stored, removed, host, storage.

    A hash is in at most one of these four lists. Exception: if a block moves from the device to a lower tier, its hash is also in
    `removed`.
    """

    worker: str  # worker id
    generation: int  # generation of the worker's entries, see the module docstring
    seq: int  # number of the event in its generation, from 1
    cleared: bool  # whether this event voids all older entries of the worker
    stored: tuple[bytes, ...]  # now on the device
    removed: tuple[bytes, ...]  # removed from the tier in which the worker had it
    host: tuple[bytes, ...] = ()  # now on the host
    storage: tuple[bytes, ...] = ()  # now in the storage tier

    @property
    def num_blocks(self) -> int:
        return len(self.stored) + len(self.removed) + len(self.host) + len(self.storage)

    def fields(self) -> dict[bytes, bytes]:
        """Returns the fields of the Redis stream entry for this event."""
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
    """Parses a stream entry. Raises ValueError if it is not an event."""
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
    """Yields the hashes in a field of a stream entry. Raises ValueError if its length is not a multiple of HASH_BYTES."""
    if len(joined) % HASH_BYTES:
        raise ValueError(f"a field of hashes has {len(joined)} bytes, not a multiple of {HASH_BYTES}")
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
