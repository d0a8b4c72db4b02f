"""The workers of one model as routing sees them, and who waits for one. Keeps the columns true to the links."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rootstock.v1 import worker_pb2
from services.gateway.peers.worker_link import Occupant, WorkerLink
from services.gateway.request.generation import ModelInfo, ModelVersion
from services.gateway.routing.columns import HOST_SAVES, STORAGE_SAVES, Ask, Pick, WorkerColumns
from services.gateway.routing.fair_queue import FairQueue
from services.gateway.routing.policies import Policy, has_room
from services.gateway.routing.prefill import pick_prefill
from services.gateway.routing.prefix_index import PrefixIndex
from services.gateway.routing.sharing import SharingMeter
from services.gateway.routing.tier_hits import Hits, hits_of

PREFILL, DECODE = "prefill", "decode"  # WorkerInfo.role
TRIES_ONE_IN = 16
UNLIMITED = 1 << 20  # requests of a worker that names no limit
AnyLink: TypeAlias = WorkerLink[Any]
LeaseAlive = Callable[[AnyLink], bool]
OwnerOf = Callable[[AnyLink], int]


def reads(link: AnyLink, layout: bytes) -> bool:
    """Whether its worker can read other workers' pages of that layout."""
    return link.info is not None and link.info.role == DECODE and link.info.kv_layout == layout


def _share(value: float) -> float:
    """Within 0 and 1, whatever a worker says: 0 for what is no number."""
    return min(1.0, max(0.0, value))


class Candidate(Occupant, Protocol):
    """What a worker is picked for. model_version, numerics: that it began with, where it has_begun; numerics is "" if that worker
    promised none. refused_by: addresses."""

    @property
    def has_begun(self) -> bool: ...

    @property
    def model_version(self) -> ModelVersion | None: ...

    @property
    def numerics(self) -> str: ...

    @property
    def refused_by(self) -> Collection[str]: ...

    @property
    def source_layout(self) -> bytes:
        """Of pages that another worker has for it; empty: nobody has any."""

    @property
    def routing_key(self) -> str: ...

    @property
    def is_scored(self) -> bool:
        """Whether it needs a worker that serves scores (WorkerInfo.ends_with_prompt)."""

    def block_hashes(self) -> Sequence[bytes]:
        """Returns the names of its prompt's full blocks in the prefix index."""


C = TypeVar("C", bound=Candidate)


