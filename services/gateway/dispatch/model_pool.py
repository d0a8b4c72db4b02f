"""The workers of one model as routing sees them, and who waits for one. Keeps the columns true to the links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from services.gateway.peers.worker_link import WorkerLink
from services.gateway.request.generation import ModelInfo
from services.gateway.request.request import Choice
from services.gateway.routing.columns import Ask, Pick, WorkerColumns
from services.gateway.routing.fair_queue import FairQueue
from services.gateway.routing.policies import Policy, has_room
from services.gateway.routing.prefix_index import PrefixIndex
from services.gateway.routing.sharing import SharingMeter
from services.shared.index.block_hash import BLOCK_TOKENS, block_hashes
from services.shared.index.prefix_index import split_hashes

UNLIMITED = 1 << 20  # requests of a worker that names no limit
LeaseAlive = Callable[[WorkerLink], bool]
OwnerOf = Callable[[WorkerLink], int]


class ModelPool:
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
        queue: FairQueue[Choice],
        lease_alive: LeaseAlive,
        owner_of: OwnerOf,
        slack: float,
    ) -> None:
        self.model = model
        self.columns = WorkerColumns()
        self.links: dict[int, WorkerLink] = {}  # by row
        self.queue = queue
        self.moved: dict[Choice, None] = {}
        self.parked: dict[Choice, None] = {}
        self.pumping = False
        self._policy = policy
        self._index = index
        self._lease_alive = lease_alive
        self._owner_of = owner_of
        self._slack = slack
        self._leases_count = True  # not while no worker at all seems to have one: that is the index's trouble, not theirs
        self._breakers_count = True  # not while they would leave nobody
        self._picks = 0
        self._sharing = SharingMeter()

    @property
    def num_waiting(self) -> int:
        return len(self.queue) + len(self.moved)

    @property
    def wants_hashes(self) -> bool:
        """Whether the names of a prompt's blocks would make a difference."""
        return self._index is not None and len(self.links) > 1

    def usable(self) -> list[WorkerLink]:
        return [self.links[row] for row in np.flatnonzero(self.columns.usable).tolist()]

    @property
    def paused(self) -> bool:
        """Whether a worker would take requests if it were not paused."""
        return any(link.paused and link.endpoint_ready and not link.draining for link in self.links.values())

    def join(self, link: WorkerLink, now: float) -> None:
        info = link.info
        assert info is not None
        link.pool = self
        link.row = row = self.columns.add(
            info.worker_id, int.from_bytes(blake2b(info.worker_id.encode(), digest_size=8).digest())
        )
        self.links[row] = link
        self.renew(link, now)

    def renew(self, link: WorkerLink, now: float) -> None:
        """Its worker has said what it is."""
        info, row = link.info, link.row
        assert info is not None
        running = info.max_running_requests or UNLIMITED
        self.columns.running[row] = running
        self.columns.limit[row] = running + max(2, round(running * self._slack))
        self.columns.loras[row] = frozenset(info.loras)
        self.refresh(link, now)

    def leave(self, link: WorkerLink) -> None:
        self.columns.drop(link.row)
        del self.links[link.row]
        link.row, link.pool = -1, None

    def refresh_all(self, now: float) -> None:
        links = [link for link in self.links.values() if link.endpoint_ready and not link.draining and not link.paused]
        leased = [link for link in links if self._lease_alive(link)]
        self._leases_count = bool(leased)
        self._breakers_count = any(link.breaker.allows(now) for link in leased or links)
        for link in self.links.values():
            self.refresh(link, now)

    def refresh(self, link: WorkerLink, now: float) -> None:
        """After anything about the link has changed."""
        columns, row = self.columns, link.row
        leased = not self._leases_count or self._lease_alive(link)
        trusted = not self._breakers_count or link.breaker.allows(now)
        columns.usable[row] = link.endpoint_ready and not link.draining and not link.paused and leased and trusted
        load = link.load
        if load is not None:
            columns.loras[row] = frozenset(load.loras)
        columns.owner[row] = self._owner_of(link)
        if link.crowded_until <= now:
            link.crowded_until = 0.0
        self.count(link)

    def count(self, link: WorkerLink) -> None:
        """After its requests have changed: ours as they are, others' as it last told them."""
        load, requests, tokens = link.load, len(link.open), link.open_tokens
        if load is not None and load.num_open > load.num_open_here:
            others = load.num_open - load.num_open_here
            requests += others
            tokens += load.used_tokens * others // load.num_open
        if link.crowded_until:
            requests = max(requests, int(self.columns.limit[link.row]))
        self.columns.requests[link.row] = requests
        self.columns.tokens[link.row] = tokens

    def has_room(self) -> bool:
        return has_room(Ask(0), self.columns)

    def pick(self, choice: Choice, without: WorkerLink | None = None) -> Pick | None:
        """None: nobody who would take it has room. without: one that it must not be."""
        if not self.has_room():
            return None
        prompt_tokens = len(choice.prompt.ids) + len(choice.output_ids)
        matched, first_block = None, b""
        if self._index is not None and self.wants_hashes:
            self._index.expire(choice.request.clock())
            blocks = self._blocks(choice)
            depths = self._index.match(blocks) * BLOCK_TOKENS
            if blocks:
                self._sharing.decided(bool(depths.any()))
                first_block = blocks[0] if self._sharing.seen else b""
            owners = self.columns.owner
            known = (owners >= 0) & (owners < len(depths))
            matched = np.where(known, depths[np.where(known, owners, 0)] if len(depths) else 0, 0)
        key, allowed = choice.generation.routing_key, self._allowed(choice, without)
        return self._policy.pick(Ask(prompt_tokens, matched, key, allowed=allowed, first_block=first_block), self.columns)

    def picked(self, choice: Choice, row: int, until: float) -> None:
        """The choice goes there; what it computes there will be cached, which others are told before the worker says so."""
        self._picks += 1
        self.columns.last_pick[row] = self._picks
        owner = int(self.columns.owner[row])
        if self._index is not None and self.wants_hashes and owner >= 0:
            self._index.speculate(owner, self._blocks(choice), until)

    def _allowed(self, choice: Choice, without: WorkerLink | None) -> NDArray[np.bool_] | None:
        if choice.output_ids:
            return self._same_weights(choice)
        if not choice.refused_by and without is None:
            return None
        allowed = np.ones(self.columns.capacity, np.bool_)
        for row, link in self.links.items():
            allowed[row] = link is not without and link.address not in choice.refused_by
        if without is None and not (allowed & self.columns.usable).any():
            return None  # those that have not refused it are gone: rather one that has
        return allowed

    def _same_weights(self, choice: Choice) -> NDArray[np.bool_]:
        """What has begun goes on with the weights that it began with: in a rollout there may be two sorts. And where there is
        room for it: contexts may differ too."""
        allowed = np.zeros(self.columns.capacity, np.bool_)
        length = len(choice.prompt.ids) + len(choice.output_ids)
        for row, link in self.links.items():
            fits = link.info is not None and length < link.info.context_len
            allowed[row] = fits and link.weights == choice.weights
        return allowed

    def is_held_up(self, choice: Choice) -> bool:
        """Whether what it began with is on a worker that is paused."""
        return any(link.paused and link.weights == choice.weights for link in self.links.values())

    def can_go_on(self, choice: Choice) -> bool:
        """Whether a worker takes requests that could go on with what has begun."""
        return bool((self._same_weights(choice) & self.columns.usable).any())

    def _blocks(self, choice: Choice) -> Sequence[bytes]:
        if choice.blocks is None:
            before = choice.request.choices[choice.index - 1] if choice.number else None
            if before is not None and before.blocks is not None:
                choice.blocks = before.blocks
            else:
                prompt = choice.prompt
                joined = prompt.block_hashes or block_hashes(self.model.hash_root(choice.generation.cache_salt), prompt.ids)
                choice.blocks = tuple(split_hashes(joined))
        return choice.blocks
