"""python -m rootstock_llm.services.worker: creates the parts of a worker, connects them and serves.

The asyncio loop serves gRPC. The thread `scheduler` runs loop.Loop, which calls core and executor. The executor's threads
compute.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import sys
from collections.abc import Callable
from hashlib import blake2b
from typing import cast

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from rootstock_llm.protos import worker_pb2, worker_pb2_grpc
from rootstock_llm.services.shared.observe import log, metrics_server
from rootstock_llm.services.shared.observe.tracing import start_tracing
from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.shared.rpc.grpc_server import PortGuard
from rootstock_llm.services.shared.settings import WRONG_SETTINGS, load, served_name
from rootstock_llm.services.shared.tls.metrics import TlsMetrics
from rootstock_llm.services.shared.tls.mutual_tls import mutual_tls
from rootstock_llm.services.shared.tls.roles import Role
from rootstock_llm.services.worker.control.server import ControlAddress, start_control
from rootstock_llm.services.worker.core.contracts.counters import StepStats
from rootstock_llm.services.worker.core.contracts.messages import PeerOutput
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan
from rootstock_llm.services.worker.core.kv.cache_events import CacheEvents
from rootstock_llm.services.worker.engine import Engine, build_engine
from rootstock_llm.services.worker.front.drain import drain
from rootstock_llm.services.worker.front.outbox import LoadReport, NoIndex, StreamOutbox
from rootstock_llm.services.worker.front.server import WorkerServicer
from rootstock_llm.services.worker.front.spans import RequestSpans
from rootstock_llm.services.worker.front.wire import ModelLimits
from rootstock_llm.services.worker.grammar.book import UnusedGrammars
from rootstock_llm.services.worker.index.metrics import PublisherMetrics
from rootstock_llm.services.worker.index.publisher import IndexPublisher
from rootstock_llm.services.worker.loop.first_steps import run_first_steps
from rootstock_llm.services.worker.loop.inbox import Inbox
from rootstock_llm.services.worker.loop.loop import Loop, MaskSource
from rootstock_llm.services.worker.loop.progress import Pulse, StepLimit, Watchdog, attention_span
from rootstock_llm.services.worker.loop.text_rules import ModelText
from rootstock_llm.services.worker.loop.thread import SchedulerThread
from rootstock_llm.services.worker.metrics.executor_metrics import ExecutorMetrics
from rootstock_llm.services.worker.metrics.grammar_metrics import GrammarMetrics
from rootstock_llm.services.worker.metrics.loading_metrics import LoadMetrics, ReloadMetrics
from rootstock_llm.services.worker.metrics.peer_metrics import PeerMetrics, PeerReadMetrics
from rootstock_llm.services.worker.metrics.phase import LifeMetrics, WorkerLife
from rootstock_llm.services.worker.metrics.scheduler_metrics import LoopCounts, WorkerMetrics
from rootstock_llm.services.worker.pod_cost import PodCost, pod_patch
from rootstock_llm.services.worker.settings import WorkerSettings
from rootstock_llm.services.worker.worker_id import worker_id

logger = logging.getLogger("rootstock_llm.services.worker")


class LoopObserver:
    """Passes the events of the scheduler loop to metrics, watchdog, load reports and the prefix index."""

    def __init__(
        self,
        counts: LoopCounts,
        pulse: Pulse,
        limit: StepLimit,
        load_report: LoadReport,
        publisher: IndexPublisher | None,
    ) -> None:
        self._counts, self._pulse, self._limit, self._load = counts, pulse, limit, load_report
        self._publisher = publisher

    def rests(self) -> None:
        self._pulse.rest()
        self._counts.rests()

    def wakes(self) -> None:
        self._pulse.beat()
        self._counts.wakes()

    def commanded(self, deadline: float | None) -> None:
        if deadline is None:
            self._pulse.beat()
        else:
            self._pulse.begin_command(deadline)

    def planned(self, plan: BatchPlan) -> None:
        self._pulse.beat()
        self._counts.planned(plan)

    def ended(self, plan: BatchPlan, seconds: float) -> None:
        self._pulse.beat()
        self._counts.ended(plan, seconds)
        self._limit.record_step(plan, seconds)

    def iteration_ended(self, stats: StepStats, busy: bool) -> None:
        self._pulse.beat()
        self._counts.iteration_ended(stats)
        self._load.iteration_ended(stats)

    def cached(self, events: CacheEvents) -> None:
        self._counts.cached(events)
        if self._publisher is not None:
            self._publisher.cached(events)


class MeasuredOutbox:
    """An outbox that records the latencies of outputs before they are sent."""

    def __init__(self, worker_metrics: WorkerMetrics, outbox: StreamOutbox) -> None:
        self._metrics, self._outbox = worker_metrics, outbox

    def send(self, outputs: tuple[PeerOutput, ...]) -> None:
        self._metrics.times.sent(outputs)
        self._outbox.send(outputs)


def _info(settings: WorkerSettings, engine: Engine, generation: int) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        worker_id=worker_id(settings),
        generation=generation,
        model=engine.weights.identity.model,
        context_len=engine.info.context_len,
        vocab_size=engine.info.vocab_size,
        page_size=engine.info.page_size,
        num_pages=engine.info.num_pages,
        max_running_requests=engine.core.config.max_running_requests,
        generates=engine.info.generates,
        embedding_size=engine.info.embedding_size,
        revision=engine.weights.identity.revision,
        tokenizer=engine.weights.identity.tokenizer,
        publishes_index=engine.publishes_index,
        control_port=settings.control_port,
        auto_truncates=settings.allow_auto_truncate,
        sampling_defaults=worker_pb2.SamplingDefaults(**engine.defaults.as_dict()),
        numerics=engine.info.numerics,
        quantization=engine.info.quantization,
        role="" if settings.disaggregation_mode == "both" else settings.disaggregation_mode,
        kv_port=engine.info.kv_port,
        kv_hold_ms=math.ceil(settings.disaggregation_hold_s * 1000) if engine.info.kv_port else 0,
        kv_layout=blake2b(engine.info.kv_layout.encode(), digest_size=16).digest(),
        reads_predictions=_reads_predictions(settings, engine),
        ends_with_prompt=True,
        marks_hit_ends=bool(engine.core.config.groups),
        routed_experts_per_token=_routed_per_token(settings, engine),
    )


def _limits(settings: WorkerSettings, engine: Engine) -> ModelLimits:
    info = engine.info
    return ModelLimits(
        info.context_len,
        info.vocab_size,
        settings.allow_auto_truncate,
        info.generates,
        info.embedding_size,
        lambda text: engine.tokenizer.encode_batch([text], False)[0],
        engine.defaults,
        settings.stream_interval,
        _reads_predictions(settings, engine),
        _routed_per_token(settings, engine),
    )


def _reads_predictions(settings: WorkerSettings, engine: Engine) -> bool:
    return engine.info.max_drafts > 0 and settings.speculative_algorithm == "ngram"


def _routed_per_token(settings: WorkerSettings, engine: Engine) -> int:
    """Returns the expert ids per token that a request may get; 0 if the model has no experts or the setting is off."""
    experts = engine.info.experts
    return experts.ids_per_token if experts is not None and settings.enable_return_routed_experts else 0


def _registry(settings: WorkerSettings) -> CollectorRegistry:
    """Returns a registry with the process's metrics, and starts the HTTP server of /metrics."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    metrics_server.serve(registry, settings.metrics_host, settings.metrics_port)
    return registry


