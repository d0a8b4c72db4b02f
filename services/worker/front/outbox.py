"""Queues the messages to gateways, by stream: outputs of the scheduler, and load reports.

All code runs on the asyncio loop, except StreamOutbox.send() and LoadReport.iteration_ended(), which the scheduler's thread
calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol

from rootstock_llm.protos import common_pb2, worker_pb2
from rootstock_llm.services.shared.field_refusal import worded
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.worker.core.contracts.counters import StepStats
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, Finish, PeerOutput
from rootstock_llm.services.worker.core.contracts.plan import PromptLogprobs, RowLogprobs
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation
from rootstock_llm.services.worker.core.contracts.transfers import Tier
from rootstock_llm.services.worker.front.wire import InvalidRequest
from rootstock_llm.services.worker.loop.progress import Pulse, StepLimit

logger = logging.getLogger(__name__)

# Largest size in bytes of merged outputs. If a gateway reads slowly, the outputs of several steps are merged into one message,
# whose size gRPC limits.
MERGED_BYTES = 1 << 20
GAP_S = 0.1  # shortest time in seconds between two load reports, except after a change of `paused` or `refuses_new`
EXPERT_BYTES = 16 << 20  # largest size in bytes of the routed experts of a message, unless one request has more
BEAT_S = 1.0  # longest time in seconds between two load reports


class ProtocolError(Exception):
    """A gateway has violated the protocol. The caller closes its stream, which ends all requests of the stream."""


class GatewayStream:
    """The queued messages of one gateway stream.

    While the gateway reads slowly, outputs are merged up to MERGED_BYTES, and a new load replaces an unsent load. Memory
    therefore grows with the number of requests and not with the number of steps.
    """

    def __init__(self) -> None:
        self._pending: deque[worker_pb2.StepOutput] = deque()
        self._last_bytes = 0  # size in bytes of the last pending message; 0: not computed yet
        self._load: worker_pb2.WorkerLoad | None = None  # load report that is not sent yet
        self._hello: worker_pb2.WorkerInfo | None = None  # hello message that is not sent yet
        self._ends = False  # whether the stream ends after the queued messages
        self._ready = asyncio.Event()
        self.open: set[int] = set()  # handles of requests without a terminal output
        self.reported: worker_pb2.WorkerLoad | None = None  # last queued load, without the fields that change in every step
        self.reported_at = 0.0  # time at which `reported` was queued, on the asyncio loop's clock

    def opened(self, handle: int) -> None:
        """Records a new request, which is open until its terminal output. Raises ProtocolError if its handle is already open."""
        if handle in self.open:
            raise ProtocolError(f"handle {handle} is in use")
        self.open.add(handle)

    def put(self, message: worker_pb2.StepOutput) -> None:
        """Queues outputs. Merges them into the last pending message if the merged message does not exceed MERGED_BYTES."""
        size = message.ByteSize() if self._pending else 0
        if self._pending and (merged := (self._last_bytes or self._pending[-1].ByteSize()) + size) <= MERGED_BYTES:
            self._pending[-1].MergeFrom(message)
            self._last_bytes = merged
        else:
            self._pending.append(message)
            self._last_bytes = size
        self._ready.set()

    def put_hello(self, info: worker_pb2.WorkerInfo) -> None:
        """Queues a hello, which is sent before the pending outputs.

        Outputs of the previous revision may follow the hello. This is safe, because the gateway fixes a request's revision when
        it submits the request.
        """
        self._hello = info
        self._ready.set()

    def put_load(self, load: worker_pb2.WorkerLoad, stable: worker_pb2.WorkerLoad, now: float) -> None:
        """Queues a load, which replaces an unsent load. `stable` is the load without the fields that change in every step."""
        self._load, self.reported, self.reported_at = load, stable, now
        self._ready.set()

    def end(self) -> None:
        """Ends the stream after the pending messages."""
        self._ends = True
        self._ready.set()

    async def take(self) -> worker_pb2.GenerateResponse | None:
        """Waits for the next message and returns it, or None at the end of the stream.

        Hellos and loads come first, because outputs could otherwise starve them. Hellos and loads are too rare to delay outputs.
        """
        while True:
            await self._ready.wait()
            if self._hello is not None:
                hello, self._hello = self._hello, None
                return worker_pb2.GenerateResponse(hello=hello)
            if self._load is not None:
                load, self._load = self._load, None
                return worker_pb2.GenerateResponse(load=load)
            if self._pending:
                return worker_pb2.GenerateResponse(step=self._pending.popleft())
            if self._ends:
                return None
            self._ready.clear()


class StreamOutbox:
    """Distributes the outputs of the scheduler's loop to the gateway streams. Drops outputs for a stream that has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[int, GatewayStream] = {}
        self._ended = asyncio.Event()  # set when a request or a stream has ended
        self._drops_outputs = False  # whether outputs are dropped, because end() was called
        self.closed = ""  # reason for which new requests are refused; empty: new requests are accepted

    @property
    def streams(self) -> list[GatewayStream]:
        return list(self._streams.values())

    @property
    def num_open(self) -> int:
        """Number of requests without a terminal output, over all streams."""
        return sum(len(stream.open) for stream in self._streams.values())

    async def wait_empty(self) -> None:
        """Waits until every request has its terminal output."""
        while self.num_open:
            self._ended.clear()
            await self._ended.wait()

    def open(self, peer: int) -> GatewayStream:
        stream = self._streams[peer] = GatewayStream()
        return stream

    def close(self, peer: int) -> None:
        del self._streams[peer]
        self._ended.set()

    def end(self) -> None:
        """Ends every stream after its pending messages.

        Open requests end with the error UNAVAILABLE. Later outputs of the scheduler's loop are dropped.
        """
        self._drops_outputs = True
        for stream in self._streams.values():
            if stream.open:
                stream.put(worker_pb2.StepOutput(finishes=[unavailable(handle, self.closed) for handle in sorted(stream.open)]))
                stream.open.clear()
            stream.end()
        self._ended.set()

    def send(self, outputs: tuple[PeerOutput, ...]) -> None:
        """Passes outputs to the asyncio loop. Called on the thread of the scheduler's loop."""
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, peers: tuple[PeerOutput, ...]) -> None:
        if self._drops_outputs:
            return
        for output in peers:
            _log_faults(output)
            if stream := self._streams.get(output.peer):
                stream.open.difference_update(finish.handle for finish in output.finishes)
                self._ended.set()
                for part in parts_of(output):
                    stream.put(output_to_pb(part))


