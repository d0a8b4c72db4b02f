"""Groups the workers of one model with the choices that wait for them.

A pool copies the state of each worker's link to WorkerColumns, which routing reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.generation.request import ModelInfo, ModelVersion
from rootstock_llm.services.gateway.remote.worker_link import OpenChoice, WorkerLink
from rootstock_llm.services.gateway.routing.fair_queue import FairQueue
from rootstock_llm.services.gateway.routing.policies import (
    HOST_SAVES,
    STORAGE_SAVES,
    Hits,
    Pick,
    Policy,
    RoutingQuery,
    SharingMeter,
    WorkerColumns,
    has_free_slot,
    hits_of,
    pick_prefill,
    speculate,
    usable_reach,
)
from rootstock_llm.services.gateway.routing.prefix_index import PrefixIndex

PREFILL, DECODE = "prefill", "decode"  # WorkerInfo.role
TRIES_ONE_IN = 16  # if reading KV saved no time recently, one request in 16 still reads KV, so that the worker measures again
UNLIMITED = 1 << 20  # number of running requests for a worker that reports no limit
AnyLink: TypeAlias = WorkerLink[Any]
LeaseAlive = Callable[[AnyLink], bool]
OwnerOf = Callable[[AnyLink], int]


def can_read_pages(link: AnyLink, layout: bytes) -> bool:
    """Returns whether the worker of the link can read pages of this layout from other workers."""
    return link.info is not None and link.info.role == DECODE and link.info.kv_layout == layout


def _is_able(info: worker_pb2.WorkerInfo, choice: Candidate) -> bool:
    """Returns whether a worker can serve a choice that may need scores or routed experts."""
    return (info.ends_with_prompt or not choice.is_scored) and choice.experts_per_token in (0, info.routed_experts_per_token)


def _share(value: float) -> float:
    """Returns a fraction that a worker has reported, limited to 0 to 1; 0 for NaN."""
    return min(1.0, max(0.0, value))


class Candidate(OpenChoice, Protocol):
    """A choice for which a pool picks a worker."""

    @property
    def has_begun(self) -> bool:
        """Whether the choice has output."""

    @property
    def model_version(self) -> ModelVersion | None:
        """Model version of the output."""

    @property
    def numerics(self) -> str:
        """Numerics of the output; "" if the worker has not reported any."""

    @property
    def refused_by(self) -> Collection[str]:
        """Addresses of workers that have refused the choice."""

    @property
    def source_layout(self) -> bytes:
        """Layout of the KV pages that a worker reserves for this choice; b"" without reserved pages."""

    @property
    def routing_key(self) -> str: ...

    @property
    def is_scored(self) -> bool:
        """Whether the choice needs a worker that serves scores (WorkerInfo.ends_with_prompt)."""

    @property
    def experts_per_token(self) -> int:
        """Expert ids of a token that the choice needs (WorkerInfo.routed_experts_per_token); 0: it returns no routed experts."""

    def block_hashes(self) -> Sequence[bytes]:
        """Returns the hashes of the prompt's full blocks."""


C = TypeVar("C", bound=Candidate)