def _register(registry: CollectorRegistry, worker_metrics: WorkerMetrics, engine: Engine, model: str) -> None:
    registry.register(worker_metrics)
    registry.register(LoadMetrics(engine.info, model))
    registry.register(ReloadMetrics(lambda: engine.weights.reload_s, model))
    if engine.stats is not None:
        registry.register(ExecutorMetrics(engine.stats, model))
    if engine.kv_server is not None:
        registry.register(PeerMetrics(engine.kv_server, model))
    if engine.peer_reader is not None:
        registry.register(PeerReadMetrics(engine.peer_reader, model))
    if engine.book is not None:
        pool = engine.book.pool
        grammar_metrics = GrammarMetrics(model, lambda: pool.timeouts)
        engine.book.on_compiled = grammar_metrics.compiled
        registry.register(grammar_metrics)


def _watchdog(settings: WorkerSettings, pulse: Pulse, health: grpc_server.HealthService, life: WorkerLife) -> Watchdog:
    loop = asyncio.get_running_loop()

    def on_hang() -> None:
        life.hung()
        _report_liveness(loop, health, life)

    def on_recover() -> None:
        life.recovered()
        _report_liveness(loop, health, life)

    return Watchdog(pulse, settings.watchdog_timeout_s, on_hang, on_recover)


