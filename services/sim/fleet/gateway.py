"""Simulates a gateway with the real prefix index, routing policy and queue.

Load reports and events reach it with a delay, as in production.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from rootstock_llm.services.gateway.routing.fair_queue import OUTPUT_WEIGHT, FairQueue, Placed
from rootstock_llm.services.gateway.routing.policies import (
    Pick,
    RoutingQuery,
    SharingMeter,
    WorkerColumns,
    has_free_slot,
    hits_of,
    make_policy,
    pick_prefill,
    speculate,
    usable_reach,
)
from rootstock_llm.services.gateway.routing.prefix_index import PrefixIndex
from rootstock_llm.services.shared.index.prefix_index import BlockTier, block_hashes, cache_namespace, split_hashes
from rootstock_llm.services.sim.core.run.worker import submit_message
from rootstock_llm.services.sim.core.trace.script import Script
from rootstock_llm.services.sim.core.trace.trace import Trace
from rootstock_llm.services.sim.fleet.config import FleetConfig
from rootstock_llm.services.sim.fleet.event_queue import EventQueue
from rootstock_llm.services.sim.fleet.worker import FleetWorker, PrefetchMessage, WorkerLoad, namespace_root, worker_name
from rootstock_llm.services.worker.core.contracts.messages import Finish, FinishReason, PagesReady, PeerOutput, Prefetch, Submit
from rootstock_llm.services.worker.core.contracts.reservations import KvSource
from rootstock_llm.services.worker.core.kv.cache_events import CacheEvents
from rootstock_llm.services.worker.loop.inbox import Abort, PrefetchMore


class LoadView:
    """The workers' load in one gateway's view: its own requests, and other gateways' requests by the last load reports.

    It writes `requests`, `tokens` and `prefetches` of the gateway's WorkerColumns. `peer` is the gateway's number at the workers.
    """

    def __init__(self, columns: WorkerColumns, peer: int) -> None:
        self._columns, self._peer = columns, peer
        self._own_requests = np.zeros(columns.capacity, np.int64)
        self._own_tokens = np.zeros(columns.capacity, np.int64)

    def opened(self, row: int, tokens: int) -> None:
        self._own_requests[row] += 1
        self._columns.requests[row] += 1
        self.grew(row, tokens)

    def grew(self, row: int, tokens: int) -> None:
        self._own_tokens[row] += tokens
        self._columns.tokens[row] += tokens

    def ended(self, row: int, tokens: int) -> None:
        self._own_requests[row] -= 1
        self._columns.requests[row] -= 1
        self.grew(row, -tokens)

    def prefetch_begun(self, row: int, tokens: int) -> None:
        """Counts a request whose pages the worker prefetches now."""
        self.opened(row, tokens)
        self._columns.prefetches[row] += 1

    def prefetch_ended(self, row: int, tokens: int) -> None:
        """Ends the count of prefetch_begun(), with the same number of tokens."""
        self.ended(row, tokens)
        self._columns.prefetches[row] -= 1

    def reported(self, loads: Sequence[WorkerLoad]) -> None:
        """Updates the columns by load reports, one per row.

        The tokens of other gateways' requests are estimated: the worker's used tokens times the share of these requests in all of
        its open requests.
        """
        count = len(loads)
        opened = np.array([load.num_open for load in loads], np.int64)
        others = opened - np.array([load.open_by_peer[self._peer] for load in loads], np.int64)
        used = np.array([load.used_tokens for load in loads], np.int64)
        columns = self._columns
        columns.requests[:count] = self._own_requests[:count] + others
        columns.tokens[:count] = self._own_tokens[:count] + used * others // np.maximum(opened, 1)


MAX_QUEUED = 1 << 20  # larger than any trace, so that no request is refused
READER = "reader"  # routing reason of a request for the worker that has prefetched the pages
SWEPT_BLOCKS = 4096  # number of index blocks that a sweep after a load report checks


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended."""

    message: Submit  # the message of the first send
    hashes: tuple[bytes, ...]  # block hashes of the prompt
    num_outputs: int = 0  # output tokens so far
    row: int = -1  # row of the request's worker; -1 while it queues here
    sends: int = 0  # number of times that the request was sent to a worker
    charged: int = 0  # weighted prompt and output tokens that have been charged to the routing key
    prefilled: bool = False  # whether a prefill worker has computed the prompt for the next worker
    source: KvSource | None = None  # KV that the next worker may read, if a worker has reserved it
    reader: Pick | None = None  # the worker that prefetches the computed pages and will get the request
    prefetch_tokens: int = 0  # tokens of the request when the prefetch began

    @property
    def tokens(self) -> int:
        return len(self.message.prompt_ids) + self.num_outputs