class ModelPool(Generic[C]):
    """Owns the routing columns and the waiting choices of one model. Runs on the event loop."""

    def __init__(
        self,
        model: ModelInfo,
        policy: Policy,
        index: PrefixIndex | None,
        queue: FairQueue[C],
        lease_alive: LeaseAlive,
        owner_of: OwnerOf,
        slack: float,
    ) -> None:
        """Makes a pool without workers.

        Args:
            index: None if the policy uses no prefixes.
            lease_alive: Returns whether a link's worker has a valid lease, or does not need a lease.
            owner_of: Returns the owner number of a link's worker in the index, or -1 if it is not in the index.
            slack: Requests that a worker may queue, as a share of the requests that it can run at once; at least 2 requests.
        """
        self.model = model
        self.columns = WorkerColumns()
        self.links: dict[int, WorkerLink[C]] = {}  # by row
        self._rows: dict[AnyLink, int] = {}
        self.queue = queue  # choices that wait for a free slot
        self.moved: dict[C, None] = {}  # choices whose worker was lost; served before the queue
        self.parked: dict[C, None] = {}  # turns of sessions whose worker is not connected
        self.pumping = False  # waiting choices are placed in the event loop's next iteration
        self._policy = policy
        self._index = index
        self._lease_alive = lease_alive
        self._owner_of = owner_of
        self._slack = slack
        self._uses_leases = True  # False while no worker has a lease; Redis has then failed rather than all workers
        self._uses_breakers = True  # False while the breakers would exclude all workers
        self._slow_pulls = 0  # number of requests whose decode worker reports that reading pages saves no time
        self._slow_tier_hits = 0  # number of requests with blocks in a tier that saves no time
        self._had_decode_worker = False  # whether a worker that is no prefill worker has ever joined
        self._prefill: set[int] = set()  # rows of prefill workers
        self._loads: dict[int, worker_pb2.WorkerLoad] = {}  # last load of each row that was copied to the columns
        self._refusing: set[int] = set()  # rows of workers that take only requests with output
        self._picks = 0  # number of submits
        self._sharing = SharingMeter()

    @property
    def num_waiting(self) -> int:
        return len(self.queue) + len(self.moved)

    @property
    def wants_hashes(self) -> bool:
        """Whether routing uses the hashes of a prompt's blocks."""
        return self._index is not None and len(self.links) > 1

    def row_of(self, link: AnyLink) -> int:
        """Returns the row of a joined link in the routing columns."""
        return self._rows[link]

    def usable(self) -> list[WorkerLink[C]]:
        return [self.links[row] for row in np.flatnonzero(self.columns.usable).tolist()]

    def session_links(self) -> list[WorkerLink[C]]:
        """Returns the links of workers that may have sessions, including workers that refuse new requests.

        Prefill workers have no sessions, unless all workers that have ever joined are prefill workers.
        """
        if not self._had_decode_worker:
            return list(self.links.values())
        return [link for row, link in self.links.items() if row not in self._prefill]

    @property
    def paused(self) -> bool:
        """Whether at least one worker takes no requests only because it is paused."""
        return any(link.paused and link.ready and not link.draining for link in self.links.values())

    @property
    def refuses_new(self) -> bool:
        """Whether all workers that serve whole requests (prompt and output) refuse new requests now.

        Only workers that are ready and not draining count, also if they are paused. False if no worker counts.
        """
        links = [link for row, link in self.links.items() if self.columns.serves[row] and link.ready and not link.draining]
        return bool(links) and all(link.refuses_new for link in links)

    @property
    def lacks_scores(self) -> bool:
        """Whether the model has workers, and all of them have an older version that does not serve scores."""
        return bool(self.links) and not any(link.info is not None and link.info.ends_with_prompt for link in self.links.values())

    def join(self, link: WorkerLink[C], now: float) -> None:
        info = link.info
        assert info is not None
        mark = int.from_bytes(blake2b(info.worker_id.encode(), digest_size=8).digest())
        self._rows[link] = row = self.columns.add(info.worker_id, mark)
        self.links[row] = link
        self.renew(link, now)

    def renew(self, link: AnyLink, now: float) -> None:
        """Updates the columns from the worker's new hello."""
        info, row = link.info, self._rows[link]
        assert info is not None
        running = info.max_running_requests or UNLIMITED
        self.columns.running[row] = running
        self.columns.limit[row] = running + max(2, round(running * self._slack))
        self.columns.end_pages[row] = info.page_size if info.marks_hit_ends else 0
        self.columns.loras[row] = frozenset(info.loras)
        self._loads.pop(row, None)  # the load does not overwrite the adapters of the newer hello
        if info.role == PREFILL:
            self._prefill.add(row)
        else:
            self._prefill.discard(row)
            self._had_decode_worker = True
        self.refresh(link, now)

    def leave(self, link: AnyLink) -> None:
        row = self._rows.pop(link)
        self.columns.drop(row)
        del self.links[row]
        self._prefill.discard(row)
        self._refusing.discard(row)
        self._loads.pop(row, None)
        self._update_serves()

    def refresh_all(self, now: float) -> None:
        links = [link for link in self.links.values() if link.ready and not link.draining and not link.paused]
        leased = [link for link in links if self._lease_alive(link)]
        self._uses_leases = bool(leased)
        self._uses_breakers = any(link.breaker.allows(now) for link in leased or links)
        for link in self.links.values():
            self._update_row(link, now)
        self._update_serves()

    def refresh(self, link: AnyLink, now: float) -> None:
        """Updates the columns after a change of a link that has joined."""
        self._update_row(link, now)
        self._update_serves()

    def _update_row(self, link: AnyLink, now: float) -> None:
        columns, row = self.columns, self._rows[link]
        leased = not self._uses_leases or self._lease_alive(link)
        trusted = not self._uses_breakers or link.breaker.allows(now)
        columns.usable[row] = link.ready and not link.draining and not link.paused and leased and trusted
        load = link.load
        if load is not None and load is not self._loads.get(row):
            self._loads[row] = load
            columns.loras[row] = frozenset(load.loras)
            columns.host_saves[row] = _share(load.host_saves) if load.HasField("host_saves") else HOST_SAVES
            columns.storage_saves[row] = _share(load.storage_saves) if load.HasField("storage_saves") else STORAGE_SAVES
        if link.refuses_new:
            self._refusing.add(row)
        else:
            self._refusing.discard(row)
        columns.owner[row] = self._owner_of(link)
        if link.full_until <= now:
            link.full_until = 0.0
        self._update_load(link)

    def _update_serves(self) -> None:
        """Lets a prefill worker serve whole requests if no usable worker of another role has its model version."""
        if not self._prefill:
            return
        usable = np.flatnonzero(self.columns.usable).tolist()
        others = {self.links[row].model_version for row in usable if row not in self._prefill}
        for row in self._prefill:
            self.columns.serves[row] = self.links[row].model_version not in others

    def _update_load(self, link: AnyLink) -> None:
        """Sets a worker's requests and tokens: those of this gateway, plus those of other gateways in the last load report.

        A choice whose pages the worker prefetches counts as a request, so that no other choice takes its slot.
        """
        load, requests, tokens = link.load, len(link.open), link.open_tokens + link.prefetch_tokens
        if load is not None and load.num_open > load.num_open_here:
            others = load.num_open - load.num_open_here
            requests += others
            tokens += load.used_tokens * others // load.num_open
        columns, row = self.columns, self._rows[link]
        least = int(columns.limit[row]) if link.full_until else 0
        columns.requests[row] = max(requests + link.num_prefetches, least)
        columns.prefetches[row] = columns.requests[row] - max(requests, least)
        columns.tokens[row] = tokens

    def recount(self, link: AnyLink) -> None:
        """Updates requests and tokens after a change of the link's prefetches. Has no effect if the link has left the pool."""
        if link in self._rows:
            self._update_load(link)

    def has_free_slot(self, begun: bool = False) -> bool:
        """Returns whether at least one worker that takes requests has a free slot.

        Args:
            begun: Whether the slot is for a request with output. Some workers refuse only requests without output.
        """
        return has_free_slot(RoutingQuery(0, allowed=None if begun else self._takes_new()), self.columns)

    def _takes_new(self) -> NDArray[np.bool_] | None:
        """Returns bool[capacity]: False for workers that refuse new requests. None if no worker refuses them."""
        if not self._refusing:
            return None
        takes = np.ones(self.columns.capacity, np.bool_)
        takes[list(self._refusing)] = False
        return takes

    def pick(self, choice: C, now: float, without: AnyLink | None = None) -> Pick | None:
        """Picks a worker other than `without`. Returns None if no worker that may get the request has a free slot."""
        if not self.has_free_slot(choice.has_begun):
            return None
        return self._policy.pick(self._query(choice, now, self._allowed(choice, without), decides=True), self.columns)

    def pick_at(self, link: AnyLink, choice: C, now: float) -> Pick | None:
        """Picks the worker of `link`. Returns None if this worker has no free slot, or may not get the request."""
        row = self._rows.get(link)
        if row is None or not self.has_free_slot(choice.has_begun):
            return None
        allowed = self._allowed(choice, None)
        only = np.zeros(self.columns.capacity, np.bool_)
        only[row] = allowed is None or allowed[row]
        return self._policy.pick(self._query(choice, now, only), self.columns)

    def pick_reader(self, choice: C, now: float, prefill: AnyLink) -> Pick | None:
        """Picks the decode worker that reads the pages of a prompt while the worker of `prefill` computes it.

        Returns:
            None if no worker that can read the pages has a free slot.
        """
        info = prefill.info
        if info is None or prefill.model_version != choice.model_version:
            return None
        allowed = self._same_numerics(choice)
        for row, link in self.links.items():
            allowed[row] &= can_read_pages(link, info.kv_layout)
        return self._policy.pick(self._query(choice, now, allowed), self.columns)

    def takes(self, link: WorkerLink[C], choice: C) -> bool:
        """Returns whether a worker may continue a request whose pages it has prefetched, and has a slot for this request."""
        row = self._rows.get(link)
        if row is None or not self.columns.takes[row] or not self._same_weights(choice)[row]:
            return False
        return bool(self.columns.requests[row] <= self.columns.limit[row])

    def pick_prefill(self, choice: C, now: float, decode: Pick, min_tokens: int, without: AnyLink | None = None) -> Pick | None:
        """Picks the prefill worker for a request (routing/policies.py).

        Args:
            decode: The decode worker that was picked for the request.
            min_tokens: Smallest number of uncached prompt tokens that a prefill worker computes.
            without: A worker that must not get the request.

        Returns:
            None if the decode worker computes the prompt itself.
        """
        link = self.links[decode.row]
        if not self._prefill or choice.num_tokens < min_tokens or link.info is None or link.info.role != DECODE:
            return None
        allowed = self._prefill_workers_for(link, link.info, choice)
        if without is not None and without in self._rows:
            allowed[self._rows[without]] = False
        query = self._query(choice, now, allowed)
        pick = pick_prefill(self._policy, self.columns, query, decode, min_tokens)
        return pick if pick is not None and self._should_read_pages(link) else None

    def _should_read_pages(self, decode: WorkerLink[C]) -> bool:
        """Returns whether a decode worker should read pages from a prefill worker.

        If reading has saved no time at this worker, only one request in TRIES_ONE_IN reads pages, for a new measurement.
        """
        if decode.load is None or not decode.load.pulls_lose:
            return True
        self._slow_pulls += 1
        return self._slow_pulls % TRIES_ONE_IN == 0

    def _prefill_workers_for(self, decode: WorkerLink[C], mine: worker_pb2.WorkerInfo, choice: C) -> NDArray[np.bool_]:
        """Returns bool[capacity]: workers that can compute the prompt of a choice for a decode worker.

        These workers have the same model version and page layout as `decode`, and take new requests. `mine` is the hello of the
        decode worker.
        """
        allowed = np.zeros(self.columns.capacity, np.bool_)
        for row, link in self.links.items():
            info = link.info
            if info is not None and info.kv_port and link.address not in choice.refused_by and not link.refuses_new:
                allowed[row] = link.model_version == decode.model_version and info.kv_layout == mine.kv_layout
        return allowed

    def _query(self, choice: C, now: float, allowed: NDArray[np.bool_] | None, decides: bool = False) -> RoutingQuery:
        """Returns the query to the policy.

        Args:
            decides: True for only one query per request. This query also updates the statistics.
        """
        matched, saved, first_block = None, None, b""
        if self._index is not None and self.wants_hashes:
            self._index.expire(now)
            blocks = choice.block_hashes()
            reach = self._index.reach(blocks)
            if blocks and decides:
                self._sharing.decided(bool(reach.any()))
            if blocks:
                first_block = blocks[0] if self._sharing.is_shared else b""
            hits = self._hits(usable_reach(reach, self._index, self.columns, blocks), decides)
            matched, saved = hits.matched, hits.saved
        return RoutingQuery(choice.num_tokens, matched, choice.routing_key, allowed=allowed, first_block=first_block, saved=saved)

    def _hits(self, reach: NDArray[np.int64], decides: bool) -> Hits:
        """Returns the prefix hits of each worker.

        If reading a tier saves no time, one request in TRIES_ONE_IN still counts the hits in this tier, because workers measure
        the saving only while they read.
        """
        columns = self.columns
        hits = hits_of(reach, columns)
        if decides and len(reach) > 1 and ((columns.owner >= 0) & (columns.host_saves * columns.storage_saves <= 0)).any():
            tried = hits_of(reach, columns, tries=True)
            if (tried.matched > hits.matched).any():
                self._slow_tier_hits += 1
                return tried if self._slow_tier_hits % TRIES_ONE_IN == 0 else hits
        return hits

    def record_pick(self, choice: C, link: AnyLink, until: float) -> None:
        """Records that a request goes to a worker. Adds the prompt's blocks as speculative blocks until loop time `until`."""
        self._picks += 1
        row = self._rows[link]
        self.columns.last_pick[row] = self._picks
        owner = int(self.columns.owner[row])
        if self._index is not None and self.wants_hashes and owner >= 0:
            speculate(self._index, self.columns, row, choice.block_hashes(), choice.num_tokens, until)

    def _allowed(self, choice: C, without: AnyLink | None) -> NDArray[np.bool_] | None:
        if choice.has_begun:
            return self._prefer_readers(choice, self._same_numerics(choice))
        able, new = self._able(choice), self._takes_new()
        if able is not None and new is not None:
            able &= new
        elif able is None:
            able = new
        if not choice.refused_by and without is None:
            return able
        allowed = np.ones(self.columns.capacity, np.bool_) if able is None else able.copy()
        for row, link in self.links.items():
            allowed[row] &= link is not without and link.address not in choice.refused_by
        if without is None and not (allowed & self.columns.takes).any():
            return able  # all workers have refused the request, so all may get it a second time
        return allowed

    def _able(self, choice: C) -> NDArray[np.bool_] | None:
        """Returns bool[capacity]: workers that can serve a request for a score or for routed experts.

        Workers of older versions serve no scores, and workers without enable_return_routed_experts return no routed experts.

        Returns:
            None for other requests, which every worker can serve.
        """
        if not (choice.is_scored or choice.experts_per_token):
            return None
        able = np.zeros(self.columns.capacity, np.bool_)
        for row, link in self.links.items():
            able[row] = link.info is not None and _is_able(link.info, choice)
        return able

    def _prefer_readers(self, choice: C, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns bool[capacity]: the allowed workers that can read the request's reserved pages.

        Returns all allowed workers if no worker that can read the pages takes requests, or if the request has no reserved pages.
        """
        if not choice.source_layout:
            return allowed
        readers = allowed.copy()
        for row, link in self.links.items():
            readers[row] &= can_read_pages(link, choice.source_layout)
        return readers if (readers & self.columns.takes).any() else allowed

    def _same_numerics(self, choice: C) -> NDArray[np.bool_]:
        """Returns bool[capacity]: the workers with the model version and the numerics of a begun request.

        If none of these workers takes requests, returns all workers with the model version.
        """
        allowed = self._same_weights(choice)
        if not choice.numerics:
            return allowed
        same = allowed.copy()
        for row, link in self.links.items():
            same[row] &= link.info is not None and link.info.numerics == choice.numerics
        return same if (same & self.columns.takes).any() else allowed

    def _same_weights(self, choice: C) -> NDArray[np.bool_]:
        """Returns bool[capacity]: workers that have the model version of a begun request and can serve the rest of it.

        During a rollout, workers of a model may differ in the version, in the context length and in their settings.
        """
        allowed = np.zeros(self.columns.capacity, np.bool_)
        for row, link in self.links.items():
            fits = link.info is not None and choice.num_tokens < link.info.context_len and _is_able(link.info, choice)
            allowed[row] = fits and link.model_version == choice.model_version
        return allowed

    def is_paused_for(self, choice: C) -> bool:
        """Returns whether a paused worker has the model version of a begun request."""
        return any(link.paused and link.model_version == choice.model_version for link in self.links.values())

    def can_continue(self, choice: C) -> bool:
        """Returns whether a worker that takes requests can continue a begun request."""
        return bool((self._same_weights(choice) & self.columns.takes).any())
