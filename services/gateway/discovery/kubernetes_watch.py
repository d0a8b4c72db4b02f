"""Follows the endpoints of a Service by its EndpointSlices, and by its DNS name while the slices cannot be read.

KubernetesWatch lists the slices, and then watches their changes. It lists them again after RESYNC_S, or if the API server has
dropped the watched version. The blocking client runs in a daemon thread, which passes its results to the event loop. While the
API server fails, the last endpoints stay. If the Service is headless, the watch also reports its DNS name.

KubernetesService looks up this name while the slices cannot be read. A rollback to discovery by DNS needs these look-ups. The
rollback removes the old gateways' permission and network access to the API server while their streams still run. Without the
look-ups, these gateways would lose one endpoint with every replaced pod.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import urllib3
from kubernetes import client, config

from rootstock_llm.services.gateway.discovery.dns import DnsWatch, Resolve
from rootstock_llm.services.gateway.discovery.endpoints import DnsTarget, Endpoints, KubernetesTarget
from rootstock_llm.services.gateway.discovery.kubernetes_api import (
    GONE,
    WATCH_S,
    KubernetesApiError,
    SliceApi,
    endpoints_of,
    is_headless,
    load_client,
    number_of,
    own_namespace,
)
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

RESYNC_S = 600.0  # mean time between two lists, in seconds
FIRST_PAUSE_S = 0.25  # longest pause in seconds without a failure; doubles with every failure in a row
LONGEST_PAUSE_S = 30.0
PATIENCE_S = 10.0  # seconds of failures after which DNS is used; a restarted API server responds earlier
DENIED = (401, 403)  # statuses after which DNS is used immediately

LoadClient = Callable[[], client.ApiClient]
_Report = Callable[[Callable[[Any], None], object], object]  # (function to call on the event loop, its argument)
_FAILURES = (KubernetesApiError, config.ConfigException, urllib3.exceptions.HTTPError, OSError, ValueError, KeyError)


class KubernetesWatch:
    """The watch of one Service. run() starts its thread. Only this thread uses the fields with "thread" in their comment."""

    def __init__(
        self,
        target: KubernetesTarget,
        changed: Callable[[Endpoints], None],
        on_dns_name: Callable[[DnsTarget | None], None],
        load: LoadClient = load_client,
        watch_s: float = WATCH_S,
        resync_s: float = RESYNC_S,
    ) -> None:
        """Makes the watch.

        Args:
            changed: Called with new endpoints, on the event loop of run().
            on_dns_name: Called on the event loop of run(): with the DNS name of the pods when the slices cannot be read, and with
                None when they can be read again.
            load: Makes the client of the Kubernetes API.
            watch_s: See kubernetes_api.WATCH_S.
            resync_s: See RESYNC_S.
        """
        self._target = target
        self._changed = changed
        self._on_dns_name = on_dns_name
        self._load = load
        self._watch_s = watch_s
        self._resync_s = resync_s
        self._stopping = threading.Event()
        self._api: SliceApi | None = None  # thread; the event loop only calls stop()
        self._namespace = ""  # thread; namespace of the Service
        self._slices: dict[str, dict[str, Any]] = {}  # thread; slices by name
        self._reported: Endpoints | None = None  # thread; last endpoints that were reported
        self._failures = 0  # thread; number of failures in a row
        self._failing_since: float | None = None  # thread; monotonic seconds of the first failure after the last list
        self._name: DnsTarget | None = None  # thread; last DNS name that was reported, or None while the slices can be read

    async def run(self) -> None:
        """Runs the thread until cancelled. If an unexpected exception ends the thread, raises this exception."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        threading.Thread(
            target=self._thread, args=(loop, ended), name=f"endpoints of {self._target.service}", daemon=True
        ).start()
        try:
            await ended
        finally:
            self._stopping.set()
            if self._api is not None:
                self._api.stop()

    def _thread(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        def report(changed: Callable[[Any], None], value: object) -> None:
            if not self._stopping.is_set():
                changed(value)

        def end(error: BaseException) -> None:
            if not ended.done():
                ended.set_exception(error)

        try:
            while not self._stopping.is_set():
                self._attempt(lambda changed, value: loop.call_soon_threadsafe(report, changed, value))
                self._stopping.wait(self._pause_s())
        except Exception as error:
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, error)

    def _pause_s(self) -> float:
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures, 16))
        return random.uniform(longest / 2, longest)

    def _attempt(self, report: _Report) -> None:
        """Lists the slices and watches them. Logs and counts failures."""
        try:
            if self._api is None:
                self._namespace = self._target.namespace or own_namespace()
                self._api = SliceApi(self._load(), self._namespace, self._target.service, self._watch_s)
            self._follow(self._api, report)
        except KubernetesApiError as error:
            if error.status == GONE:
                logger.info(
                    "the API server has dropped the watched version of the EndpointSlices; listing them again",
                    extra=self._fields(),
                )
                self._failures = min(self._failures, 1)
            else:
                self._failed(error, report)
        except _FAILURES as error:
            self._failed(error, report)

    def _follow(self, api: SliceApi, report: _Report) -> None:
        listed, version = api.list()
        self._failing_since = None
        self._slices = {slice_["metadata"]["name"]: slice_ for slice_ in listed}
        if self._name is not None:
            self._name, self._reported = None, None
            report(self._on_dns_name, None)
        self._report_endpoints(report)
        if self._failures:
            logger.info("EndpointSlices can be read again", extra=self._fields())
        resync = time.monotonic() + self._resync_s * random.uniform(0.8, 1.2)
        while time.monotonic() < resync and not self._stopping.is_set():
            began = time.monotonic()
            for event in api.watch(version):
                self._failures = 0
                version = self._apply(event) or version
                self._report_endpoints(report)
            self._failures = 0
            if time.monotonic() - began < FIRST_PAUSE_S:
                self._stopping.wait(FIRST_PAUSE_S)  # avoids a busy loop if the server or a proxy ends each watch immediately

    def _apply(self, event: dict[str, Any]) -> str:
        """Applies an event. Returns its resource version, after which a watch continues."""
        slice_ = event["object"]
        kind = event["type"]
        name = slice_["metadata"].get("name", "")
        if kind in ("ADDED", "MODIFIED"):
            self._slices[name] = slice_
        elif kind == "DELETED":
            self._slices.pop(name, None)
        return str(slice_["metadata"].get("resourceVersion", ""))

    def _report_endpoints(self, report: _Report) -> None:
        endpoints = endpoints_of(self._slices.values(), self._target.port)
        if endpoints != self._reported:
            self._reported = endpoints
            report(self._changed, endpoints)

    def _failed(self, error: Exception, report: _Report) -> None:
        if self._stopping.is_set():
            return
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        self._failures += 1
        denied = isinstance(error, KubernetesApiError) and error.status in DENIED
        before = self._name
        if self._name is None and (denied or now - self._failing_since >= PATIENCE_S):
            self._name = self._name_of_the_pods()
        rest = "the last endpoints stay in use" if self._name is None else f"looking up {self._name.name} by DNS instead"
        hint = "; the service account needs list and watch on endpointslices (discovery.k8s.io)" if denied else ""
        level = logging.ERROR if denied and self._failures == 1 else logging.WARNING
        logger.log(level, "EndpointSlices cannot be read; %s: %s%s", rest, error, hint, extra=self._fields())
        if self._name != before:
            report(self._on_dns_name, self._name)

    def _name_of_the_pods(self) -> DnsTarget | None:
        """Returns the DNS name of the pods. None if no slices have been read, or the Service is not headless."""
        slices = list(self._slices.values())
        number = number_of(slices, self._target.port)
        if number is None or not is_headless(slices):
            return None
        return DnsTarget(f"{self._target.service}.{self._namespace}.svc", number)

    def _fields(self) -> dict[str, dict[str, Any]]:
        return fields(service_=self._target.service, namespace=self._target.namespace)