def _log_faults(output: PeerOutput) -> None:
    """Logs each internal error with its request id, because the log line at the origin of the error has no request id."""
    for finish in output.finishes:
        if finish.error is ErrorCode.INTERNAL:
            logger.error("request failed: %s", finish.message, extra=fields(request_id=finish.request_id))


class IndexState(Protocol):
    """This worker's lease and its progress in the prefix index. Read on the asyncio loop."""

    @property
    def lease_held(self) -> bool: ...

    @property
    def generation(self) -> int: ...

    @property
    def seq(self) -> int:
        """Sequence number of the last event batch of this generation that Redis has stored; 0: no batch."""
        ...


@dataclass(frozen=True, slots=True)
class NoIndex:
    """The index state of a worker without Redis."""

    generation: int
    lease_held: bool = False
    seq: int = 0


class LoadReport:
    """Sends the worker's load to each gateway stream.

    A load is sent after a change, but at most every gap_s seconds, and without a change every beat_s seconds. A change of
    `paused` or `refuses_new` is sent immediately. The reports run on the asyncio loop and not on the scheduler's thread, so that
    gateways get the age of a step while it is computed.
    """

    def __init__(
        self,
        outbox: StreamOutbox,
        page_size: int,
        index: IndexState,
        pulse: Pulse,
        limit: StepLimit,
        gap_s: float = GAP_S,
        beat_s: float = BEAT_S,
    ) -> None:
        """Prepares the reports; run() sends them.

        Args:
            outbox: the gateway streams.
            page_size: tokens of a page.
            index: state of this worker in the prefix index.
            pulse: the scheduler loop's signs of life, from which the age of the step in flight is computed.
            limit: time limit of a step.
            gap_s: shortest time in seconds between two reports.
            beat_s: longest time in seconds between two reports.
        """
        self._outbox = outbox
        self._page_size = page_size
        self._index = index
        self._pulse, self._limit = pulse, limit
        self._gap_s, self._beat_s = gap_s, beat_s
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # set when the load may have changed since the last report
        self._signalled = False  # whether the scheduler's thread has set _changed since the last report
        self.stats: StepStats | None = None  # stats of the scheduler loop's last iteration; None before the first iteration

    @property
    def num_requests(self) -> int:
        """Number of running and waiting requests after the scheduler loop's last iteration. Readable from any thread."""
        return 0 if self.stats is None else self.stats.num_running + self.stats.num_waiting

    @property
    def num_reservations(self) -> int:
        """Number of open KV reservations after the scheduler loop's last iteration. Readable from any thread."""
        return 0 if self.stats is None else self.stats.num_rooms

    def iteration_ended(self, stats: StepStats) -> None:
        """Stores the stats of an iteration of the scheduler's loop. Called on the scheduler's thread.

        Wakes the asyncio loop at most once between two reports, because a wake-up costs the scheduler's thread time.
        """
        before = (False, False) if self.stats is None else (self.stats.paused, self.stats.refuses_new)
        self.stats = stats
        if (stats.paused, stats.refuses_new) != before:
            self._loop.call_soon_threadsafe(self.send_due)
        elif not self._signalled:
            self._signalled = True
            self._loop.call_soon_threadsafe(self._changed.set)

    def changed(self) -> None:
        """Requests a report, because a field of the load that does not come from the stats may have changed."""
        self._changed.set()

    def send_first(self, stream: GatewayStream) -> None:
        """Sends the first load on a new stream."""
        self._put(stream, self._stable_load(stream), self._loop.time())

    def send_due(self) -> float:
        """Sends the load on each stream whose load has changed or was sent beat_s seconds ago.

        Returns:
            The seconds until a stream needs a load again because of beat_s.
        """
        self._changed.clear()
        self._signalled = False  # reset before the stats are read, so that stats that arrive meanwhile cause another report
        now, due_s = self._loop.time(), self._beat_s
        for stream in self._outbox.streams:
            load = self._stable_load(stream)
            if load != stream.reported or now - stream.reported_at >= self._beat_s:
                self._put(stream, load, now)
            due_s = min(due_s, stream.reported_at + self._beat_s - now)
        return due_s

    async def run(self) -> None:
        """Sends reports until it is cancelled."""
        while True:
            due_s = self.send_due()
            await asyncio.sleep(self._gap_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(due_s - self._gap_s, 0.0)):
                    await self._changed.wait()

    def _put(self, stream: GatewayStream, load: worker_pb2.WorkerLoad, now: float) -> None:
        """Queues the load with the fields that change in every step. A change of only these fields causes no report."""
        complete = worker_pb2.WorkerLoad()
        complete.CopyFrom(load)
        complete.step_age_ms, complete.step_limit_ms = math.ceil(self._pulse.age_s * 1e3), math.ceil(self._limit.seconds * 1e3)
        stats = self.stats
        if stats is not None:
            complete.running_tokens = stats.pages_used * self._page_size
            complete.prompt_tokens, complete.cached_prompt_tokens = stats.prompt_tokens_total, stats.cached_tokens_total
            if stats.host_saves is not None:
                complete.host_saves = stats.host_saves
            if stats.storage_saves is not None:
                complete.storage_saves = stats.storage_saves
            complete.generated_tokens, complete.retractions = stats.generated_tokens_total, stats.retractions_total
        stream.put_load(complete, load, now)

    def _stable_load(self, stream: GatewayStream) -> worker_pb2.WorkerLoad:
        """Returns the load without the fields that change in every step. A change of the returned fields causes a report."""
        index = self._index
        load = worker_pb2.WorkerLoad(
            num_open=self._outbox.num_open,
            num_open_here=len(stream.open),
            draining=bool(self._outbox.closed),
            lease_held=index.lease_held,
            index_generation=index.generation,
            index_seq=index.seq,
        )
        stats = self.stats
        if stats is not None:
            load.num_running, load.num_waiting = stats.num_running, stats.num_waiting
            load.used_tokens = stats.pages_used * self._page_size + stats.waiting_tokens
            load.cached_tokens = stats.pages_evictable * self._page_size
            load.paused, load.pulls_lose = stats.paused, stats.pulls_lose
            load.refuses_new = stats.refuses_new
        return load


