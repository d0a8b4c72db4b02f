"""All workers, as links that follow discovery, grouped into one pool per model. Decides nothing about requests."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from rootstock.v1 import worker_pb2
from services.gateway.config.settings import GatewaySettings
from services.gateway.dispatch.model_pool import AnyLink, ModelPool
from services.gateway.dispatch.placement import Link, Placement, Pool
from services.gateway.index.mirror import IndexMirror
from services.gateway.peers.replicas import Replicas
from services.gateway.peers.silence import Patience
from services.gateway.peers.worker_link import LinkEvents, WorkerLink
from services.gateway.request.generation import ModelInfo, ModelVersion
from services.gateway.routing.breaker import BreakerConfig, CircuitBreaker
from services.gateway.routing.fair_queue import FairQueue
from services.gateway.routing.policies import RoutingConfig, RoutingPolicy, make_policy
from services.gateway.routing.prefix_index import PrefixIndex
from services.shared.observe.log_fields import fields
from services.shared.rpc.dialer import IN_THE_CLEAR, Dialer
from services.shared.sampling_defaults import API_DEFAULTS, NAMES, SamplingDefaults, fault

logger = logging.getLogger(__name__)

TICK_S = 0.25  # how late a lease, a breaker or an expired guess is noticed
YOUNG_S = 5.0  # after the start
SWEEP_BLOCKS = 2000  # of workers that have gone, per tick
NEEDS_INDEX = (RoutingPolicy.PREFIX_AWARE,)


class Fleet:
    """ticked: called several times a second, when what time alone changes has been brought up to date. expected: names of models
    that may have no worker."""

    def __init__(
        self,
        settings: GatewaySettings,
        events: LinkEvents[Placement],
        ticked: Callable[[], None],
        weights: Mapping[str, float] | None = None,
        dialer: Dialer = IN_THE_CLEAR,
    ) -> None:
        """weights: shares of keys while requests wait, by their names."""
        self._replicas: Replicas[Link] = Replicas(self._make)
        self.links: Mapping[str, Link] = self._replicas.by_address
        self.pools: dict[str, Pool] = {}  # by the name that clients know
        self._pool_of: dict[AnyLink, Pool] = {}
        self.expected = settings.expected_models
        self._settings = settings
        self._events = events
        self._ticked = ticked
        self._weights = weights
        self._dialer = dialer
        self._rng = random.Random()
        self._young_until = 0.0
        self._replaced: list[Pool] = []
        self.index = PrefixIndex(settings.max_speculative_blocks) if settings.routing_policy in NEEDS_INDEX else None
        self.mirror: IndexMirror | None = None
        if settings.redis_url and self.index is not None:
            self.mirror = IndexMirror(settings.redis_url, self.index, lambda: None)

    async def run(self) -> None:
        self._young_until = asyncio.get_running_loop().time() + YOUNG_S
        async with asyncio.TaskGroup() as group:
            group.create_task(self._replicas.run())
            group.create_task(self._tick())
            if self.mirror is not None:
                group.create_task(self.mirror.run())

    def loads(self) -> list[dict[str, str | int]]:
        """Of the workers that have told theirs, as SGLang's /get_load says it."""
        told = [(link.info, link.load) for link in self.links.values() if link.info is not None and link.load is not None]
        return [
            {
                "worker_id": info.worker_id,
                "num_reqs": load.num_open,
                "num_waiting_reqs": load.num_waiting,
                "num_tokens": load.used_tokens,
            }
            for info, load in told
        ]

    def pool_of(self, link: AnyLink) -> Pool | None:
        """That of its worker's model, while it is connected."""
        return self._pool_of.get(link)

    def refresh(self, link: AnyLink) -> None:
        """After anything about the link has changed."""
        pool = self._pool_of.get(link)
        if pool is not None:
            pool.refresh(link, asyncio.get_running_loop().time())

    def may_grow(self) -> bool:
        """Shortly after the start, workers that were never met may still name their models."""
        return asyncio.get_running_loop().time() < self._young_until and not all(link.met for link in self.links.values())

    def take_replaced(self) -> list[Pool]:
        """Pools whose name has got another model since the last call."""
        replaced, self._replaced = self._replaced, []
        return replaced

    def usable(self) -> list[Link]:
        return [link for pool in self.pools.values() for link in pool.usable()]

    def join(self, link: Link) -> Pool | None:
        """The pool of the model that the link's worker has named. None: the gateway's one name is another model's."""
        info = link.info
        assert info is not None
        name = self._settings.model_name or info.model
        pool = self.pools.get(name)
        if pool is not None and pool.model.source != info.model:
            if pool.links:
                logger.error("worker serves another model and is not used", extra=fields(address=link.address, model=info.model))
                return None
            self._replaced.append(pool)
            pool = None  # the name has got another model
        model = ModelInfo(
            name,
            info.context_len,
            info.vocab_size,
            info.generates or not info.embedding_size,
            info.embedding_size,
            info.model,
            info.revision,
            info.tokenizer,
            auto_truncates=info.auto_truncates,
        )
        if pool is None:
            pool = self.pools[name] = self._new_pool(model)
        pool.model = replace(model, revision=pool.model.revision, tokenizer=pool.model.tokenizer)
        if self.mirror is not None:
            self.mirror.watch_model(info.model)
        now = asyncio.get_running_loop().time()
        if self._pool_of.get(link) is pool:
            self._retire(link)
            pool.columns.owner[pool.row_of(link)] = -1
            pool.renew(link, now)
        else:
            self._pool_of[link] = pool
            pool.join(link, now)
        _agree(pool)
        return pool

    def may_serve(self, version: ModelVersion) -> bool:
        """Whether a worker has them, or may have when it is back: one that is lost had them, or was never met. While discovery
        names none that serves the model, whoever comes may have them."""
        known = [link.model_version for link in self.links.values() if not link.retiring]
        mine = [each for each in known if each is None or each.model == version.model]
        return not mine or any(each in (None, version) for each in mine)

    def _new_pool(self, model: ModelInfo) -> Pool:
        settings = self._settings
        config = RoutingConfig(
            gate_abs=settings.routing_imbalance_abs,
            gate_rel=settings.routing_imbalance_rel,
            load_weight=settings.routing_load_weight,
        )
        policy = make_policy(settings.routing_policy, config, self._rng)
        queue: FairQueue[Placement] = FairQueue(settings.max_waiting_requests, self._weights)
        return ModelPool(model, policy, self.index, queue, self._lease_alive, self._owner_of, settings.worker_queue_slack)

    def _lease_alive(self, link: AnyLink) -> bool:
        """A worker that keeps no lease, or says itself that Redis refuses it, needs none."""
        info, load = link.info, link.load
        if self.mirror is None or info is None or not info.publishes_index or load is None or not load.lease_held:
            return True
        return self.mirror.lease_alive(info.worker_id, load.index_generation) is not False

    def _owner_of(self, link: AnyLink) -> int:
        """With a mirror, it says who owns what; without one, a worker's own word about its generation does."""
        info, load = link.info, link.load
        if self.index is None or info is None:
            return -1
        if self.mirror is not None:
            return self.mirror.owner_of(info.worker_id)
        generation = info.generation if load is None else load.index_generation
        if self.index.find(info.worker_id, generation) < 0:
            self._retire(link)
        return self.index.owner(info.worker_id, generation)

    def _retire(self, link: AnyLink) -> None:
        """What the link's worker held it holds no more. Where it is known by two addresses, the last one counts."""
        pool = self._pool_of.get(link)
        if self.index is None or self.mirror is not None or pool is None:
            return
        owners = pool.columns.owner
        owner = int(owners[pool.row_of(link)])
        if owner >= 0 and (owners == owner).sum() == 1:
            self.index.retire(owner)

    def leave(self, link: AnyLink) -> None:
        """The link's session is over."""
        pool = self._pool_of.get(link)
        if pool is None:
            return
        self._retire(link)  # what it will hold when it comes back, nobody here knows
        del self._pool_of[link]
        pool.leave(link)
        _agree(pool)

    def unused(self, gone: AnyLink) -> list[Link]:
        """Connected links that could not join while the worker that has gone, of another model, had the gateway's one name."""
        pool = self.pools.get(self._settings.model_name)
        if pool is None or pool.links:
            return []
        return [link for link in self.links.values() if link is not gone and link.info is not None and self.pool_of(link) is None]

    def set_endpoints(self, endpoints: Mapping[str, bool]) -> None:
        """endpoints: address → ready, as discovery says. An address that it names again may be another worker's: its idle link is
        closed first, and what it knew goes with it."""
        self._close_idle()
        self._replicas.set_endpoints(endpoints)
        now = asyncio.get_running_loop().time()
        for link, pool in self._pool_of.items():
            pool.refresh(link, now)

    def _make(self, address: str) -> Link:
        settings = self._settings
        cooldown_s = settings.breaker_cooldown_s  # also for a probe without a result, as when its client has gone
        breaker = CircuitBreaker(BreakerConfig(threshold=settings.breaker_faults, cooldown_s=cooldown_s, probe_s=cooldown_s))
        patience = Patience(settings.worker_silence_s, settings.unreachable_s)
        return WorkerLink(address, self._events, patience, breaker, self._dialer)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            if self.index is not None:
                self.index.expire(now)
                if self.mirror is None:
                    self.index.sweep(SWEEP_BLOCKS)
            for pool in self.pools.values():
                pool.refresh_all(now)
            self._close_idle()
            self._ticked()

    def _close_idle(self) -> None:
        """Links whose addresses have gone, and that have ended what they had."""
        for link in list(self.links.values()):
            self._replicas.retire(link)