class ModelPool(Generic[C]):
    """`queue`: choices that wait for room. `moved`: those that lost their worker and wait for another one, before all others.
    `parked`: turns of sessions whose worker is not connected.

    slack: requests that a worker may have beyond those that it can run, as a share of these. index: None where the policy
    makes no use of it. owner_of: a link's worker's number there, -1 while it has none.
    """

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
        self.model = model
        self.columns = WorkerColumns()
        self.links: dict[int, WorkerLink[C]] = {}  # by row
        self._rows: dict[AnyLink, int] = {}
        self.queue = queue
        self.moved: dict[C, None] = {}
        self.parked: dict[C, None] = {}
        self.pumping = False
        self._policy = policy
        self._index = index
        self._lease_alive = lease_alive
        self._owner_of = owner_of
        self._slack = slack
        self._leases_count = True  # not while no worker at all seems to have one: that is the index's trouble, not theirs
        self._breakers_count = True  # not while they would leave nobody
        self._kept_back = self._passed_over = 0
        self._has_decoded = False  # a worker that serves whole requests has been here
        self._prefill: set[int] = set()  # rows of workers that compute prompts for others
        self._loads: dict[int, worker_pb2.WorkerLoad] = {}  # the load that each row's columns were read from
        self._refusing: set[int] = set()  # rows of workers that take requests with output, and no others
        self._picks = 0
        self._sharing = SharingMeter()

    @property
    def num_waiting(self) -> int:
        return len(self.queue) + len(self.moved)

    @property
    def wants_hashes(self) -> bool:
        """Whether the names of a prompt's blocks would make a difference."""
        return self._index is not None and len(self.links) > 1

    def row_of(self, link: AnyLink) -> int:
        """Of a link that has joined."""
        return self._rows[link]

    def usable(self) -> list[WorkerLink[C]]:
        return [self.links[row] for row in np.flatnonzero(self.columns.usable).tolist()]

    def homes(self) -> list[WorkerLink[C]]:
        """Where sessions may live, those that take nothing new among them: not at who computes prompts for others, unless there
        has never been anybody else: a session waits for its worker and looks for no other one."""
        if not self._has_decoded:
            return list(self.links.values())
        return [link for row, link in self.links.items() if row not in self._prefill]

    @property
    def paused(self) -> bool:
        """Whether a worker would take requests if it were not paused."""
        return any(link.paused and link.ready and not link.draining for link in self.links.values())

    @property
    def refuses_new(self) -> bool:
        """Whether every worker that could serve a new request refuses it, the paused ones among them."""
        links = [link for row, link in self.links.items() if self.columns.serves[row] and link.ready and not link.draining]
        return bool(links) and all(link.refuses_new for link in links)

    @property
    def lacks_scores(self) -> bool:
        """Whether the model has workers and none of them serves scores."""
        return bool(self.links) and not any(link.info is not None and link.info.ends_with_prompt for link in self.links.values())

    def join(self, link: WorkerLink[C], now: float) -> None:
        info = link.info
        assert info is not None
        mark = int.from_bytes(blake2b(info.worker_id.encode(), digest_size=8).digest())
        self._rows[link] = row = self.columns.add(info.worker_id, mark)
        self.links[row] = link
        self.renew(link, now)

    def renew(self, link: AnyLink, now: float) -> None:
        """Its worker has said what it is."""
        info, row = link.info, self._rows[link]
        assert info is not None
        running = info.max_running_requests or UNLIMITED
        self.columns.running[row] = running
        self.columns.limit[row] = running + max(2, round(running * self._slack))
        self.columns.loras[row] = frozenset(info.loras)
        self._loads.pop(row, None)  # the load's adapters are newer
        if info.role == PREFILL:
            self._prefill.add(row)
        else:
            self._prefill.discard(row)
            self._has_decoded = True
        self.refresh(link, now)

    def leave(self, link: AnyLink) -> None:
        row = self._rows.pop(link)
        self.columns.drop(row)
        del self.links[row]
        self._prefill.discard(row)
        self._refusing.discard(row)
        self._loads.pop(row, None)
        self._share_out()

    def refresh_all(self, now: float) -> None:
        links = [link for link in self.links.values() if link.ready and not link.draining and not link.paused]
        leased = [link for link in links if self._lease_alive(link)]
        self._leases_count = bool(leased)
        self._breakers_count = any(link.breaker.allows(now) for link in leased or links)
        for link in self.links.values():
            self._look_at(link, now)
        self._share_out()

    def refresh(self, link: AnyLink, now: float) -> None:
        """After anything about the link, which has joined, has changed."""
        self._look_at(link, now)
        self._share_out()

    def _look_at(self, link: AnyLink, now: float) -> None:
        columns, row = self.columns, self._rows[link]
        leased = not self._leases_count or self._lease_alive(link)
        trusted = not self._breakers_count or link.breaker.allows(now)
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
        if link.crowded_until <= now:
            link.crowded_until = 0.0
        self._count(link)

    def _share_out(self) -> None:
        """Who computes prompts for others serves whole requests while nobody else with its weights does."""
        if not self._prefill:
            return
        usable = np.flatnonzero(self.columns.usable).tolist()
        others = {self.links[row].model_version for row in usable if row not in self._prefill}
        for row in self._prefill:
            self.columns.serves[row] = self.links[row].model_version not in others

    def _count(self, link: AnyLink) -> None:
        """After its requests have changed: ours as they are, others' as it last told them. Those that it reads ahead for are on
        it already: whoever is placed meanwhile goes where they leave room."""
        load, requests, tokens = link.load, len(link.open), link.open_tokens + link.ahead_tokens
        if load is not None and load.num_open > load.num_open_here:
            others = load.num_open - load.num_open_here
            requests += others
            tokens += load.used_tokens * others // load.num_open
        columns, row = self.columns, self._rows[link]
        least = int(columns.limit[row]) if link.crowded_until else 0
        columns.requests[row] = max(requests + link.num_ahead, least)
        columns.ahead[row] = columns.requests[row] - max(requests, least)
        columns.tokens[row] = tokens

    def recount(self, link: AnyLink) -> None:
        """After what is to come to the link has changed, which may have left."""
        if link in self._rows:
            self._count(link)

    def has_room(self, begun: bool = False) -> bool:
        """Whether a worker has room for another request. begun: for one that has output already."""
        return has_room(Ask(0, allowed=None if begun else self._takes_new()), self.columns)

    def _takes_new(self) -> NDArray[np.bool_] | None:
        """bool[capacity], False for workers that refuse new requests. None if no worker does."""
        if not self._refusing:
            return None
        takes = np.ones(self.columns.capacity, np.bool_)
        takes[list(self._refusing)] = False
        return takes

    def pick(self, one: C, now: float, without: AnyLink | None = None) -> Pick | None:
        """None: nobody who would take it has room. without: one that it must not be."""
        if not self.has_room(one.has_begun):
            return None
        return self._policy.pick(self._ask(one, now, self._allowed(one, without), decides=True), self.columns)

    def pick_at(self, link: AnyLink, one: C, now: float) -> Pick | None:
        """Picks this worker. Returns None if it has no free slot, or may not get the request."""
        row = self._rows.get(link)
        if row is None or not self.has_room(one.has_begun):
            return None
        allowed = self._allowed(one, None)
        here = np.zeros(self.columns.capacity, np.bool_)
        here[row] = allowed is None or allowed[row]
        return self._policy.pick(self._ask(one, now, here), self.columns)

    def pick_reader(self, one: C, now: float, prefill: AnyLink) -> Pick | None:
        """Who will go on with what the link's worker computes of its prompt, as things are now. None: nobody who could read that
        has room."""
        info = prefill.info
        if info is None or prefill.model_version != one.model_version:
            return None
        allowed = self._same_numerics(one)
        for row, link in self.links.items():
            allowed[row] &= reads(link, info.kv_layout)
        return self._policy.pick(self._ask(one, now, allowed), self.columns)

    def takes(self, link: WorkerLink[C], one: C) -> bool:
        """Whether it, which reads ahead for what has begun, is one of those that may go on with that, and has room: at least the
        one that is kept for it."""
        row = self._rows.get(link)
        if row is None or not self.columns.takes[row] or not self._same_weights(one)[row]:
            return False
        return bool(self.columns.requests[row] <= self.columns.limit[row])

    def pick_prefill(self, one: C, now: float, decode: Pick, min_tokens: int, without: AnyLink | None = None) -> Pick | None:
        """Who computes its prompt for the worker that was picked for it; None: that one itself (routing/prefill.py). without: one
        that it must not be."""
        link = self.links[decode.row]
        if not self._prefill or one.num_tokens < min_tokens or link.info is None or link.info.role != DECODE:
            return None
        allowed = self._exchanging(link, link.info, one)
        if without is not None and without in self._rows:
            allowed[self._rows[without]] = False
        ask = self._ask(one, now, allowed)
        pick = pick_prefill(self._policy, self.columns, ask, decode, min_tokens)
        return pick if pick is not None and self._reads_well(link) else None

    def _reads_well(self, decode: WorkerLink[C]) -> bool:
        """One that says that reading does not pay is given something to read now and then: it may pay by now."""
        if decode.load is None or not decode.load.pulls_lose:
            return True
        self._kept_back += 1
        return self._kept_back % TRIES_ONE_IN == 0

    def _exchanging(self, decode: WorkerLink[C], mine: worker_pb2.WorkerInfo, one: C) -> NDArray[np.bool_]:
        """bool[capacity]: their pages are of that worker's weights and layout. mine: what it says of itself."""
        allowed = np.zeros(self.columns.capacity, np.bool_)
        for row, link in self.links.items():
            info = link.info
            if info is not None and info.kv_port and link.address not in one.refused_by and not link.refuses_new:
                allowed[row] = link.model_version == decode.model_version and info.kv_layout == mine.kv_layout
        return allowed

    def _ask(self, one: C, now: float, allowed: NDArray[np.bool_] | None, decides: bool = False) -> Ask:
        """decides: it is the first look for this request."""
        matched, saved, first_block = None, None, b""
        if self._index is not None and self.wants_hashes:
            self._index.expire(now)
            blocks = one.block_hashes()
            reach = self._index.reach(blocks)
            if blocks and decides:
                self._sharing.decided(bool(reach.any()))
            if blocks:
                first_block = blocks[0] if self._sharing.seen else b""
            hits = self._hits(reach, decides)
            matched, saved = hits.matched, hits.saved
        return Ask(one.num_tokens, matched, one.routing_key, allowed=allowed, first_block=first_block, saved=saved)

    def _hits(self, reach: NDArray[np.int64], decides: bool) -> Hits:
        """A tier that says that reading it does not pay is given something to read now and then: it may pay by now, and its
        worker finds that out by being asked alone."""
        columns = self.columns
        hits = hits_of(reach, columns)
        if decides and len(reach) > 1 and ((columns.owner >= 0) & (columns.host_saves * columns.storage_saves <= 0)).any():
            tried = hits_of(reach, columns, tries=True)
            if (tried.matched > hits.matched).any():
                self._passed_over += 1
                return tried if self._passed_over % TRIES_ONE_IN == 0 else hits
        return hits

    def picked(self, one: C, link: AnyLink, until: float) -> None:
        """It goes there; what it computes there will be cached, which others are told before the worker says so."""
        self._picks += 1
        row = self._rows[link]
        self.columns.last_pick[row] = self._picks
        owner = int(self.columns.owner[row])
        if self._index is not None and self.wants_hashes and owner >= 0:
            self._index.speculate(owner, one.block_hashes(), until)

    def _allowed(self, one: C, without: AnyLink | None) -> NDArray[np.bool_] | None:
        if one.has_begun:
            return self._readers(one, self._same_numerics(one))
        able, new = self._able(one), self._takes_new()
        if able is not None and new is not None:
            able &= new
        elif able is None:
            able = new
        if not one.refused_by and without is None:
            return able
        allowed = np.ones(self.columns.capacity, np.bool_) if able is None else able.copy()
        for row, link in self.links.items():
            allowed[row] &= link is not without and link.address not in one.refused_by
        if without is None and not (allowed & self.columns.takes).any():
            return able  # those that have not refused it are gone: rather one that has
        return allowed

    def _able(self, one: C) -> NDArray[np.bool_] | None:
        """Returns bool[capacity], True for workers that serve what is asked; None if all do. Older workers serve no scores."""
        if not one.is_scored:
            return None
        able = np.zeros(self.columns.capacity, np.bool_)
        for row, link in self.links.items():
            able[row] = link.info is not None and link.info.ends_with_prompt
        return able

    def _readers(self, one: C, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Of these, while one of them takes requests, those that can read what another worker has of it."""
        if not one.source_layout:
            return allowed
        readers = allowed.copy()
        for row, link in self.links.items():
            readers[row] &= reads(link, one.source_layout)
        return readers if (readers & self.columns.takes).any() else allowed

    def _same_numerics(self, one: C) -> NDArray[np.bool_]:
        """Of those with its weights; while one of them takes requests whose results have the bits that it began with, these."""
        allowed = self._same_weights(one)
        if not one.numerics:
            return allowed
        same = allowed.copy()
        for row, link in self.links.items():
            same[row] &= link.info is not None and link.info.numerics == one.numerics
        return same if (same & self.columns.takes).any() else allowed

    def _same_weights(self, one: C) -> NDArray[np.bool_]:
        """What has begun goes on with the weights that it began with: in a rollout there may be two sorts. And where there is
        room for it: contexts may differ too."""
        allowed = np.zeros(self.columns.capacity, np.bool_)
        for row, link in self.links.items():
            fits = link.info is not None and one.num_tokens < link.info.context_len
            allowed[row] = fits and link.model_version == one.model_version
        return allowed

    def is_held_up(self, one: C) -> bool:
        """Whether what it began with is on a worker that is paused."""
        return any(link.paused and link.model_version == one.model_version for link in self.links.values())

    def can_go_on(self, one: C) -> bool:
        """Whether a worker takes requests that could go on with what has begun."""
        return bool((self._same_weights(one) & self.columns.takes).any())