def unavailable(handle: int, message: str) -> worker_pb2.Finish:
    """Returns a finish with the error UNAVAILABLE, after which the gateway may send the request to another worker."""
    return worker_pb2.Finish(
        handle=handle, reason=common_pb2.FINISH_REASON_ABORT, error=common_pb2.ERROR_CODE_UNAVAILABLE, message=message
    )


def refusal_to_pb(message: worker_pb2.Submit, error: InvalidRequest) -> worker_pb2.Finish:
    return worker_pb2.Finish(
        handle=message.handle,
        reason=common_pb2.FINISH_REASON_ABORT,
        error=common_pb2.ERROR_CODE_INVALID_ARGUMENT,
        field=error.field,
        element=error.element,
        message=str(error),  # also contains the field's name, for older gateways that do not read `field`
        prompt_tokens=len(message.prompt_ids),
    )


def parts_of(output: PeerOutput) -> list[PeerOutput]:
    """Splits an output whose routed experts exceed EXPERT_BYTES, because gRPC limits the size of a message.

    All outputs of a request are in the same part, so that no token arrives before its experts. Requests without routed experts
    are in the first part.
    """
    sizes = Counter[int]()
    for handle, ids in output.routed_experts:
        sizes[handle] += ids.nbytes
    part_of: dict[int, int] = {}  # index of the part by handle
    filled = last = 0
    for handle, size in sizes.items():
        if filled and filled + size > EXPERT_BYTES:
            last, filled = last + 1, 0
        part_of[handle] = last
        filled += size
    if not last:
        return [output]
    parts = [PeerOutput(output.peer) for _ in range(last + 1)]
    ends = itertools.accumulate(output.counts)
    for handle, count, end in zip(output.handles, output.counts, ends, strict=True):
        part = parts[part_of.get(handle, 0)]
        part.handles.append(handle)
        part.counts.append(count)
        part.tokens += output.tokens[end - count : end]
    for finish in output.finishes:
        parts[part_of.get(finish.handle, 0)].finishes.append(finish)
    for name in ("logprobs", "prompt_logprobs", "routed_experts", "predicted"):
        for pair in getattr(output, name):
            getattr(parts[part_of.get(pair[0], 0)], name).append(pair)
    parts[0].ready = output.ready
    return parts


