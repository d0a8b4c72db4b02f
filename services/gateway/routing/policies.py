"""The routing policies, which choose a worker for a request. Their input is the worker columns and a query. The code does no I/O.

WorkerColumns has the workers as parallel arrays with one row per worker. Only the dispatcher writes it. The load of a worker is
the number of its open requests, divided by the number of requests that it can run at once. So the loads of large and small
workers are comparable. Routing has three steps:

1. The filters return the rows of ready workers with free slots. They prefer workers that have loaded the request's adapter.
2. The policy chooses one of these rows and gives the reason.
3. If workers have roles, pick_prefill() decides whether a prefill worker computes the prompt for the chosen worker, and which
   one (docs/design/prefill-and-decode.md).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.gateway.routing.config import RoutingConfig, RoutingPolicy
from rootstock_llm.services.gateway.routing.prefix_index import PrefixIndex
from rootstock_llm.services.shared.index.prefix_index import BLOCK_TOKENS, BlockTier, end_mark

# A prefill worker with more queued prompt tokens gets no prompt: waiting there would take longer than computing the prompt at the
# decode worker.
MOST_QUEUED_TOKENS = 1 << 15
REASONS = (  # values of Pick.reason, which is a label of the metric routing_decisions
    "round_robin",
    "random",
    "least_requests",
    "least_tokens",
    "power_of_two",
    "affinity",
    "affinity_overflow",
    "prefix",
    "prefix_overflow",
    "no_match",
    "load_gate",
)
_FIRST_ROWS = 8  # capacity of WorkerColumns after the first worker; doubles when all rows are used
_METER_DECISIONS = 32  # approximate number of decisions in the average of a SharingMeter
_SHARING_SHARE = 0.1  # smallest share of decisions with a match for which prompts count as sharing prefixes
TRIED_SAVES = 0.1  # assumed saving of a tier that is tried again although it saved nothing recently
HOST_SAVES, STORAGE_SAVES = 0.8, 0.5  # defaults of host_saves and storage_saves until a worker reports measured values
_COUNTS = ("requests", "prefetches", "tokens", "limit", "running", "last_pick", "end_pages")
_SAVES = ("host_saves", "storage_saves")
Rows = NDArray[np.int64]  # rows of WorkerColumns, rising


class WorkerColumns:
    """The workers of one model, as arrays of `capacity` rows.

    Only rows with `used` have a meaning. A worker has the same row until drop().
    """

    def __init__(self) -> None:
        self.ids: list[str] = []  # worker id; "" in unused rows
        self.loras: list[frozenset[str]] = []  # names of the adapters that the worker has loaded
        self.used = np.zeros(0, np.bool_)  # the row belongs to a worker
        self.usable = np.zeros(0, np.bool_)  # the worker may get new requests
        # The worker serves whole requests (prompt and output). A prefill worker does so only if no usable worker of another role
        # has its model version.
        self.serves = np.zeros(0, np.bool_)
        self.requests = np.zeros(0, np.int64)  # open requests of all gateways, plus `prefetches`
        self.prefetches = np.zeros(0, np.int64)  # requests at prefill workers whose pages this decode worker prefetches
        self.tokens = np.zeros(0, np.int64)  # prompt and output tokens of `requests`
        self.limit = np.zeros(0, np.int64)  # if `requests` reaches this number, new requests wait in the gateway
        self.running = np.zeros(0, np.int64)  # number of requests that the worker can run at once
        self.owner = np.full(0, -1, np.int64)  # owner number in the PrefixIndex; -1 for none
        # Page size of a worker that marks the blocks after which a prefix hit can end; 0 if a hit can end after any block.
        self.end_pages = np.zeros(0, np.int64)
        # Share of a prefix's computing time that is saved by reading the prefix from the host or storage tier, 0 to 1.
        self.host_saves = np.zeros(0, np.float64)
        self.storage_saves = np.zeros(0, np.float64)
        self.last_pick = np.zeros(0, np.int64)  # sequence number of the worker's last pick, over all workers; 0: never picked
        self.key = np.zeros(0, np.uint64)  # hash of the worker id for rendezvous hashing

    @property
    def takes(self) -> NDArray[np.bool_]:
        """bool[capacity]: whether the worker takes new whole requests."""
        return self.used & self.usable & self.serves

    @property
    def capacity(self) -> int:
        return len(self.ids)

    def add(self, worker_id: str, key: int) -> int:
        """Assigns a row to a worker and returns it. The row has default values; `usable` is False.

        Args:
            key: Hash of the worker id.
        """
        free = np.flatnonzero(~self.used)
        if not len(free):
            self._grow()
            return self.add(worker_id, key)
        row = int(free[0])
        for name in ("usable", *_COUNTS):
            getattr(self, name)[row] = 0
        self.ids[row], self.loras[row] = worker_id, frozenset()
        self.used[row], self.owner[row], self.key[row] = True, -1, key
        self.serves[row] = True
        self.host_saves[row], self.storage_saves[row] = HOST_SAVES, STORAGE_SAVES
        return row

    def drop(self, row: int) -> None:
        self.used[row] = self.usable[row] = False
        self.ids[row], self.loras[row], self.owner[row] = "", frozenset(), -1

    def _grow(self) -> None:
        more = max(_FIRST_ROWS, self.capacity)
        self.ids += [""] * more
        self.loras += [frozenset()] * more
        for name in ("used", "usable", "serves", *_COUNTS, "key", *_SAVES):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(more, old.dtype)]))
        self.owner = np.concatenate([self.owner, np.full(more, -1, np.int64)])


@dataclass(frozen=True, slots=True)
class RoutingQuery:
    """A request to place, as the policies see it."""

    prompt_tokens: int
    matched: NDArray[np.int64] | None = None  # int64[capacity]: prompt tokens cached at each worker; None: unknown
    key: str = ""  # routing key; "" for none
    lora: str = ""  # name of the adapter that the request needs; "" for none
    allowed: NDArray[np.bool_] | None = None  # bool[capacity]: workers to choose from, or None for all
    # Hash of the prompt's first block. b"" if the prompt has no whole block, if the policy uses no prefix index, or if
    # SharingMeter.is_shared is False.
    first_block: bytes = b""
    prefill: bool = False  # the query is for a prefill worker that computes only the prompt
    saved: NDArray[np.float64] | None = None  # Hits.saved; None: equals `matched`


@dataclass(frozen=True, slots=True)
class Pick:
    """A chosen worker."""

    row: int
    reason: str  # one of REASONS
    predicted_tokens: int  # prompt tokens that the worker is expected to have cached


def running_slots(rows: Rows, workers: WorkerColumns) -> NDArray[np.int64]:
    return np.maximum(workers.running[rows], 1)


def relative_load(rows: Rows, workers: WorkerColumns) -> NDArray[np.float64]:
    """Returns float64[rows]: a worker's open requests, divided by the number of requests that it can run at once."""
    return workers.requests[rows] / running_slots(rows, workers)


