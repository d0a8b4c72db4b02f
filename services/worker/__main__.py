"""python -m services.worker: wiring.

Threads: the asyncio loop serves gRPC, `scheduler` runs the loop over core and executor, the executor's own compute.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily

from rootstock.v1 import worker_pb2, worker_pb2_grpc
from services.shared import log, metrics, rpc
from services.shared.settings import load
from services.worker.control.server import start_control
from services.worker.core.cache_events import CacheEvents
from services.worker.core.messages import StepOutput, StepStats
from services.worker.core.plan import BatchPlan
from services.worker.engine import Engine, build_engine
from services.worker.inbox import Inbox
from services.worker.loop import Loop
from services.worker.metrics import WorkerMetrics
from services.worker.presence import Presence
from services.worker.scheduler_thread import SchedulerThread
from services.worker.server import StreamOutbox, WorkerServicer
from services.worker.settings import WorkerSettings
from services.worker.watchdog import Watchdog
from services.worker.wire import ModelLimits

logger = logging.getLogger("services.worker")


class LoopObserver:
    """What the loop's turns mean to metrics and watchdog."""

    def __init__(self, worker_metrics: WorkerMetrics, watchdog: Watchdog) -> None:
        self._metrics, self._watchdog = worker_metrics, watchdog

    def planned(self, plan: BatchPlan) -> None:
        self._metrics.planned(plan)

    def turned(self, stats: StepStats, busy: bool) -> None:
        self._watchdog.beat()
        self._metrics.turned(stats, busy)

    def cached(self, events: CacheEvents) -> None:
        self._metrics.cached(events)


class MeasuredOutbox:
    def __init__(self, worker_metrics: WorkerMetrics, outbox: StreamOutbox) -> None:
        self._metrics, self._outbox = worker_metrics, outbox

    def send(self, output: StepOutput) -> None:
        self._metrics.sent(output)
        self._outbox.send(output)


def _info(settings: WorkerSettings, engine: Engine, model_name: str, generation: int) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        worker_id=settings.worker_id or f"{socket.gethostname()}-{settings.port}",
        generation=generation,
        model=model_name,
        context_len=engine.info.context_len,
        vocab_size=engine.info.vocab_size,
        page_size=engine.info.page_size,
        num_pages=engine.info.num_pages,
        max_running_requests=settings.max_running_requests,
        generates=engine.info.generates,
        embedding_size=engine.info.embedding_size,
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
    )


def _registry(settings: WorkerSettings) -> CollectorRegistry:
    """Served from here on."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    metrics.serve(registry, settings.metrics_host, settings.metrics_port)
    return registry


def _watchdog(settings: WorkerSettings, health: rpc.Health) -> Watchdog:
    loop = asyncio.get_running_loop()
    return Watchdog(
        settings.watchdog_timeout_s,
        lambda: _from_thread(loop, health, live=False),
        lambda: _from_thread(loop, health, live=True),
    )


async def serve(settings: WorkerSettings) -> None:
    """Until a signal. Liveness answers while the model loads; readiness follows."""
    health = rpc.Health("worker")
    registry = _registry(settings)
    inbox, outbox = Inbox(), StreamOutbox(asyncio.get_running_loop())
    engine = await asyncio.to_thread(build_engine, settings, inbox)
    model_name = settings.served_model_name or os.path.basename(os.path.abspath(settings.model))
    info = _info(settings, engine, model_name, secrets.randbits(63))
    worker_metrics = WorkerMetrics(model_name, info.page_size, info.num_pages, info.max_running_requests)
    registry.register(worker_metrics)
    presence = _presence(settings, info, registry)
    watchdog = _watchdog(settings, health)
    measured, observer = MeasuredOutbox(worker_metrics, outbox), LoopObserver(worker_metrics, watchdog)
    overlap = (settings.enable_overlap, settings.consecutive_prefill_overlap)
    loop = Loop(engine.core, engine.executor, inbox, measured, observer, engine.masks, *overlap)
    scheduler = SchedulerThread(loop, inbox, outbox)
    servicer = WorkerServicer(inbox, outbox, info, _limits(settings, engine), worker_metrics.arrived)
    server = await rpc.start_server(
        settings.host, settings.port, health, lambda s: worker_pb2_grpc.add_WorkerServicer_to_server(servicer, s)
    )
    control = await start_control(settings, inbox.put, info.worker_id, model_name)
    scheduler.start()
    watchdog.start()
    keeping = asyncio.create_task(presence.keep()) if presence else None
    await health.set_ready(True)
    if engine.book is not None:
        engine.book.pool.warm_up()

    await rpc.serve_until_stopped(server, health, 1.0, lambda: scheduler.drain(settings.grace_s))
    if control is not None:
        await control.stop(1.0)
    watchdog.stop()
    if keeping is not None:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    engine.close()


def _from_thread(loop: asyncio.AbstractEventLoop, health: rpc.Health, live: bool) -> None:
    asyncio.run_coroutine_threadsafe(health.set_live(live), loop)


def _presence(settings: WorkerSettings, info: worker_pb2.WorkerInfo, registry: CollectorRegistry) -> Presence | None:
    if not settings.redis_url:
        return None
    presence = Presence(settings.redis_url, info.worker_id, info.generation)
    registry.register(_PresenceCollector(presence))
    return presence


class _PresenceCollector:
    def __init__(self, presence: Presence) -> None:
        self._presence = presence

    def collect(self) -> list[GaugeMetricFamily]:
        reachable = float(self._presence.reachable)
        return [GaugeMetricFamily("rootstock_worker_redis_up", "Whether Redis took this worker's lease lately.", value=reachable)]


def main() -> int:
    settings = load(WorkerSettings, "rootstock-worker")
    log.configure("worker", settings.log_level)
    try:
        asyncio.run(serve(settings))
    except (ValueError, OSError, RuntimeError) as error:
        logger.error("cannot serve: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
