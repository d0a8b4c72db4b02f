"""The links to all workers that discovery has found, in one pool for each model. This module does not route requests."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.dispatch.model_pool import AnyLink, ModelPool
from rootstock_llm.services.gateway.dispatch.placement import Link, Placement, Pool
from rootstock_llm.services.gateway.generation.request import ModelInfo, ModelVersion
from rootstock_llm.services.gateway.index.mirror import IndexMirror
from rootstock_llm.services.gateway.remote.connection import Patience
from rootstock_llm.services.gateway.remote.replicas import Replicas
from rootstock_llm.services.gateway.remote.worker_link import LinkEvents, WorkerLink
from rootstock_llm.services.gateway.routing.breaker import BreakerConfig, CircuitBreaker
from rootstock_llm.services.gateway.routing.config import RoutingConfig, RoutingPolicy
from rootstock_llm.services.gateway.routing.fair_queue import FairQueue
from rootstock_llm.services.gateway.routing.policies import make_policy
from rootstock_llm.services.gateway.routing.prefix_index import PrefixIndex
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.rpc.dialer import PLAINTEXT, Dialer
from rootstock_llm.services.shared.sampling_parameters import API_DEFAULTS, DEFAULT_NAMES, SamplingDefaults, default_fault

logger = logging.getLogger(__name__)

TICK_S = 0.25  # seconds between two checks of leases, breakers and speculative blocks
YOUNG_S = 5.0  # seconds after the start of the gateway in which a request for an unknown model waits for the model's first worker
SWEEP_BLOCKS = 2000  # largest number of blocks of lost workers that a tick removes from the index
NEEDS_INDEX = (RoutingPolicy.PREFIX_AWARE,)  # policies that use the prefix index


class Fleet:
    """Owns the links, the pools and the prefix index. Each process has one Fleet, on its event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        events: LinkEvents[Placement],
        ticked: Callable[[], None],
        weights: Mapping[str, float] | None = None,
        dialer: Dialer = PLAINTEXT,
    ) -> None:
        """Makes a fleet without workers.

        Args:
            ticked: Called every TICK_S, after leases, breakers and the index have been updated.
            weights: Weights of API keys in the queue, by name of the API key. None: all weights are equal.
        """
        self._replicas: Replicas[Link] = Replicas(self._make)
        self.links: Mapping[str, Link] = self._replicas.by_address
        self.pools: dict[str, Pool] = {}  # by the model name that clients use
        self._pool_of: dict[AnyLink, Pool] = {}  # pool of each connected link
        self.expected = settings.expected_models  # names of models that may have no worker yet
        self._settings = settings
        self._events = events
        self._on_tick = ticked
        self._weights = weights
        self._dialer = dialer
        self._rng = random.Random()
        self._young_until = 0.0  # loop time at which YOUNG_S has passed
        self._replaced: list[Pool] = []  # pools that take_replaced() will return
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

    def model_name(self, link: AnyLink) -> str | None:
        """Returns the name that clients use for the model of a worker. None if the worker has never connected."""
        info = link.info or link.last_info
        return None if info is None else self._settings.model_name or info.model

    def loads(self, may_use: Callable[[str], bool]) -> list[dict[str, str | int]]:
        """Returns the loads that workers have reported, in the form of SGLang's /get_load.

        Args:
            may_use: Whether the workers of the model with this name are in the result.
        """
        links = [link for link in self.links.values() if may_use(self.model_name(link) or "")]
        reported = [(link.info, link.load) for link in links if link.info is not None and link.load is not None]
        return [
            {
                "worker_id": info.worker_id,
                "num_reqs": load.num_open,
                "num_waiting_reqs": load.num_waiting,
                "num_tokens": load.used_tokens,
            }
            for info, load in reported
        ]

    def pool_of(self, link: AnyLink) -> Pool | None:
        """Returns the pool of a worker's model. None if the link is not connected, or join() has refused it."""
        return self._pool_of.get(link)

    def refresh(self, link: AnyLink) -> None:
        """Updates the routing columns after a change of the link."""
        pool = self._pool_of.get(link)
        if pool is not None:
            pool.refresh(link, asyncio.get_running_loop().time())

    def may_grow(self) -> bool:
        """Returns whether a new model may still appear: YOUNG_S has not passed, and some worker has never connected."""
        return asyncio.get_running_loop().time() < self._young_until and not all(
            link.was_connected for link in self.links.values()
        )

    def take_replaced(self) -> list[Pool]:
        """Returns the pools that, since the last call, were replaced by a pool of another model with the same name."""
        replaced, self._replaced = self._replaced, []
        return replaced

    def usable(self) -> list[Link]:
        return [link for pool in self.pools.values() for link in pool.usable()]

    def join(self, link: Link) -> Pool | None:
        """Adds a worker after its hello.

        Returns:
            The pool of the worker's model. None if connected workers serve a different model under the same name.
        """
        info = link.info
        assert info is not None
        name = self._settings.model_name or info.model
        pool = self.pools.get(name)
        if pool is not None and pool.model.source != info.model:
            if pool.links:
                logger.error(
                    "worker is not used, because connected workers serve a different model under the same name",
                    extra=fields(address=link.address, model=info.model),
                )
                return None
            self._replaced.append(pool)
            pool = None  # the name now belongs to another model
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
        _set_common_model(pool)
        return pool

    def may_serve(self, version: ModelVersion) -> bool:
        """Returns whether a worker has this model version, or may have it when it connects.

        True if some worker was never connected, because it may have any version. Also True if discovery finds no worker of the
        model, because a new worker may have any version.
        """
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
        """Returns whether the worker's lease is valid or unknown. Always True unless the worker reports that it has a lease."""
        info, load = link.info, link.load
        if self.mirror is None or info is None or not info.publishes_index or load is None or not load.lease_held:
            return True
        return self.mirror.lease_alive(info.worker_id, load.index_generation) is not False

    def _owner_of(self, link: AnyLink) -> int:
        """Returns the worker's owner number in the index, or -1 if it has none.

        Without a mirror, this method retires the owner of an earlier generation, and adds the owner of the current generation.
        """
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
        """Removes the worker's blocks from an index without a mirror, unless another link leads to the same worker."""
        pool = self._pool_of.get(link)
        if self.index is None or self.mirror is not None or pool is None:
            return
        owners = pool.columns.owner
        owner = int(owners[pool.row_of(link)])
        if owner >= 0 and (owners == owner).sum() == 1:
            self.index.retire(owner)

    def leave(self, link: AnyLink) -> None:
        """Removes a link whose stream has ended."""
        pool = self._pool_of.get(link)
        if pool is None:
            return
        self._retire(link)  # when the worker connects again, its cache may be different
        del self._pool_of[link]
        pool.leave(link)
        _set_common_model(pool)

    def refused_links(self, lost: AnyLink) -> list[Link]:
        """Returns the connected links that join() has refused, if the pool of the setting model_name has no worker; otherwise [].

        Args:
            lost: Link of the worker that was lost.
        """
        pool = self.pools.get(self._settings.model_name)
        if pool is None or pool.links:
            return []
        return [link for link in self.links.values() if link is not lost and link.info is not None and self.pool_of(link) is None]

    def set_endpoints(self, endpoints: Mapping[str, bool]) -> None:
        """Applies the endpoints from discovery.

        First closes idle links of addresses that were dropped earlier, because an address that appears again may belong to a new
        worker.

        Args:
            endpoints: Whether each address is ready.
        """
        self._close_idle()
        self._replicas.set_endpoints(endpoints)
        now = asyncio.get_running_loop().time()
        for link, pool in self._pool_of.items():
            pool.refresh(link, now)

    def _make(self, address: str) -> Link:
        settings = self._settings
        cooldown_s = settings.breaker_cooldown_s  # also the time limit of a probe; the client may disconnect before the result
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
            self._on_tick()

    def _close_idle(self) -> None:
        """Closes links whose addresses discovery has dropped, and that are not busy."""
        for link in list(self.links.values()):
            self._replicas.retire(link)


