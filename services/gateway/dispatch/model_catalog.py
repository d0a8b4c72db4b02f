"""The models that clients may name: the models of connected workers, and the models that the settings expect."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from services.gateway.config.settings import GatewaySettings
from services.gateway.dispatch.placement import Pool
from services.gateway.dispatch.sessions import SessionWorker
from services.gateway.dispatch.waiting import Refusals
from services.gateway.request.errors import model_not_allowed, unknown_model
from services.gateway.request.generation import ModelInfo
from services.gateway.request.origin import Caller

LOOK_S = 0.5  # seconds between two looks of a request whose model may still appear


class ModelCatalog:
    """Finds the model of a request, and holds requests until the first worker of their model connects."""

    def __init__(
        self, settings: GatewaySettings, pools: Mapping[str, Pool], may_grow: Callable[[], bool], refusals: Refusals
    ) -> None:
        """Makes the catalog of a fleet.

        Args:
            pools: By the model name that clients use.
            may_grow: Returns whether a worker may still connect for the first time and add a model.
        """
        self._settings = settings
        self._pools = pools
        self._may_grow = may_grow
        self._refusals = refusals
        self._grown = asyncio.Event()
        self.expected = settings.expected_models  # names of models that may have no worker yet
        self.strangers: Counter[str] = Counter()  # waiting requests by the expected model that they name; "" for other names

    @property
    def default(self) -> ModelInfo | None:
        """The model of a request that names none: the first known one of the setting `models`, else the first by name."""
        name = self._first_known(self._pools)
        return self._pools[name].model if name else None

    def models(self) -> list[ModelInfo]:
        return [pool.model for pool in self._pools.values()]

    def names(self) -> list[str]:
        """Returns the names of all models that clients may name, with or without a worker."""
        return list(dict.fromkeys((*self.expected, *self._pools)))

    def listed(self) -> list[ModelInfo]:
        """Returns the models of names(). The context length of a model without a worker is 0."""
        return [self._pools[name].model if name in self._pools else ModelInfo(name, 0, 0) for name in self.names()]

    def waiting(self) -> dict[str, int]:
        """Returns the number of waiting choices of every model of names(); "" for requests of other names."""
        waiting = {name: self.strangers[name] for name in ("", *self.names())}
        for name, pool in self._pools.items():
            waiting[name] += pool.num_waiting
        return waiting

    def workers_of(self, name: str | None = None) -> list[SessionWorker]:
        """Returns the connected workers of a model that may have sessions; of the default model for None."""
        model = self._find(name)
        links = self._pools[model.name].homes() if model is not None else ()
        return [SessionWorker(link.info.worker_id, link.address, link.paused) for link in links if link.info is not None]

    def hash_root(self, model: ModelInfo, cache_salt: str) -> bytes:
        """Returns the hash that the first block of a prompt is chained to; empty if routing uses no block hashes."""
        pool = self._pools.get(model.name)
        return model.hash_root(cache_salt) if pool is not None and pool.wants_hashes else b""

    def reads_predictions(self, model: ModelInfo) -> bool:
        """Whether a worker of the model drafts tokens from predicted outputs."""
        pool = self._pools.get(model.name)
        return pool is not None and any(link.info is not None and link.info.reads_predictions for link in pool.links.values())

    def grown(self) -> None:
        """Wakes the requests that wait for a worker to connect."""
        self._grown.set()

    async def wait_for(self, name: str | None, caller: Caller) -> ModelInfo:
        """Returns the model of this name, for None the caller's default one. Waits for its first worker if there may be one.

        Raises:
            ApiError: There is no such model, the caller may not use it, or no worker of it came in time.
        """
        if caller.models is not None:
            name = self._allowed(name, caller)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.queue_timeout_s
        while (found := self._find(name)) is None:
            if loop.time() >= deadline:
                raise self._refusals.no_worker()
            expected = name is None or not self._pools or name in self.expected
            if not expected and not self._may_grow():
                raise unknown_model()
            await self._wait(name, deadline if expected else loop.time() + LOOK_S)
        return found

    def _allowed(self, name: str | None, caller: Caller) -> str:
        """Returns the name, or the name of the caller's default model for None. Raises ApiError 403."""
        if name is None:
            usable = [each for each in self.names() if caller.may_use(each)]
            name = self._first_known(usable) or next(iter(usable), None)
        if name is None or not caller.may_use(name):
            raise model_not_allowed()
        return name

    def _first_known(self, names: Collection[str]) -> str:
        """Returns the first of these names in the setting `models` that is known, else the first known one by name; "" if none
        is known."""
        known = self._pools.keys() & names
        return next((name for name in self.expected if name in known), min(known, default=""))

    def _find(self, name: str | None) -> ModelInfo | None:
        if name is None:
            return self.default
        pool = self._pools.get(name)
        return None if pool is None else pool.model

    async def _wait(self, name: str | None, until: float) -> None:
        """Waits until a worker connects, or until this loop time. Raises ApiError if too many requests wait already."""
        if self.strangers.total() >= self._settings.max_waiting_requests:
            raise self._refusals.full()
        meant = next(iter(self.expected), "") if name is None else name
        counted = meant if meant in self.expected else ""
        self.strangers[counted] += 1
        try:
            with suppress(TimeoutError):  # wait_for checks the time
                async with asyncio.timeout_at(until):
                    self._grown.clear()
                    await self._grown.wait()
        finally:
            self.strangers[counted] -= 1
