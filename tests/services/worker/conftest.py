from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from rootstock_llm.protos import worker_pb2, worker_pb2_grpc
from rootstock_llm.services.shared.observe.spans import Tracing
from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.counters import StepStats
from rootstock_llm.services.worker.core.contracts.messages import PeerOutput
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan
from rootstock_llm.services.worker.core.kv.cache_events import CacheEvents
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.core.tiers.page_keys import SECRET_BYTES, PageKeys
from rootstock_llm.services.worker.exec.contracts.protocol import DraftTokens
from rootstock_llm.services.worker.exec.fake import FakeExecutor, TimeModel
from rootstock_llm.services.worker.front.outbox import BEAT_S, GAP_S, LoadReport, NoIndex, StreamOutbox
from rootstock_llm.services.worker.front.server import WorkerServicer
from rootstock_llm.services.worker.front.spans import RequestSpans
from rootstock_llm.services.worker.front.wire import ModelLimits
from rootstock_llm.services.worker.loop.inbox import Inbox
from rootstock_llm.services.worker.loop.loop import Loop
from rootstock_llm.services.worker.loop.progress import Pulse, StepLimit
from rootstock_llm.services.worker.loop.thread import SchedulerThread
from rootstock_llm.services.worker.metrics.scheduler_metrics import LoopCounts, WorkerMetrics
from tests.core.deployed_config import deployed_config
from tests.core.fake_grammar import masks_behind
from tests.core.harness import LetterDecoder

CONFIG = deployed_config(
    num_pages=256,
    page_size=4,
    context_len=256,
    vocab_size=1000,
    eos_token_ids=(7,),
    max_running_requests=32,
    max_queued_requests=40,
)


CAP_S = 300.0  # seconds; the watchdog's limit


@dataclass
class Serving:
    """A worker that runs the fake executor and serves a real gRPC port."""

    address: str  # host and port of the gRPC server
    stub: worker_pb2_grpc.WorkerStub  # stub of the gRPC server
    core: Scheduler  # may be read only while the worker is idle
    executor: FakeExecutor
    metrics: WorkerMetrics
    counts: LoopCounts
    inbox: Inbox
    outbox: StreamOutbox
    load: LoadReport
    scheduler: SchedulerThread
    servicer: WorkerServicer

    async def idle(self) -> StepStats:
        """Waits at most five seconds until no request runs or waits and the counts are current, then returns the statistics."""
        for _ in range(500):
            if self.core.idle and self.counts.stats in (None, self.core.stats()):
                break
            await asyncio.sleep(0.01)
        assert self.core.idle and self.counts.stats in (None, self.core.stats())
        return self.core.stats()


class Observer:
    def __init__(self, metrics: WorkerMetrics, load: LoadReport, pulse: Pulse, limit: StepLimit) -> None:
        self._metrics, self._load, self._pulse, self._limit = metrics, load, pulse, limit

    def rests(self) -> None:
        self._pulse.rest()
        self._metrics.counts.rests()

    def wakes(self) -> None:
        self._pulse.beat()
        self._metrics.counts.wakes()

    def commanded(self, deadline: float | None) -> None:
        if deadline is None:
            self._pulse.beat()
        else:
            self._pulse.begin_command(deadline)

    def planned(self, plan: BatchPlan) -> None:
        self._pulse.beat()
        self._metrics.counts.planned(plan)

    def ended(self, plan: BatchPlan, seconds: float) -> None:
        self._pulse.beat()
        self._metrics.counts.ended(plan, seconds)
        self._limit.record_step(plan, seconds)

    def iteration_ended(self, stats: StepStats, busy: bool) -> None:
        self._pulse.beat()
        self._metrics.counts.iteration_ended(stats)
        self._load.iteration_ended(stats)

    def cached(self, events: CacheEvents) -> None:
        self._metrics.counts.cached(events)


class PlainMasks:
    """Fills masks with the matchers of tests, which make a new mask at each call."""

    def fill(self, matchers: Sequence[tuple[int, Any]]) -> dict[int, Any]:
        return {row: matcher.mask() for row, matcher in matchers}

    def fill_after_drafts(self, matchers: Sequence[tuple[int, Any]], draft_tokens: DraftTokens) -> dict[int, Any]:
        return masks_behind(matchers, draft_tokens)


class CountingOutput:
    """Records the times of outputs in the metrics and sends the outputs to the outbox."""

    def __init__(self, metrics: WorkerMetrics, outbox: StreamOutbox) -> None:
        self._metrics, self._outbox = metrics, outbox

    def send(self, outputs: tuple[PeerOutput, ...]) -> None:
        self._metrics.times.sent(outputs)
        self._outbox.send(outputs)


@asynccontextmanager
async def serving(
    step_s: float = 0.001,
    config: SchedulerConfig = CONFIG,
    overlap: bool = True,
    gap_s: float = GAP_S,
    beat_s: float = BEAT_S,
    tracing: Tracing | None = None,
    revision: str = "",
    info: worker_pb2.WorkerInfo | None = None,
) -> AsyncIterator[Serving]:
    """Yields a serving worker. `info` is merged into the WorkerInfo that follows from the configuration."""
    keys = PageKeys(bytes(SECRET_BYTES), b"", config.page_size) if config.reads_peers else None
    core = Scheduler(config, LetterDecoder(), revision=revision, keys=keys)
    executor = FakeExecutor(
        config.num_pages,
        config.page_size,
        config.max_running_requests,
        config.max_pages_per_request,
        config.vocab_size,
        time_model=TimeModel(base=step_s),
        experts=config.experts,
    )
    counts = LoopCounts(config.page_size, config.num_pages)
    metrics = WorkerMetrics("fake", counts)
    inbox, outbox = Inbox(), StreamOutbox(asyncio.get_running_loop())
    pulse, limit = Pulse(), StepLimit(lambda: core.config, float("inf"), CAP_S)
    load = LoadReport(outbox, config.page_size, NoIndex(5), pulse, limit, gap_s, beat_s)
    spans = None if tracing is None else RequestSpans(tracing, asyncio.get_running_loop())
    observer = Observer(metrics, load, pulse, limit)
    loop = Loop(core, executor, inbox, CountingOutput(metrics, outbox), observer, PlainMasks(), overlap, spans=spans)
    scheduler = SchedulerThread(loop, inbox)
    hello = worker_pb2.WorkerInfo(worker_id="w", generation=5, model="fake", context_len=config.context_len, revision=revision)
    if info is not None:
        hello.vocab_size = config.vocab_size
        hello.MergeFrom(info)
    per_token = 0 if config.experts is None else config.experts.ids_per_token
    limits = ModelLimits(config.context_len, config.vocab_size, False, routed_per_token=per_token)
    servicer = WorkerServicer(inbox, outbox, hello, limits, metrics.times.arrived, load, spans)
    server = grpc.aio.server(options=grpc_server.SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    scheduler.start()
    telling = asyncio.create_task(load.run())
    try:
        async with grpc_server.channel(f"127.0.0.1:{port}") as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            yield Serving(f"127.0.0.1:{port}", stub, core, executor, metrics, counts, inbox, outbox, load, scheduler, servicer)
    finally:
        await scheduler.stop(5)
        await server.stop(0)
        telling.cancel()
    assert scheduler.ended


def run(test: Callable[[], object]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]