def output_to_pb(output: PeerOutput) -> worker_pb2.StepOutput:
    return worker_pb2.StepOutput(
        handles=output.handles,
        counts=output.counts,
        token_ids=output.tokens,
        finishes=[_finish_to_pb(finish) for finish in output.finishes],
        logprobs=[_rows_to_pb(handle, rows) for handle, rows in output.logprobs],
        prompt_logprobs=[_prompt_rows_to_pb(handle, rows) for handle, rows in output.prompt_logprobs],
        predicted_handles=[handle for handle, _ in output.predicted],
        accepted_prediction_tokens=[verified.right_predicted for _, verified in output.predicted],
        rejected_prediction_tokens=[verified.predicted - verified.right_predicted for _, verified in output.predicted],
        ready=[
            worker_pb2.PagesReady(handle=each.handle, room=_reservation_to_pb(each.reservation, each.num_pages))
            for each in output.ready
        ],
        routed_experts=[
            worker_pb2.RoutedExperts(handle=handle, ids=ids.astype("<u2", copy=False).tobytes())
            for handle, ids in output.routed_experts
        ],
    )


def _rows_to_pb(handle: int, rows: list[RowLogprobs]) -> worker_pb2.LogprobRows:
    return worker_pb2.LogprobRows(
        handle=handle,
        values=[row.sampled for row in rows],
        k=len(rows[0].top_ids) if rows else 0,
        top_ids=[token for row in rows for token in row.top_ids],
        top_values=[value for row in rows for value in row.top],
        chosen_values=[value for row in rows for value in row.chosen],
    )


def _prompt_rows_to_pb(handle: int, rows: PromptLogprobs) -> worker_pb2.LogprobRows:
    return worker_pb2.LogprobRows(
        handle=handle,
        values=rows.values.tolist(),
        k=rows.top_ids.shape[1],
        top_ids=rows.top_ids.ravel().tolist(),
        top_values=rows.top.ravel().tolist(),
        chosen_values=rows.chosen.ravel().tolist(),
    )


def _finish_to_pb(finish: Finish) -> worker_pb2.Finish:
    pb = worker_pb2.Finish(
        handle=finish.handle,
        reason=int(finish.reason),  # type: ignore[arg-type]
        matched_stop=finish.matched_stop,
        error=int(finish.error),  # type: ignore[arg-type]
        field=finish.field,
        element=finish.element,
        prompt_tokens=finish.prompt_tokens,
        cached_tokens=finish.cached_tokens,
        completion_tokens=finish.completion_tokens,
        queue_ms=int(finish.queue_s * 1000),
        embedding=() if finish.embedding is None else finish.embedding.tolist(),
        label_logprobs=() if finish.label_logprobs is None else finish.label_logprobs.tolist(),
        retractions=finish.retractions,
        verified_rows=finish.verified.rows,
        drafted_tokens=finish.verified.drafted,
        accepted_tokens=finish.verified.accepted,
        cached_device_tokens=finish.cached_from.get(Tier.DEVICE, 0),
        cached_host_tokens=finish.cached_from.get(Tier.HOST, 0),
        cached_storage_tokens=finish.cached_from.get(Tier.STORAGE, 0),
        cached_peer_tokens=finish.cached_from.get(Tier.PEER, 0),
    )
    if finish.message:
        pb.message = worded(finish.field, finish.element, finish.message)
    if finish.reservation is not None:
        pb.room.CopyFrom(_reservation_to_pb(finish.reservation, finish.reserved_pages))
    if finish.matched_token >= 0:
        pb.matched_token = finish.matched_token
    return pb


def _reservation_to_pb(reservation: KvReservation, pages: int) -> worker_pb2.KvRoom:
    return worker_pb2.KvRoom(room=reservation.number, epoch=reservation.epoch, secret=reservation.secret, pages=pages)