def least(rows: Rows, cost: NDArray[np.float64], workers: WorkerColumns) -> int:
    """Returns the row with the least cost. Of equal rows, the one with the fewest requests, then with the oldest pick."""
    rows = rows[cost == cost.min()]
    for column in (workers.requests, workers.last_pick):
        if len(rows) == 1:
            break
        values = column[rows]
        rows = rows[values == values.min()]
    return int(rows[0])


def over_gate(rows: Rows, ready: Rows, workers: WorkerColumns, config: RoutingConfig) -> NDArray[np.bool_]:
    """Returns bool[rows]: whether a worker's load exceeds the least load of `ready` by more than the gate allows.

    Loads are scaled by the mean number of slots. If all workers have the same number of slots, a scaled load is a worker's number
    of requests.
    """
    slots = running_slots(ready, workers)
    size = slots.sum() / len(slots)  # numpy's mean() would take as long as the rest of this function
    loads = workers.requests[ready] / slots
    idlest = loads.min() * size
    requests = (loads if rows is ready else relative_load(rows, workers)) * size
    return np.asarray((requests - idlest > config.gate_abs) & (requests > config.gate_rel * idlest))


def load_over_mean(rows: Rows, ready: Rows, workers: WorkerColumns, config: RoutingConfig) -> NDArray[np.float64]:
    """Returns float64[rows]: the load that each worker would have with the new request, in units of the mean load of `ready`.

    The mean load is the number of all requests, including the new one, divided by the number of all slots. The number of all
    requests counts as at least config.load_floor times the number of workers.
    """
    mean = max(int(workers.requests[ready].sum()) + 1, config.load_floor * len(ready)) / running_slots(ready, workers).sum()
    return np.asarray((workers.requests[rows] + 1) / running_slots(rows, workers) / mean)