def _set_common_model(pool: Pool) -> None:
    """Sets the model of a pool to values that hold for all its workers, because any worker may get any request.

    - The context length is the shortest of all workers. Prompts are truncated if all workers truncate them.
    - The model version is the version of most workers. In a tie, the current version stays. Block hashes depend on the version.
    - The sampling defaults are those of the worker with the lowest id that has this version. So all gateways use the same ones.
      The quantization of the weights also comes from this worker.
    - routed_experts_per_token is the largest number of all workers that get whole requests. Only workers with this number get
      requests for routed experts.
    - The model is deterministic if all workers report the same model version and the same numerics.
    """
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
        whole = [link.info.routed_experts_per_token for link in pool.session_links() if link.info is not None]
        infos = [link.info for link in links if link.info is not None and link.model_version == most] or infos
        first = min(infos, key=lambda info: info.worker_id)
        model = replace(
            model,
            context_len=context_len,
            auto_truncates=cuts,
            defaults=_defaults_of(first),
            deterministic=deterministic,
            routed_experts_per_token=max(whole, default=model.routed_experts_per_token),
            quantization=first.quantization,
        )
    pool.model = model


def _defaults_of(info: worker_pb2.WorkerInfo) -> SamplingDefaults:
    """Returns a worker's valid sampling defaults. An invalid default would fail all requests that do not set the parameter."""
    given = info.sampling_defaults
    values = {name: getattr(given, name) for name in DEFAULT_NAMES if given.HasField(name)}
    wrong = {name: text for name, value in values.items() if (text := default_fault(name, value))}
    if wrong:
        logger.error("ignored invalid sampling defaults of a worker", extra=fields(worker=info.worker_id, faults=wrong))
    return API_DEFAULTS.over({name: value for name, value in values.items() if name not in wrong})