class FleetGateway:
    """A gateway of the fleet."""

    def __init__(
        self,
        number: int,
        policy: str,
        config: FleetConfig,
        trace: Trace,
        script: Script,
        clock: EventQueue,
        send: Callable[[int, Submit, bool], None],
        send_prefetch: Callable[[int, PrefetchMessage], None],
        placed: Callable[[int, Pick, bool], None],
        on_output: Callable[[PeerOutput], None],
    ) -> None:
        """Creates a gateway that sees every worker as unusable until worker_up().

        A row is the index of a worker in the fleet, and in the gateway's WorkerColumns.

        Args:
            number: the gateway's number at the workers.
            policy: name of the routing policy.
            config: the fleet.
            trace: the trace, whose indexes are the request handles.
            script: token ids of the trace.
            clock: clock of the fleet.
            send: sends a message to the worker of a row; the flag is whether another worker decodes the request after its first
                token.
            send_prefetch: sends a prefetch message to the worker of a row.
            placed: called per placement with (index, pick, whether the request had been sent before).
            on_output: called with each worker's output after the gateway has processed it.
        """
        self.number = number
        self._config, self._trace, self._script, self._clock = config, trace, script, clock
        self._send, self._send_prefetch = send, send_prefetch
        self._placed, self._on_output = placed, on_output
        self._policy = make_policy(policy, config.routing, random.Random(config.seed * 1000 + number))
        self.index = PrefixIndex()
        self.columns = WorkerColumns()
        for row in range(config.workers):
            self._add(row)
        self._view = LoadView(self.columns, number)
        self._queue: FairQueue[OpenRequest] = FairQueue(MAX_QUEUED)
        self._moved: deque[OpenRequest] = deque()  # requests that have left their worker and have no new one yet
        self._open: dict[int, OpenRequest] = {}
        self._picks = 0
        self._sharing = SharingMeter()
        self.max_queue = 0

    def arrive(self, index: int) -> None:
        message = submit_message(self._trace, self._script, index, self.number)
        root = namespace_root(cache_namespace(message.lora, message.salt))
        request = OpenRequest(message, tuple(split_hashes(block_hashes(root, message.prompt_ids))))  # type: ignore[arg-type]
        self._open[index] = request
        self._place_or_queue(request)

    def receive(self, worker: FleetWorker, output: PeerOutput) -> None:
        """Processes the output of a worker's step."""
        for handle, count in zip(output.handles, output.counts, strict=True):
            self._open[handle].num_outputs += count
        self._view.grew(worker.row, sum(output.counts))
        for ready in output.ready:
            request = self._open[ready.handle]
            if request.row == worker.row:  # otherwise the request has moved to another worker
                self._more_ready(worker, request, ready)
        for finish in output.finishes:
            if finish.reason is FinishReason.HANDED_OVER:
                self._handed_over(worker, finish)
            else:
                self._end(finish)
        if output.finishes:
            self._drain()
        self._on_output(output)

    def receive_loads(self, loads: Sequence[WorkerLoad]) -> None:
        self._view.reported(loads)
        self.index.expire(self._clock.now)
        self.index.sweep(SWEPT_BLOCKS)
        self._drain()

    def receive_events(self, name: str, generation: int, events: CacheEvents) -> None:
        owner = self.index.find(name, generation)
        if owner >= 0:
            self.index.stored(owner, events.stored)
            self.index.removed(owner, events.removed)
            self.index.stored(owner, events.host, BlockTier.HOST)
            self.index.stored(owner, events.storage, BlockTier.STORAGE)

    def worker_up(self, worker: FleetWorker) -> None:
        """Allows requests to be sent to the worker."""
        self.columns.owner[worker.row] = self.index.owner(worker.name, worker.generation)
        self.columns.usable[worker.row] = True
        self._set_serving()
        self._drain()

    def worker_down(self, worker: FleetWorker) -> None:
        """Moves the requests of a dead worker, with the outputs that have arrived, to other workers."""
        row = worker.row
        self.columns.usable[row] = False
        self.index.retire(int(self.columns.owner[row]))
        self.columns.owner[row] = -1
        self._set_serving()
        for request in list(self._open.values()):
            if request.reader is not None and request.reader.row == row:
                self._stop_reading(request, notifies=False)
            if request.row == row:
                self._stop_reading(request)
                self._move(request)

    def _add(self, row: int) -> None:
        name = worker_name(row)
        at = self.columns.add(name, int.from_bytes(blake2b(name.encode(), digest_size=8).digest()))
        assert at == row, "rows have the numbers of the workers"
        self.columns.limit[row] = self._config.limit
        self.columns.running[row] = self._config.scheduler.max_running_requests
        self.columns.end_pages[row] = self._config.scheduler.page_size if self._config.scheduler.groups else 0

    def _set_serving(self) -> None:
        """Lets prefill workers serve whole requests while no decode worker is usable."""
        first = self._config.prefill_workers
        self.columns.serves[:first] = not self.columns.usable[first:].any()

    def _handed_over(self, worker: FleetWorker, finish: Finish) -> None:
        """Moves a request to another worker after `worker` has computed the request's prompt and next token."""
        request = self._open[finish.handle]
        request.prefilled = True
        request.source = None if finish.reservation is None else KvSource(finish.reservation, worker.name, finish.reserved_pages)
        self._move(request)

    def _more_ready(self, worker: FleetWorker, request: OpenRequest, ready: PagesReady) -> None:
        """Reports further computed pages of a prompt to the prefetching worker. If no worker prefetches yet, picks one."""
        if request.reader is not None:
            self._send_prefetch(request.reader.row, PrefetchMore(self.number, ready))
            return
        pick = self._policy.pick(self._query(request, decides=False), self.columns)
        if pick is not None:
            request.reader, request.prefetch_tokens = replace(pick, reason=READER), request.tokens
            self._view.prefetch_begun(pick.row, request.prefetch_tokens)
            self._picked(pick.row, request)
            source, message = KvSource(ready.reservation, worker.name, ready.num_pages), request.message
            tokens = np.concatenate([message.prompt_ids, self._script.output(message.handle)[: request.num_outputs]])
            prefetch = Prefetch(self.number, message.handle, tokens, source, message.salt, message.lora)
            self._send_prefetch(pick.row, replace(prefetch, priority=message.priority))

    def _stop_reading(self, request: OpenRequest, notifies: bool = True) -> None:
        """Ends the prefetch of a request. If `notifies` is set, the prefetching worker gets an abort."""
        reader, request.reader = request.reader, None
        if reader is not None:
            self._view.prefetch_ended(reader.row, request.prefetch_tokens)
            if notifies:
                self._send_prefetch(reader.row, Abort(self.number, request.message.handle))

    def _move(self, request: OpenRequest) -> None:
        """Moves a request from its worker to another one, with its outputs so far."""
        self._view.ended(request.row, request.tokens)
        request.row = -1
        if not self._place(request):
            self._moved.append(request)

    def _end(self, finish: Finish) -> None:
        request = self._open.pop(finish.handle)
        self._stop_reading(request)
        self._view.ended(request.row, request.tokens)
        self._charge(request)

    def _charge(self, request: OpenRequest) -> None:
        """Charges a request's routing key, which stands for an API key, for the tokens that have not been charged yet."""
        spent = len(request.message.prompt_ids) + OUTPUT_WEIGHT * request.num_outputs
        if spent > request.charged:
            self._queue.charge(request.message.routing_key, spent - request.charged)
            request.charged = spent

    def _place_or_queue(self, request: OpenRequest) -> None:
        if not self._place(request):
            priority = -self._config.scheduler.rank(request.message.priority)
            displaced = self._queue.push(request, request.message.routing_key, priority)
            assert displaced is None, "the queue is larger than any trace"
            self.max_queue = max(self.max_queue, len(self._queue))

    def _drain(self) -> None:
        """Places queued requests. Requests that have left their worker go first."""
        while self._moved and self._place(self._moved[0]):
            self._moved.popleft()
        if len(self._queue):
            self._queue.drain(lambda request: Placed.PLACED if self._place(request) else Placed.STOP)

    def _place(self, request: OpenRequest) -> bool:
        """Sends the request to a worker. Returns False if no worker has free capacity."""
        reader, columns = request.reader, self.columns
        if reader is not None and columns.takes[reader.row] and columns.requests[reader.row] <= columns.limit[reader.row]:
            self._submit(request, reader, hands_over=False)
            return True
        if not has_free_slot(RoutingQuery(0), columns):
            return False
        query = self._query(request)
        pick = self._policy.pick(query, self.columns)
        if pick is None:
            return False
        prefill = None
        if self._config.roles is not None and not request.prefilled:
            prefill = pick_prefill(self._policy, self.columns, query, pick, self._config.roles.min_tokens)
        self._submit(request, prefill or pick, hands_over=prefill is not None)
        return True

    def _query(self, request: OpenRequest, decides: bool = True) -> RoutingQuery:
        reach = self.index.reach(request.hashes)
        if request.hashes and decides:
            self._sharing.decided(bool(reach.any()))
        hits = hits_of(usable_reach(reach, self.index, self.columns, request.hashes), self.columns)
        first_block = request.hashes[0] if request.hashes and self._sharing.is_shared else b""
        message = request.message
        return RoutingQuery(
            request.tokens, hits.matched, message.routing_key, message.lora, first_block=first_block, saved=hits.saved
        )

    def _submit(self, request: OpenRequest, pick: Pick, hands_over: bool) -> None:
        message = request.message
        self._stop_reading(request, notifies=request.reader is not None and request.reader.row != pick.row)
        request.row = pick.row
        self._view.opened(pick.row, request.tokens)
        self._picked(pick.row, request)
        self._charge(request)
        self._placed(message.handle, pick, request.sends > 0)
        request.sends += 1
        self._send(pick.row, self._resumed(request) if request.num_outputs else message, hands_over)

    def _picked(self, row: int, request: OpenRequest) -> None:
        """Records that the policy has picked a worker, which gets the request now or after it has prefetched the prompt.

        Args:
            row: index of the worker in the routing columns.
            request: the request.
        """
        self._picks += 1
        self.columns.last_pick[row] = self._picks
        until = self._clock.now + self._config.speculative_s
        speculate(self.index, self.columns, row, request.hashes, len(request.message.prompt_ids), until)

    def _resumed(self, request: OpenRequest) -> Submit:
        """Returns a moved request's submit, with outputs and KV source. Clears the source, because it can be read only once."""
        output = self._script.output(request.message.handle)[: request.num_outputs]
        source, request.source, request.prefilled = request.source, None, False
        return replace(request.message, output_ids=tuple(output.tolist()), source=source)