def near_idlest(rows: Rows, workers: WorkerColumns, config: RoutingConfig) -> NDArray[np.bool_]:
    """Returns bool[rows]: whether a worker's load is close to the least load. Loads are scaled as in over_gate()."""
    slots = running_slots(rows, workers)
    requests = workers.requests[rows] / slots * (slots.sum() / len(slots))
    mean = requests.sum() / len(requests)
    return np.asarray(requests <= requests.min() + max(config.near_requests, config.near_rel * mean))


@dataclass(frozen=True, slots=True)
class Hits:
    """The prefix hits of one prompt."""

    matched: NDArray[np.int64]  # int64[capacity]: prompt tokens that each worker has cached and would use
    # float64[capacity]: time that the hits save, as the number of prompt tokens computed in this time. None: equals `matched`.
    saved: NDArray[np.float64] | None


def usable_reach(
    reach: NDArray[np.int64], index: PrefixIndex, workers: WorkerColumns, hashes: Sequence[bytes]
) -> NDArray[np.int64]:
    """Returns `reach`, with the numbers of PrefixIndex.reach_ends() for workers that mark hit ends.

    Args:
        reach: See PrefixIndex.reach().
        hashes: The blocks of the prompt.
    """
    rows = np.flatnonzero((workers.end_pages > 0) & (workers.owner >= 0) & (workers.owner < reach.shape[1]))
    if len(rows):
        owners = workers.owner[rows]
        reach = reach.copy()
        reach[:, owners] = index.reach_ends(hashes)[:, owners]
    return reach


