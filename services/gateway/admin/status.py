"""Reports the status of this gateway and its workers for GET /server_info of the HTTP port, which `rootstock status` also reads.

All values are read from memory on the event loop. No other process is called.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rootstock_llm.services.gateway.dispatch.dispatcher import Dispatcher
from rootstock_llm.services.gateway.dispatch.model_pool import AnyLink
from rootstock_llm.services.gateway.observe.metrics import KeySigns
from rootstock_llm.services.shared.tls.mutual_tls import MutualTls

QUIET_S = 2.5  # seconds without a load report after which a worker is silent; workers send a report every second


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Access to the state of Redis, DNS names, files and Prometheus, on which the gateway depends besides the other services.

    Each callable runs on the event loop and only reads memory.
    """

    index: Callable[[], bool | None]  # whether the prefix index's Redis responds, or None if none is configured
    kept: Callable[[], bool | None]  # whether the store of clients' records responds, or None if none is configured
    keys: KeySigns | None  # state of the API keys, or None if the gateway checks no API keys
    tls: MutualTls | None  # TLS between services, or None if it is off
    # By service: returns the error of a DNS name that cannot be resolved, or "" if all names of the service are resolved.
    names: Mapping[str, Callable[[], str]]
    scraped_s_ago: Callable[[], float | None]  # seconds since the last scrape of the metrics, or None before the first

    def report(self) -> dict[str, Any]:
        """Returns the response's field `surroundings`. It has no addresses, because clients do not need them."""
        keys, scraped = self.keys, self.scraped_s_ago()
        return {
            "redis": {"index": self.index(), "limits": keys and keys.shares_are_up(), "kept": self.kept()},
            "key_file_valid": keys and keys.file_is_valid(),
            "tls_files_valid": self.tls and self.tls.files.valid,
            "certificate_ends_in_s": self.tls and round(_not_after(self.tls) - time.time()),
            "unresolved": sorted(service for service, trouble in self.names.items() if trouble()),
            "scraped_s_ago": scraped if scraped is None else round(scraped, 1),
        }


class StatusReport:
    """Reads the status of this gateway and its workers. Each process has one instance, on its event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizers: Callable[[], int],
        detokenizers: Callable[[], int],
        surroundings: Surroundings,
    ) -> None:
        """Makes the reader of the status.

        Args:
            tokenizers: Returns the number of connected tokenizers.
            detokenizers: Returns the number of connected detokenizers.
        """
        self._dispatcher = dispatcher
        self._tokenizers, self._detokenizers = tokenizers, detokenizers
        self._surroundings = surroundings

    def report(self, may_use: Callable[[str], bool]) -> dict[str, Any]:
        """Returns the fields `workers` and `gateway` of the response to GET /server_info.

        Workers are sorted by id. Workers whose id is unknown are last.

        Args:
            may_use: Whether the fields include the model with this name and its workers. The name is "" if the model is unknown.
        """
        dispatcher, now = self._dispatcher, asyncio.get_running_loop().time()
        fleet, usable = dispatcher.fleet, set(dispatcher.fleet.usable())
        named = [(link, fleet.model_name(link)) for link in fleet.links.values()]
        shown = [(link, name) for link, name in named if may_use(name or "")]
        workers = [_worker(link, name, link in usable, now) for link, name in shown]
        return {
            "workers": sorted(workers, key=lambda worker: (worker["worker_id"] is None, worker["worker_id"] or "")),
            "gateway": {
                "waiting": sum(count for name, count in dispatcher.waiting_by_model().items() if may_use(name)),
                "workers": sum(link in usable for link, _ in shown),
                "tokenizers": self._tokenizers(),
                "detokenizers": self._detokenizers(),
                "surroundings": self._surroundings.report(),
            },
        }


def _worker(link: AnyLink, model: str | None, usable: bool, now: float) -> dict[str, Any]:
    """Returns the status of one worker, without its address, because clients do not need it.

    Args:
        model: Name that clients use for the worker's model, or None if it is unknown.
        usable: Whether this gateway sends requests to the worker.
        now: Time of the event loop's clock.
    """
    info, load = link.info or link.last_info, link.load
    return {
        "worker_id": info and info.worker_id,
        "model": model,
        "role": info and (info.role or "both"),
        "state": _state(link, usable, now),
        "told_s_ago": round(now - link.load_at, 3) if load is not None else None,
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
    """Returns the state of a worker, as the field `state` of WorkerStanding describes it.

    If several states apply, returns the first of draining, hung, silent, paused and ready.
    """
    if link.info is None:
        return "lost" if link.was_connected else "starting"
    states = {
        "draining": link.draining,
        "hung": link.hangs,
        "silent": link.load is not None and now - link.load_at > QUIET_S,
        "paused": link.paused,
        "ready": usable,
    }
    return next((state for state, holds in states.items() if holds), "unused")


def _not_after(tls: MutualTls) -> float:
    """Returns the Unix time at which the certificate expires. 0 if it had already expired when its file was read."""
    named = tls.files.now().named
    return 0.0 if named is None else named.not_after