def _on_lost(loop: asyncio.AbstractEventLoop, health: grpc_server.HealthService, life: WorkerLife) -> Callable[[str], None]:
    """Returns the handler of a lost device. It makes liveness fail, because only a new process can use the device again."""

    def on_lost(sentence: str) -> None:
        logger.critical("%s", sentence)
        life.lost_device()
        _report_liveness(loop, health, life)

    return on_lost


async def serve(settings: WorkerSettings) -> None:
    """Serves until SIGTERM or SIGINT.

    /metrics is available from the start. The health service reports ready when the model is loaded and _warm_up() has ended.
    """
    health = grpc_server.HealthService("worker")
    registry = _registry(settings)
    life = WorkerLife()
    registry.register(LifeMetrics(life, served_name(settings.model, settings.served_model_name)))
    inbox, outbox = Inbox(), StreamOutbox(asyncio.get_running_loop())
    mtls = mutual_tls(settings, Role.WORKER)
    if mtls is not None:
        registry.register(TlsMetrics(mtls))
    engine = await asyncio.to_thread(build_engine, settings, inbox, _on_lost(asyncio.get_running_loop(), health, life))
    warming = asyncio.create_task(_warm_up(settings, engine))
    info = _info(settings, engine, secrets.randbits(63))
    if settings.enable_return_routed_experts and not info.routed_experts_per_token:
        logger.warning("--enable-return-routed-experts has no effect: this model has no experts that the worker can report")
    counts = LoopCounts(info.page_size, info.num_pages)
    worker_metrics = WorkerMetrics(info.model, counts, engine_type=info.role or "unified")
    _register(registry, worker_metrics, engine, info.model)
    publisher = _publisher(settings, info, registry)
    pulse = Pulse()
    limit = StepLimit(lambda: engine.core.config, attention_span(engine.info), settings.watchdog_timeout_s)
    watchdog = _watchdog(settings, pulse, health, life)
    load_report = LoadReport(outbox, info.page_size, publisher or NoIndex(info.generation), pulse, limit)
    measured = MeasuredOutbox(worker_metrics, outbox)
    observer = LoopObserver(counts, pulse, limit, load_report, publisher)
    overlap = (settings.enable_overlap, settings.consecutive_prefill_overlap)
    tracing = start_tracing(settings, "worker")
    spans = None if tracing is None else RequestSpans(tracing, asyncio.get_running_loop())
    masks = cast(MaskSource, engine.masks)  # safe: engine.masks takes XgrammarMatcher, the type of all matchers of the book
    loop = Loop(engine.core, engine.executor, inbox, measured, observer, masks, *overlap, spans=spans)
    scheduler = SchedulerThread(loop, inbox, lambda: _first_steps(settings, engine, pulse, limit))
    limits, arrived = _limits(settings, engine), worker_metrics.times.arrived
    servicer = WorkerServicer(inbox, outbox, info, limits, arrived, load_report, spans, engine.keys)
    # Gateways may connect before the worker is ready. A gateway counts a worker without load reports as lost.
    background = [asyncio.create_task(load_report.run())]
    stop = grpc_server.stop_signal()
    guard = None if mtls is None else PortGuard(mtls, Role.GATEWAY)
    server = await grpc_server.start_server(
        settings.host,
        settings.port,
        health,
        lambda s: worker_pb2_grpc.add_WorkerServicer_to_server(servicer, s),
        guard=guard,
    )
    probes = await grpc_server.start_probe_port(settings.host, settings.health_port, health)
    control_guard = None if mtls is None else PortGuard(mtls, Role.GATEWAY, Role.OPERATOR)
    engine.weights.on_replaced = servicer.weights_replaced
    kv_peers = engine.peer_reader.rates if engine.peer_reader is not None else tuple
    address = _control_address(settings)
    control = await start_control(address, inbox.put, info.worker_id, info.model, engine.weights, control_guard, kv_peers)
    scheduler.start()
    watchdog.start()
    publishing = asyncio.create_task(publisher.run()) if publisher else None
    await _wait_for_either(warming, stop)
    if not stop.is_set():
        await health.set_ready(True)
        life.ready()
    if engine.book is not None:
        background.append(asyncio.create_task(UnusedGrammars(engine.book).run()))
    pod_cost = _pod_cost(settings, load_report)
    if pod_cost is not None:
        pod_cost.start()

    async def drain_worker() -> None:
        life.draining()
        await drain(outbox, load_report, scheduler, settings.grace_s)

    await server.serve_until(stop, grpc_server.CLOSE_S, drain_worker)
    scheduler.exit_if_alive()
    for task in background:
        task.cancel()
    if pod_cost is not None:
        pod_cost.stop()
    if control is not None:
        await control.stop(1.0)
    if probes is not None:
        await probes.stop(0)
    watchdog.stop()
    if publishing is not None:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
    engine.close()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)