class KubernetesService:
    """Follows the endpoints of one Service, by its EndpointSlices or by DNS."""

    def __init__(
        self,
        target: KubernetesTarget,
        changed: Callable[[Endpoints], None],
        dns_refresh_s: float,
        lookup: Resolve,
        load: LoadClient,
        watch_s: float = WATCH_S,
        resync_s: float = RESYNC_S,
    ) -> None:
        """Makes the follower.

        Args:
            changed: Called with new endpoints, on the event loop of run().
            dns_refresh_s: Pause between two look-ups, in seconds.
            lookup: Looks up a DNS name.
            load: Makes the client of the Kubernetes API.
            watch_s: See kubernetes_api.WATCH_S.
            resync_s: See RESYNC_S.
        """
        self._slices = KubernetesWatch(target, changed, self._on_dns_name, load, watch_s, resync_s)
        self._changed = changed
        self._dns_refresh_s = dns_refresh_s
        self._lookup = lookup
        self._tasks: asyncio.TaskGroup | None = None
        self._dns: tuple[DnsWatch, asyncio.Task[None]] | None = None  # set while the slices cannot be read

    @property
    def trouble(self) -> str:
        """Error of the last DNS look-up; "" if it succeeded, or if DNS is not used now."""
        return "" if self._dns is None else self._dns[0].trouble

    async def run(self) -> None:
        """Follows the endpoints until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._slices.run()

    def _on_dns_name(self, name: DnsTarget | None) -> None:
        if self._dns is not None:
            self._dns[1].cancel()
            self._dns = None
        if name is not None and self._tasks is not None:
            watch = DnsWatch(name, self._dns_refresh_s, self._lookup, self._looked_up)
            self._dns = watch, self._tasks.create_task(watch.run())

    def _looked_up(self, endpoints: Endpoints) -> None:
        if endpoints:  # a DNS server that cannot reach the API server may report no addresses; the last endpoints then stay
            self._changed(endpoints)