def speculate(
    index: PrefixIndex, workers: WorkerColumns, row: int, hashes: Sequence[bytes], num_tokens: int, until: float
) -> None:
    """Adds a prompt's blocks to the index, as speculative blocks of the worker to which the prompt goes.

    For a worker that marks its blocks, also adds marks at the two positions at which later hits will be able to end: the last
    page end of the prompt, and the end of the leading blocks that the worker already has.

    Args:
        row: Row of the worker. It has an owner.
        num_tokens: Number of tokens of the prompt.
        until: Time at which the blocks end.
    """
    owner, page_size = int(workers.owner[row]), int(workers.end_pages[row])
    names = list(hashes)
    if page_size and names:
        last_end = max(num_tokens - 1, 0) // page_size * page_size  # a hit does not cover the last token
        shared = index.match(hashes)
        ends = {last_end // BLOCK_TOKENS, int(shared[owner]) if owner < len(shared) else 0}
        names += [end_mark(hashes[end - 1]) for end in ends if 0 < end <= len(hashes)]
    index.speculate(owner, names, until)


def hits_of(reach: NDArray[np.int64], workers: WorkerColumns, tries: bool = False) -> Hits:
    """Computes the prefix hits of each worker.

    Blocks in the host or storage tier must be read first, so a hit on them saves only a part of the time of computing them. If
    reading a tier saves no time, the worker uses neither the blocks in that tier nor the blocks after them.

    Args:
        reach: See usable_reach().
        tries: Whether to assume a saving of TRIED_SAVES for tiers that save nothing.
    """
    num_owners = reach.shape[1]
    if not num_owners:
        return Hits(np.zeros(workers.capacity, np.int64), None)
    known = (workers.owner >= 0) & (workers.owner < num_owners)
    tokens = np.where(known, reach[:, np.where(known, workers.owner, 0)], 0) * BLOCK_TOKENS
    device = tokens[BlockTier.DEVICE]
    if len(tokens) == 1:
        return Hits(device, None)
    to_host, to_storage = tokens[BlockTier.HOST], tokens[BlockTier.STORAGE]
    host_saves, storage_saves = workers.host_saves, workers.storage_saves
    if tries:
        host_saves, storage_saves = (np.where(saves > 0, saves, TRIED_SAVES) for saves in (host_saves, storage_saves))
    to_host = np.where(host_saves > 0, to_host, device)
    reads_on = (storage_saves > 0) & (to_host == tokens[BlockTier.HOST])
    to_storage = np.where(reads_on, to_storage, to_host)
    saved = device + (to_host - device) * host_saves + (to_storage - to_host) * storage_saves
    return Hits(to_storage, saved)


class SharingMeter:
    """The share of recent routing decisions with a match, for one model at this gateway.

    If prompts often share prefixes, a new prefix is likely to come again. All gateways therefore send it to the
    same worker. The share begins at 1, because after a cold start, many prompts may arrive before the first match.
    """

    def __init__(self) -> None:
        self._share = 1.0

    @property
    def is_shared(self) -> bool:
        """Whether at least 10 % of the recent decisions had a match, as an exponential average."""
        return self._share >= _SHARING_SHARE

    def decided(self, matched: bool) -> None:
        """Counts a decision. `matched`: whether any worker had cached a prefix of the prompt."""
        self._share += (matched - self._share) / _METER_DECISIONS


def ready_rows(query: RoutingQuery, workers: WorkerColumns) -> Rows:
    """Returns the rows of workers that take new requests and are allowed for this request, even if they are full."""
    ready = workers.used & workers.usable & ~workers.serves if query.prefill else workers.takes
    if query.allowed is not None:
        ready &= query.allowed
    return np.flatnonzero(ready)


def with_free_slots(rows: Rows, workers: WorkerColumns) -> Rows:
    """Returns the rows of workers with free slots."""
    return rows[workers.requests[rows] < workers.limit[rows]]


def rows_with_free_slots(query: RoutingQuery, workers: WorkerColumns) -> Rows:
    """Returns the rows of allowed workers with free slots. Empty if all are full; the request then queues."""
    return with_free_slots(ready_rows(query, workers), workers)


def has_free_slot(query: RoutingQuery, workers: WorkerColumns) -> bool:
    return len(rows_with_free_slots(query, workers)) > 0


def with_adapter(rows: Rows, ready: Rows, query: RoutingQuery, workers: WorkerColumns, config: RoutingConfig) -> Rows:
    """Returns the rows of workers that have loaded the request's adapter.

    Returns all rows if the request has no adapter. Also returns all rows if every worker with the adapter is above the load gate;
    another worker then loads the adapter.
    """
    if not query.lora:
        return rows
    resident = rows[[query.lora in workers.loras[row] for row in rows.tolist()]]
    if len(resident):
        resident = resident[~over_gate(resident, ready, workers, config)]
    return resident if len(resident) else rows


class Policy:
    """A routing policy, made by make_policy().

    Each policy is a method that returns a row and the reason. Arguments of these methods:

    - rows: Rows to choose from. They have free slots. Never empty.
    - ready: Rows of all ready workers, including full workers.
    """

    def __init__(self, choose: Chooser, config: RoutingConfig, rng: random.Random) -> None:
        self._choose, self._config, self._rng = choose, config, rng

    def pick(self, query: RoutingQuery, workers: WorkerColumns) -> Pick | None:
        """Chooses a worker for a request. Does not change the columns; the caller counts the pick.

        Returns:
            None if no ready worker has free slots.
        """
        ready = ready_rows(query, workers)
        rows = with_free_slots(ready, workers)
        if not len(rows):
            return None
        rows = with_adapter(rows, ready, query, workers, self._config)
        row, reason = self._choose(self, query, workers, rows, ready)
        return Pick(row, reason, 0 if query.matched is None else int(query.matched[row]))

    def _round_robin(self, _query: RoutingQuery, workers: WorkerColumns, rows: Rows, _ready: Rows) -> tuple[int, str]:
        return int(rows[workers.last_pick[rows].argmin()]), "round_robin"

    def _random(self, _query: RoutingQuery, _workers: WorkerColumns, rows: Rows, _ready: Rows) -> tuple[int, str]:
        return int(rows[self._rng.randrange(len(rows))]), "random"

    def _least_requests(self, _query: RoutingQuery, workers: WorkerColumns, rows: Rows, _ready: Rows) -> tuple[int, str]:
        return _least_loaded(workers, rows), "least_requests"

    def _least_tokens(self, _query: RoutingQuery, workers: WorkerColumns, rows: Rows, _ready: Rows) -> tuple[int, str]:
        return least(rows, workers.tokens[rows] / running_slots(rows, workers), workers), "least_tokens"

    def _power_of_two(self, _query: RoutingQuery, workers: WorkerColumns, rows: Rows, _ready: Rows) -> tuple[int, str]:
        """Chooses the less loaded of two random workers (Mitzenmacher 2001)."""
        two = np.array(self._rng.sample(range(len(rows)), min(2, len(rows))))
        return _least_loaded(workers, rows[two]), "power_of_two"

    def _affinity(self, query: RoutingQuery, workers: WorkerColumns, rows: Rows, ready: Rows) -> tuple[int, str]:
        if not query.key:
            return self._least_requests(query, workers, rows, ready)
        return _by_routing_key(query.key, workers, rows, ready, over_gate(ready, ready, workers, self._config))

    def _prefix_aware(self, query: RoutingQuery, workers: WorkerColumns, rows: Rows, ready: Rows) -> tuple[int, str]:
        """Chooses the worker with the highest score: Hits.saved / prompt tokens - load_weight x load / mean load.

        - If the load is out of balance, chooses the least loaded worker.
        - If no worker has a match, _without_match() chooses.
        - A match does not count at a worker whose load would be above load_bound x the mean load. So a popular prefix does not
          bring a worker above the bound. The next request with the prefix goes to another worker, which then caches the prefix.
        - Below the bound, a worker that has cached the whole prompt wins against a worker without a match, unless its load is
          higher by at least 1 / load_weight mean loads.
        """
        config = self._config
        if len(ready) > 1 and over_gate(ready, ready, workers, config).any():
            return _least_loaded(workers, rows), "load_gate"
        matched = np.zeros(len(rows), np.int64) if query.matched is None else query.matched[rows]
        matched = np.where(matched >= config.min_match_tokens, matched, 0)
        if not matched.any():
            return self._without_match(query, workers, rows, ready)
        load = load_over_mean(rows, ready, workers, config)
        matched[load > config.load_bound] = 0
        saved = matched if query.saved is None else np.where(matched > 0, query.saved[rows], 0.0)
        score = saved / max(query.prompt_tokens, 1) - config.load_weight * load
        best = least(rows, -score, workers)
        return best, "prefix" if matched[rows == best].any() else "prefix_overflow"

    def _without_match(self, query: RoutingQuery, workers: WorkerColumns, rows: Rows, ready: Rows) -> tuple[int, str]:
        """Chooses a worker for a prompt that no worker has cached.

        A request with a routing key goes to the worker of the routing key, unless this worker's load would exceed load_bound x
        the mean load. So prompts of one user share a cache. For other requests, a hash of the prompt's first block chooses among
        the least loaded workers. So gateways that get the same new prefix at the same time choose the same worker without
        communication.
        """
        config = self._config
        if query.key:
            too_busy = load_over_mean(ready, ready, workers, config) > config.load_bound
            return _by_routing_key(query.key, workers, rows, ready, too_busy)
        if not query.first_block:
            return _least_loaded(workers, rows), "no_match"
        near = rows[near_idlest(rows, workers, config)]
        weights = rendezvous_weights(query.first_block.hex(), workers.key[near])
        return int(near[weights.argmax()]), "no_match"


Chooser = Callable[[Policy, RoutingQuery, WorkerColumns, Rows, Rows], tuple[int, str]]
_CHOOSERS: dict[RoutingPolicy, Chooser] = {
    RoutingPolicy.ROUND_ROBIN: Policy._round_robin,
    RoutingPolicy.RANDOM: Policy._random,
    RoutingPolicy.LEAST_REQUESTS: Policy._least_requests,
    RoutingPolicy.LEAST_TOKENS: Policy._least_tokens,
    RoutingPolicy.POWER_OF_TWO: Policy._power_of_two,
    RoutingPolicy.AFFINITY: Policy._affinity,
    RoutingPolicy.PREFIX_AWARE: Policy._prefix_aware,
}


def make_policy(name: str, config: RoutingConfig, rng: random.Random) -> Policy:
    """Returns the policy with this name, a value of RoutingPolicy. Raises ValueError for other names."""
    return Policy(_CHOOSERS[RoutingPolicy(name)], config, rng)


def _least_loaded(workers: WorkerColumns, rows: Rows) -> int:
    return least(rows, relative_load(rows, workers), workers)


def _by_routing_key(key: str, workers: WorkerColumns, rows: Rows, ready: Rows, too_busy: NDArray[np.bool_]) -> tuple[int, str]:
    """Chooses the highest-ranked worker for the routing key among those that have free slots and are not too busy.

    If all are too busy, chooses the least loaded worker. See "Consistent hashing with bounded loads" (Mirrokni et al. 2018).

    Args:
        too_busy: bool[ready]: workers to avoid.
    """
    first = int(ready[rendezvous_weights(key, workers.key[ready]).argmax()])
    allowed = ready[~too_busy & np.isin(ready, rows, assume_unique=True)]
    if not len(allowed):
        return _least_loaded(workers, rows), "affinity_overflow"
    row = int(allowed[rendezvous_weights(key, workers.key[allowed]).argmax()])
    return row, "affinity" if row == first else "affinity_overflow"


def rendezvous_weights(key: str, worker_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns a uint64 weight per worker (rendezvous hashing, Thaler and Ravishankar 1998).

    The routing key belongs to the worker with the greatest weight. Each routing key has its own order of all workers. If a worker
    is added or removed, only the routing keys of this worker move. The weight is the finalizer of splitmix64, applied to the XOR
    of the worker's hash and the routing key's hash.

    Args:
        key: The routing key; for prompts without one, the hash of the first block in hex.
        worker_keys: uint64 hash of each worker id.
    """
    seed = np.uint64(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little"))
    mixed = worker_keys ^ seed
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def pick_prefill(policy: Policy, columns: WorkerColumns, query: RoutingQuery, decode: Pick, min_tokens: int) -> Pick | None:
    """Chooses the prefill worker that computes a prompt for the chosen decode worker. Does not change the columns.

    Args:
        query: The request. `allowed` has the workers that can exchange pages with the decode worker.
        decode: The chosen decode worker.
        min_tokens: Smallest number of prompt tokens missing in the decode worker's cache for which a prefill worker is used.

    Returns:
        None if the decode worker computes the prompt itself.
    """
    if query.prompt_tokens - decode.predicted_tokens < min_tokens or not _have_decode_slots(columns):
        return None
    short = columns.tokens <= MOST_QUEUED_TOKENS
    allowed = short if query.allowed is None else short & query.allowed
    pick = policy.pick(replace(query, allowed=allowed, prefill=True), columns)
    if pick is None:
        return None
    waits, is_idle = columns.tokens[pick.row] > 0, columns.requests[decode.row] == 0
    return None if waits and is_idle else pick


def _have_decode_slots(columns: WorkerColumns) -> bool:
    """Returns whether the decode workers have free slots for all prompts at prefill workers and for one more.

    A prompt without a free decode slot would only occupy pages of the prefill worker. A prompt whose pages a decode worker
    prefetches counts in the requests of both workers. `prefetches` is therefore subtracted from the decode workers' requests.
    """
    takes = columns.takes
    free_slots = int((columns.limit + columns.prefetches - columns.requests)[takes].sum())
    return int(columns.requests[columns.used & ~columns.serves].sum()) < free_slots