async def _wait_for_either(task: asyncio.Task[None], stop: asyncio.Event) -> None:
    """Waits until the task ends or `stop` is set. If the task has failed, raises its error."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        task.result()


async def _warm_up(settings: WorkerSettings, engine: Engine) -> None:
    """Starts the grammar compiler before the worker is ready, so that the first request with a grammar does not wait for it.

    With the fake executor, the compiler starts at the first grammar, because tests need a fast start and rarely use grammars.
    """
    if engine.book is not None and settings.executor != "fake":
        await asyncio.to_thread(engine.book.pool.warm_up)


def _first_steps(settings: WorkerSettings, engine: Engine, pulse: Pulse, limit: StepLimit) -> None:
    pulse.beat()
    if settings.executor == "fake":  # fake_step_s sets the time of each step, so no time has to be measured
        return
    text = ModelText(engine.tokenizer)
    run_first_steps(engine.executor, engine.core.config, text, engine.info.generates, limit.record_step)
    logger.info("a step may take %.1f s", limit.seconds)


def _control_address(settings: WorkerSettings) -> ControlAddress:
    return ControlAddress(
        host=settings.control_host,
        port=settings.control_port,
        token=settings.control_token,
        token_file=settings.control_token_file,
        profile_dir=settings.profile_dir,
    )


def _pod_cost(settings: WorkerSettings, load_report: LoadReport) -> PodCost | None:
    if not settings.pod_name or not settings.pod_namespace:
        return None
    return PodCost(lambda: pod_patch(settings.pod_namespace, settings.pod_name), lambda: load_report.num_requests)


def _report_liveness(loop: asyncio.AbstractEventLoop, health: grpc_server.HealthService, life: WorkerLife) -> None:
    """Sets liveness on the asyncio loop, which reads `life` only then, so that the last change of any thread counts."""

    async def report() -> None:
        await health.set_live(not life.is_hung)

    asyncio.run_coroutine_threadsafe(report(), loop)


def _publisher(settings: WorkerSettings, info: worker_pb2.WorkerInfo, registry: CollectorRegistry) -> IndexPublisher | None:
    """Returns the publisher of this worker's lease and cached blocks, or None if no Redis is set.

    If enable_prefix_index is off, the publisher gets no cache events and only renews the lease.
    """
    if not settings.redis_url:
        return None
    publisher = IndexPublisher(settings.redis_url, info.model, info.worker_id, info.generation)
    registry.register(PublisherMetrics(publisher))
    return publisher


def main() -> int:
    grpc_server.end_on_signal()
    settings = load(WorkerSettings, "python -m rootstock_llm.services.worker")
    log.configure("worker", settings.log_level)
    try:
        asyncio.run(serve(settings))
    except (ValueError, OSError, RuntimeError) as error:
        logger.error("cannot serve: %s", error)
        return WRONG_SETTINGS if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
