"""How this gateway and the workers that it knows stand, for people: one look, which asks nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from services.gateway.admin.surroundings import Surroundings
from services.gateway.admin.worker_directory import Workers
from services.gateway.dispatch.model_pool import AnyLink, ModelPool

QUIET_S = 2.5  # a worker tells its load once a second


class Fleet(Workers, Protocol):
    def usable(self) -> Sequence[AnyLink]:
        """Those that get requests."""


class Dispatching(Protocol):
    @property
    def fleet(self) -> Fleet: ...

    def waiting_by_model(self) -> Mapping[str, int]: ...

    def connected(self) -> int: ...


class Standing:
    """tokenizers, detokenizers: how many of them are connected."""

    def __init__(
        self,
        dispatcher: Dispatching,
        tokenizers: Callable[[], int],
        detokenizers: Callable[[], int],
        surroundings: Surroundings,
    ) -> None:
        self._dispatcher = dispatcher
        self._tokenizers, self._detokenizers = tokenizers, detokenizers
        self._surroundings = surroundings

    def told(self) -> dict[str, Any]:
        """On the event loop. Workers by their names, those without one at the end."""
        dispatcher, now = self._dispatcher, asyncio.get_running_loop().time()
        fleet, usable = dispatcher.fleet, set(dispatcher.fleet.usable())
        workers = [_of(link, fleet.pool_of(link), link in usable, now) for link in fleet.links.values()]
        return {
            "workers": sorted(workers, key=lambda worker: (worker["worker_id"] is None, worker["worker_id"] or "")),
            "gateway": {
                "waiting": sum(dispatcher.waiting_by_model().values()),
                "workers": dispatcher.connected(),
                "tokenizers": self._tokenizers(),
                "detokenizers": self._detokenizers(),
                "surroundings": self._surroundings.told(),
            },
        }


def _of(link: AnyLink, pool: ModelPool[Any] | None, usable: bool, now: float) -> dict[str, Any]:
    """An address is not told: clients have no use for it."""
    info, load = link.info or link.last_info, link.load
    return {
        "worker_id": info and info.worker_id,
        "model": pool.model.name if pool is not None else info and info.model,
        "role": info and (info.role or "both"),
        "state": _state(link, usable, now),
        "told_s_ago": round(now - link.told_at, 3) if load is not None else None,
        "num_running": load and load.num_running,
        "num_waiting": load and load.num_waiting,
        "max_running": info and info.max_running_requests,
        "kv_used_tokens": load and load.running_tokens,
        "kv_cached_tokens": load and load.cached_tokens,
        "kv_tokens": info and info.num_pages * info.page_size,
        "prompt_tokens": load and load.prompt_tokens,
        "cached_prompt_tokens": load and load.cached_prompt_tokens,
        "generated_tokens": load and load.generated_tokens,
        "retractions": load and load.retractions,
    }


def _state(link: AnyLink, usable: bool, now: float) -> str:
    if link.info is None:
        return "lost" if link.met else "starting"
    states = {
        "draining": link.draining,
        "hung": link.hangs,
        "silent": link.load is not None and now - link.told_at > QUIET_S,
        "paused": link.paused,
        "ready": usable,
    }
    return next((state for state, holds in states.items() if holds), "unused")