def _agree(pool: Pool) -> None:
    """Any of its workers may get any of its requests: the shortest context counts, and prompts are cut where all of them say so.
    Blocks are named by the weights that most of them have, of two equal halves by those that they were named by. Sampling
    defaults are those of the worker among these whose id comes first, so that all gateways take the same. The model is
    deterministic where all of them say so, and have one fingerprint."""
    links = [link for link in pool.links.values() if link.info is not None]
    infos = [link.info for link in links if link.info is not None]
    model = pool.model
    before = ModelVersion(model.source, model.revision, model.tokenizer)
    counts = Counter(link.model_version for link in links if link.model_version is not None)
    most = max(counts, key=lambda version: (counts[version], version == before), default=before)
    model = replace(model, revision=most.revision, tokenizer=most.tokenizer)
    if infos:
        context_len, cuts = min(info.context_len for info in infos), all(info.auto_truncates for info in infos)
        numerics = {(link.model_version, info.numerics) for link in links if (info := link.info) is not None}
        deterministic = len(numerics) == 1 and all(info.numerics for info in infos)
        infos = [link.info for link in links if link.info is not None and link.model_version == most] or infos
        defaults = _defaults_of(min(infos, key=lambda info: info.worker_id))
        model = replace(model, context_len=context_len, auto_truncates=cuts, defaults=defaults, deterministic=deterministic)
    pool.model = model


def _defaults_of(info: worker_pb2.WorkerInfo) -> SamplingDefaults:
    """What no worker could mean is left out: clients would be refused for what they have not sent."""
    given = info.sampling_defaults
    values = {name: getattr(given, name) for name in NAMES if given.HasField(name)}
    wrong = {name: text for name, value in values.items() if (text := fault(name, value))}
    if wrong:
        logger.error("a worker's sampling defaults are left out", extra=fields(worker=info.worker_id, faults=wrong))
    return API_DEFAULTS.over({name: value for name, value in values.items() if name not in wrong})
