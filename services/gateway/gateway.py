"""Wires the gateway from its settings, runs it on one event loop, and drains it at the end.

1. The constructor makes all parts. It opens no port.
2. `run` starts the ports and the background tasks, and serves until the stop event is set.
3. The drain accepts no new connections and starts no batch lines. It releases background responses to other gateways, and waits
   for the running requests and batch lines.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from rootstock_llm.protos import gateway_pb2_grpc
from rootstock_llm.services.gateway import app
from rootstock_llm.services.gateway.admin.gateways import PeerGateways, PeerServicer, Tenants
from rootstock_llm.services.gateway.admin.status import StatusReport, Surroundings
from rootstock_llm.services.gateway.admin.workers import WorkerDirectory
from rootstock_llm.services.gateway.api.anthropic.routes import MessagesApi
from rootstock_llm.services.gateway.api.batches.kept import BatchRecords, Stores
from rootstock_llm.services.gateway.api.batches.routes import BatchesApi
from rootstock_llm.services.gateway.api.openai.chat import parameters_of
from rootstock_llm.services.gateway.api.openai.preparation import Preparer
from rootstock_llm.services.gateway.api.responses.background_answers import BackgroundAnswers
from rootstock_llm.services.gateway.api.responses.records import Records
from rootstock_llm.services.gateway.api.responses.routes import ResponsesApi
from rootstock_llm.services.gateway.api.sglang.routes import NativeApi
from rootstock_llm.services.gateway.api.texts.routes import TextsApi
from rootstock_llm.services.gateway.background.background_work import BackgroundWork
from rootstock_llm.services.gateway.batches.batch_work import BatchWork
from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.discovery.watch import Discovery
from rootstock_llm.services.gateway.dispatch.dispatcher import Dispatcher
from rootstock_llm.services.gateway.dispatch.fleet_collector import FleetCollector
from rootstock_llm.services.gateway.dispatch.sessions import SessionCalls
from rootstock_llm.services.gateway.generation.abort import Aborter
from rootstock_llm.services.gateway.generation.bodies import BodyBudget
from rootstock_llm.services.gateway.generation.errors import ApiError, unavailable
from rootstock_llm.services.gateway.http import http_server
from rootstock_llm.services.gateway.http.answer import HttpPort
from rootstock_llm.services.gateway.http.body import BodyReader
from rootstock_llm.services.gateway.http.metrics_api import MetricsApi
from rootstock_llm.services.gateway.http.readiness import Readiness
from rootstock_llm.services.gateway.http.tls import TlsFiles
from rootstock_llm.services.gateway.keys.key_ring import KeyOptions, KeyRing
from rootstock_llm.services.gateway.keys.key_table import BadKeys
from rootstock_llm.services.gateway.observe.access_log import AccessLog
from rootstock_llm.services.gateway.observe.metrics import OTHER, GatewayMetrics, Scrapes
from rootstock_llm.services.gateway.output.formats.families import output_parser
from rootstock_llm.services.gateway.remote.connection import Patience
from rootstock_llm.services.gateway.remote.detokenizer_link import SILENCE_S, DetokPool
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts
from rootstock_llm.services.gateway.remote.tokenizer_client import TokenizerClient
from rootstock_llm.services.gateway.service.probe import GenerationProbe
from rootstock_llm.services.gateway.service.service import GenerationService
from rootstock_llm.services.gateway.service.sink import MakeOperation
from rootstock_llm.services.gateway.store.redis_store import RedisStore
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.observe.tracing import start_tracing
from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.shared.rpc.control_token import is_loopback, read_token
from rootstock_llm.services.shared.rpc.dialer import Dialer
from rootstock_llm.services.shared.rpc.grpc_server import PortGuard
from rootstock_llm.services.shared.rpc.token_check import start_guarded_server
from rootstock_llm.services.shared.tls.metrics import TlsMetrics
from rootstock_llm.services.shared.tls.mutual_tls import MutualTls, mutual_tls
from rootstock_llm.services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

SERVICE = "gateway"
CLOSE_S = 0.4  # after the grace period: seconds for sending the last errors, then as many for closing the remaining connections


class Gateway:
    """The gateway of this process: all its parts, and their life from start to drain.

    The admin API uses the attributes `token`, `dialer`, `directory`, `aborter`, `bodies` and `access`.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        """Makes all parts. Must be called inside the event loop that will run the gateway.

        Raises:
            CannotListen: The token, a TLS file, the access log, the file of API keys or the store's URL is unusable.
        """
        self._settings = settings
        self.token = _token(settings)
        metrics = GatewayMetrics(CollectorRegistry())
        self._mtls = _mtls(settings)
        if self._mtls is not None:
            metrics.registry.register(TlsMetrics(self._mtls))
        self.dialer = dialer = Dialer(self._mtls, lambda service: metrics.tls_failures.labels(service).inc())
        metrics.grace_period.set(settings.grace_s)
        handles = itertools.count(1)
        retry = settings.retry_after_s
        self._tenants = Tenants(lambda: self.keys.table, self.token)
        self._peers = PeerGateways(settings.peers, self._tenants, self.token, settings.dns_refresh_s, dialer)
        self.keys = _keys(settings, self.token, self._peers, metrics)
        self.readiness = readiness = Readiness()
        patience = Patience(SILENCE_S, settings.unreachable_s)
        self.detoks = DetokPool((), settings.queue_timeout_s, retry, handles, metrics, readiness.changed, patience, dialer)
        self.dispatcher = Dispatcher(settings, self.detoks, handles, metrics, readiness.changed, self.keys.weights, dialer)
        metrics.registry.register(FleetCollector(self.dispatcher.fleet))
        self.tokenizer = TokenizerClient(
            (),
            settings.tokenize_timeout_s,
            settings.queue_timeout_s,
            settings.unreachable_s,
            retry,
            metrics,
            readiness.changed,
            dialer,
        )
        refresh_s = settings.dns_refresh_s
        self._discoveries = [
            Discovery(settings.workers, self.dispatcher.fleet.set_endpoints, dns_refresh_s=refresh_s),
            Discovery(settings.tokenizers, self.tokenizer.set_endpoints, dns_refresh_s=refresh_s),
            Discovery(settings.detokenizers, self.detoks.set_endpoints, dns_refresh_s=refresh_s),
        ]
        readiness.watch(
            {"worker": self.dispatcher.connected, "tokenizer": self.tokenizer.connected, "detokenizer": self.detoks.connected},
            lambda: bool(self.dispatcher.catalog.names()),
        )
        token_texts = TokenTexts(self.detoks.stubs, settings.queue_timeout_s, retry)
        self._tracing = start_tracing(settings, SERVICE)
        self.access = _access_log(settings)
        self.bodies = BodyBudget(settings.body_budget_bytes, settings.body_wait_s, retry, metrics)
        self.service = GenerationService(settings, self.dispatcher, token_texts, metrics, self.bodies, self.keys, self._tracing)
        port = HttpPort(self.service.run, settings, BodyReader(settings, self.bodies), self.access.enabled)
        catalog = self.dispatcher.catalog
        preparer = Preparer(
            catalog, self.tokenizer, self.detoks, output_parser, metrics.calls_dropped.inc, settings.omit_hosted_tools
        )
        self.aborter = Aborter(self.service, self._peers)
        self.directory = WorkerDirectory(self.dispatcher.fleet, settings.worker_control_addresses)
        sessions, probe = SessionCalls(catalog.workers_of, retry, dialer), GenerationProbe(self.dispatcher, self.service.run)
        native = NativeApi(port, catalog, self.tokenizer, self.aborter, sessions, probe.failure)
        self._store = _store(settings)
        records = Records(self._store, retry)
        self._background = self._background_work(BackgroundAnswers(preparer, records), metrics)
        responses = ResponsesApi(port, preparer, records, self._background)
        loads = self.dispatcher.fleet.loads
        surroundings = self._surroundings(metrics)
        status = StatusReport(self.dispatcher, self.tokenizer.connected, self.detoks.connected, surroundings).report
        texts = TextsApi(port, preparer, self.tokenizer, output_parser, parameters_of, catalog.models, loads, status)
        apis: list[app.ApiRoutes] = [native, responses, MessagesApi(port, preparer), texts]
        generating = app.generating_operations(preparer, apis)
        self._work = self._batch_work(generating, metrics)
        stores = None if self._work is None else Stores(self._work.files, self._work.batches)
        apis.append(BatchesApi(port, BatchRecords(stores, settings.state_ttl_s, retry)))
        retry_after_s = self.dispatcher.pace.retry_after_s
        self.app = app.build(port, self.keys, self.access, catalog.listed, generating, apis, readiness, metrics, retry_after_s)
        self._registry = metrics.registry
        self._tls = _tls(settings)
        self._http = http_server.build(self.app, _http_options(settings, metrics, self.access, self._tls))

    def _batch_work(self, operations: Mapping[str, MakeOperation], metrics: GatewayMetrics) -> BatchWork | None:
        """Returns the stores and the runner of batches, or None if the gateway has no store.

        The store's URL is valid, because _store() has checked it.
        """
        if self._store is None:
            return None
        waiting, attendance = self.dispatcher.num_waiting_anywhere, self.service.attendance
        return BatchWork(self._settings, self.service.run, operations, self.keys.named, waiting, attendance, metrics, self.access)

    def _background_work(self, answers: BackgroundAnswers, metrics: GatewayMetrics) -> BackgroundWork | None:
        """Returns the store and the runner of background responses, or None if the gateway has no store."""
        if self._store is None:
            return None
        computed_by = self.dispatcher.computed_by
        return BackgroundWork(
            self._settings,
            answers,
            self.service.run,
            self.keys.named,
            computed_by,
            lambda: not self.readiness.missing(),
            metrics,
            self.access,
        )

    def _surroundings(self, metrics: GatewayMetrics) -> Surroundings:
        scrapes = Scrapes()
        metrics.registry.register(scrapes)
        mirror, background = self.dispatcher.fleet.mirror, self._background
        names = dict(zip(("worker", "tokenizer", "detokenizer"), (each.trouble for each in self._discoveries), strict=True))
        return Surroundings(
            index=lambda: None if mirror is None else mirror.available,
            kept=lambda: None if background is None else background.store_is_up,
            keys=self.keys.signs,
            tls=self._mtls,
            names=names,
            scraped_s_ago=scrapes.scraped_s_ago,
        )

    async def run(self, listener: socket.socket, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, and then drains for at most grace_s.

        Raises:
            CannotListen: A port is taken, or its address is not local.
        """
        async with AsyncExitStack() as stack:
            if self._settings.metrics_port:
                metrics = MetricsApi(self._registry)
                await stack.enter_async_context(
                    http_server.serve_app(metrics, self._settings.metrics_host, self._settings.metrics_port)
                )
            await self._run(listener, stop)

    async def _run(self, listener: socket.socket, stop: asyncio.Event) -> None:
        health = grpc_server.HealthService(SERVICE)
        servers = [await self._start_health(health), *await self._start_peer()]
        await self.keys.start()
        runs = [self.dispatcher.run, self.detoks.run, self.tokenizer.run, self._peers.run, self.keys.run]
        runs += [discovery.run for discovery in self._discoveries]
        runs += [self._tls.run] if self._tls is not None else []
        runs += [work.run for work in (self._work, self._background) if work is not None]
        links = [asyncio.create_task(run()) for run in runs]
        serving = asyncio.create_task(self._http.serve([listener]))
        links.append(asyncio.create_task(self.readiness.publish(health)))
        host, port = listener.getsockname()[:2]
        logger.info("listening", extra=fields(host=host, port=port))
        try:
            await self._wait_for_stop(stop, [*links, serving])
            self.readiness.stop()
            await health.set_ready(False)
            await self._delay_stop(serving)
            await self._drain(serving)
        finally:
            for task in links:
                task.cancel()
            await asyncio.wait(links)
            await asyncio.gather(*(server.stop(0) for server in servers))
            for closable in (self._store, self._work, self._background):
                if closable is not None:
                    await closable.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
            self.access.close()

    async def _start_peer(self) -> list[grpc.aio.Server]:
        """Starts the peer port, on which other gateways abort requests of this gateway. Returns [] if the port is 0.

        An abort for requests of all API keys is accepted only if the port is on loopback or needs a token.
        """
        host, port = self._settings.peer_host, self._settings.peer_port
        if not port:
            return []
        operators = bool(self.token) or is_loopback(host)
        servicer = PeerServicer(self._peers.name, self.aborter.abort_here, self._tenants, operators)

        def add(server: grpc.aio.Server) -> None:
            gateway_pb2_grpc.add_GatewayPeerServicer_to_server(servicer, server)

        try:
            guard = None if self._mtls is None else PortGuard(self._mtls, Role.GATEWAY)
            server, _ = await start_guarded_server(host, port, self.token, add, guard)
        except RuntimeError:
            raise _port_in_use(host, port) from None
        return [server]

    async def _start_health(self, health: grpc_server.HealthService) -> grpc_server.GrpcServer:
        host, port = self._settings.host, self._settings.health_port
        try:
            return await grpc_server.start_server(host, port, health, lambda server: None)
        except RuntimeError:
            raise _port_in_use(host, port) from None

    @staticmethod
    async def _wait_for_stop(stop: asyncio.Event, endless: list[asyncio.Task[None]]) -> None:
        """Returns when `stop` is set.

        If one of the endless tasks ends first, raises the task's exception, or a RuntimeError if the task has none. The process
        then exits, and Kubernetes restarts it.
        """
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([stopped, *endless], return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done():
            stopped.cancel()
            for task in endless:
                if task.done():
                    task.result()
                    raise RuntimeError("a background task of the gateway ended without an error before the gateway was stopped")

    async def _delay_stop(self, serving: asyncio.Task[None]) -> None:
        """Continues to serve for stop_delay_s. During this time /ready fails, so load balancers stop sending requests.

        Each connection closes after its next response, so that no load balancer reuses it.
        """
        self._http.close_after_answers()
        if self._settings.stop_delay_s:
            await asyncio.wait((serving,), timeout=self._settings.stop_delay_s)

    async def _drain(self, serving: asyncio.Task[None]) -> None:
        """Ends all requests.

        1. The gateway accepts no new connections, starts no batch lines, and releases its background responses to other gateways.
        2. Requests in flight and batch lines have grace_s to end.
        3. The remaining requests end with an error. Other gateways continue the remaining batch lines.
        """
        self._http.stop()
        works = [work.drain() for work in (self._background, self._work) if work is not None]
        lines = asyncio.ensure_future(asyncio.gather(*works))
        await asyncio.wait((serving, lines), timeout=self._settings.grace_s)
        lines.cancel()
        if not serving.done():
            logger.warning("the grace period has passed; ending the remaining requests")
            self.service.end_all(unavailable("The server is shutting down.", self._settings.retry_after_s, "shutting_down"))
            await asyncio.wait((serving,), timeout=CLOSE_S)
        if not serving.done():
            self._http.force_exit = True
            serving.cancel()
            await asyncio.wait((serving,), timeout=CLOSE_S)


def _tls(settings: GatewaySettings) -> TlsFiles | None:
    if not settings.tls_cert_file:
        return None
    try:
        return TlsFiles(Path(settings.tls_cert_file), Path(settings.tls_key_file))
    except (OSError, ssl.SSLError) as error:
        files = f"--tls-cert-file {settings.tls_cert_file} and --tls-key-file {settings.tls_key_file}"
        raise http_server.CannotListen(f"{files} are not usable: {error}") from None


def _http_options(
    settings: GatewaySettings, metrics: GatewayMetrics, access: AccessLog, tls: TlsFiles | None
) -> http_server.HttpOptions:
    def refused(error: ApiError) -> None:
        metrics.requests.labels(OTHER, OTHER, str(error.status)).inc()
        access.refused(error.status, error.code or "", len(error.json()))

    return http_server.HttpOptions(
        keep_alive_s=settings.keep_alive_s,
        retry_after_s=settings.retry_after_s,
        on_refused=refused,
        tls=None if tls is None else tls.context,
    )


def _access_log(settings: GatewaySettings) -> AccessLog:
    try:
        return AccessLog(settings.access_log, settings.access_log_file)
    except OSError as error:
        raise http_server.CannotListen(f"--access-log-file {error.filename} is not writable: {error.strerror}") from None


def _keys(settings: GatewaySettings, token: str, peers: PeerGateways, metrics: GatewayMetrics) -> KeyRing:
    options = KeyOptions(
        settings.api_keys_file,
        token,
        settings.redis_url,
        peers.name.hex(),
        lambda: peers.num_known,
        salt_cache=settings.salt_cache_by_key,
        low_first=settings.schedule_low_priority_values_first,
    )
    try:
        return KeyRing(options, metrics)
    except BadKeys as error:
        raise http_server.CannotListen(f"API keys: {error}") from None


def _store(settings: GatewaySettings) -> RedisStore | None:
    """Returns the store of clients' records, or None if no URL is set. Raises CannotListen if the URL is invalid."""
    if not settings.state_redis_url:
        return None
    try:
        ttl_s, records, size = settings.state_ttl_s, settings.state_records_per_key, settings.state_bytes_per_key
        return RedisStore(settings.state_redis_url, ttl_s, records, size, settings.state_patience_s)
    except ValueError as error:
        raise http_server.CannotListen(f"state_redis_url: {error}") from None


def _token(settings: GatewaySettings) -> str:
    try:
        return read_token(settings.control_token, settings.control_token_file)
    except ValueError as error:
        raise http_server.CannotListen(str(error)) from None


def _mtls(settings: GatewaySettings) -> MutualTls | None:
    try:
        return mutual_tls(settings, Role.GATEWAY)
    except ValueError as error:
        raise http_server.CannotListen(f"TLS between services: {error}") from None


def _port_in_use(host: str, port: int) -> http_server.CannotListen:
    return http_server.CannotListen(f"cannot listen on port {port} of {host}: Address already in use")
