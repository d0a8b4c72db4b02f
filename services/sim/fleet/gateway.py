"""A gateway of the fleet: the real index, policy and queue, and a view of the workers that is as old as in life."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from services.gateway.routing.columns import Ask, Pick, WorkerColumns
from services.gateway.routing.fair_queue import FairQueue, Placed
from services.gateway.routing.policies import make_policy
from services.gateway.routing.prefill import pick_prefill
from services.gateway.routing.prefix_index import PrefixIndex
from services.gateway.routing.sharing import SharingMeter
from services.gateway.routing.tier_hits import hits_of
from services.shared.index.block_hash import block_hashes
from services.shared.index.block_tier import BlockTier
from services.shared.index.cache_namespace import cache_namespace
from services.shared.index.prefix_index import split_hashes
from services.sim.core.run.worker import submit_message
from services.sim.core.trace.script import Script
from services.sim.core.trace.trace import Trace
from services.sim.fleet.config import FleetConfig
from services.sim.fleet.event_queue import EventQueue
from services.sim.fleet.load_view import LoadView
from services.sim.fleet.worker import FleetWorker, Word, WorkerLoad, namespace_root, worker_name
from services.worker.core.contracts.messages import Finish, FinishReason, PagesReady, PeerOutput, Prefetch, Submit
from services.worker.core.contracts.rooms import Source
from services.worker.core.kv.cache_events import CacheEvents
from services.worker.loop.inbox import Abort, PrefetchMore

MAX_QUEUED = 1 << 20  # no request of a trace is turned away
READER = "reader"  # why a request goes where its pages have been read
SWEPT_BLOCKS = 4096  # per load report


@dataclass(slots=True, eq=False)
class OpenRequest:
    """message: as it is first sent. told: output tokens so far. row: of the worker that has it, -1 while it waits here.
    prefilled: another worker has computed its prompt for the next one that it goes to. source: where its KV is then; None:
    nowhere. reader: who reads what is computed of it, and is to go on with it; ahead_tokens: of it, when that began."""

    message: Submit
    hashes: tuple[bytes, ...]
    told: int = 0
    row: int = -1
    sends: int = 0
    prefilled: bool = False
    source: Source | None = None
    reader: Pick | None = None
    ahead_tokens: int = 0

    @property
    def tokens(self) -> int:
        return len(self.message.prompt_ids) + self.told


class FleetGateway:
    """number: its peer number at the workers. send: takes (row, message, whether another worker is to go on with it). say: takes
    (row, word of what is to be read ahead there). placed: told of (index, pick, whether it had been sent before). told: given
    every output once the gateway has taken it in."""

    def __init__(
        self,
        number: int,
        policy: str,
        config: FleetConfig,
        trace: Trace,
        script: Script,
        clock: EventQueue,
        send: Callable[[int, Submit, bool], None],
        say: Callable[[int, Word], None],
        placed: Callable[[int, Pick, bool], None],
        told: Callable[[PeerOutput], None],
    ) -> None:
        self.number = number
        self._config, self._trace, self._script, self._clock = config, trace, script, clock
        self._send, self._say, self._placed, self._told = send, say, placed, told
        self._policy = make_policy(policy, config.routing, random.Random(config.seed * 1000 + number))
        self.index = PrefixIndex()
        self.columns = WorkerColumns()
        for row in range(config.workers):
            self._add(row)
        self._view = LoadView(self.columns, number)
        self._queue: FairQueue[OpenRequest] = FairQueue(MAX_QUEUED)
        self._moved: deque[OpenRequest] = deque()
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

    def hear(self, worker: FleetWorker, output: PeerOutput) -> None:
        """One step's news from a worker."""
        for handle, count in zip(output.handles, output.counts, strict=True):
            self._open[handle].told += count
        self._view.grew(worker.row, sum(output.counts))
        for ready in output.ready:
            request = self._open[ready.handle]
            if request.row == worker.row:  # else it has been moved since
                self._more_ready(worker, request, ready)
        for finish in output.finishes:
            if finish.reason is FinishReason.HANDED_OVER:
                self._handed_over(worker, finish)
            else:
                self._end(finish)
        if output.finishes:
            self._drain()
        self._told(output)

    def reported(self, loads: Sequence[WorkerLoad]) -> None:
        self._view.reported(loads)
        self.index.expire(self._clock.now)
        self.index.sweep(SWEPT_BLOCKS)
        self._drain()

    def indexed(self, name: str, generation: int, events: CacheEvents) -> None:
        owner = self.index.find(name, generation)
        if owner >= 0:
            self.index.stored(owner, events.stored)
            self.index.removed(owner, events.removed)
            self.index.stored(owner, events.host, BlockTier.HOST)
            self.index.stored(owner, events.storage, BlockTier.STORAGE)

    def up(self, worker: FleetWorker) -> None:
        """A worker may be sent requests from now on."""
        self.columns.owner[worker.row] = self.index.owner(worker.name, worker.generation)
        self.columns.usable[worker.row] = True
        self._share_out()
        self._drain()

    def down(self, worker: FleetWorker) -> None:
        """A worker has died: what it had goes on elsewhere, after what it has said."""
        row = worker.row
        self.columns.usable[row] = False
        self.index.retire(int(self.columns.owner[row]))
        self.columns.owner[row] = -1
        self._share_out()
        for request in list(self._open.values()):
            if request.reader is not None and request.reader.row == row:
                self._stop_reading(request, tells=False)
            if request.row == row:
                self._stop_reading(request)
                self._move(request)

    def _add(self, row: int) -> None:
        name = worker_name(row)
        at = self.columns.add(name, int.from_bytes(blake2b(name.encode(), digest_size=8).digest()))
        assert at == row, "rows are numbered as workers are"
        self.columns.limit[row] = self._config.limit
        self.columns.running[row] = self._config.scheduler.max_running_requests

    def _share_out(self) -> None:
        """Who computes prompts for others serves whole requests while nobody else does."""
        first = self._config.prefill_workers
        self.columns.serves[:first] = not self.columns.usable[first:].any()

    def _handed_over(self, worker: FleetWorker, finish: Finish) -> None:
        """That worker has computed the prompt and said the next token."""
        request = self._open[finish.handle]
        request.prefilled = True
        request.source = None if finish.room is None else Source(finish.room, worker.name, finish.room_pages)
        self._move(request)

    def _more_ready(self, worker: FleetWorker, request: OpenRequest, ready: PagesReady) -> None:
        """That worker has computed further pages of a prompt: who will go on with it reads them meanwhile."""
        if request.reader is not None:
            self._say(request.reader.row, PrefetchMore(self.number, ready))
            return
        pick = self._policy.pick(self._ask(request, decides=False), self.columns)
        if pick is not None:
            request.reader, request.ahead_tokens = replace(pick, reason=READER), request.tokens
            self._view.ahead(pick.row, request.ahead_tokens)
            self._picked(pick.row, request)
            source, message = Source(ready.room, worker.name, ready.num_pages), request.message
            tokens = np.concatenate([message.prompt_ids, self._script.output(message.handle)[: request.told]])
            prefetch = Prefetch(self.number, message.handle, tokens, source, message.salt, message.lora)
            self._say(pick.row, replace(prefetch, priority=message.priority))

    def _stop_reading(self, request: OpenRequest, tells: bool = True) -> None:
        """It has come to its reader, or will not. tells: that it will not."""
        reader, request.reader = request.reader, None
        if reader is not None:
            self._view.not_ahead(reader.row, request.ahead_tokens)
            if tells:
                self._say(reader.row, Abort(self.number, request.message.handle))

    def _move(self, request: OpenRequest) -> None:
        """From the worker that has it to another one, with what it has said."""
        self._view.ended(request.row, request.tokens)
        request.row = -1
        if not self._place(request):
            self._moved.append(request)

    def _end(self, finish: Finish) -> None:
        request = self._open.pop(finish.handle)
        self._stop_reading(request)
        self._view.ended(request.row, request.tokens)

    def _place_or_queue(self, request: OpenRequest) -> None:
        if not self._place(request):
            displaced = self._queue.push(request, request.message.routing_key, request.message.priority)
            assert displaced is None, "the queue has room for every trace"
            self.max_queue = max(self.max_queue, len(self._queue))

    def _drain(self) -> None:
        """Those that have lost their worker go first."""
        while self._moved and self._place(self._moved[0]):
            self._moved.popleft()
        if len(self._queue):
            self._queue.drain(lambda request: Placed.PLACED if self._place(request) else Placed.STOP)

    def _place(self, request: OpenRequest) -> bool:
        """Sends the request to a worker, or returns False: none has room."""
        reader, columns = request.reader, self.columns
        if reader is not None and columns.takes[reader.row] and columns.requests[reader.row] <= columns.limit[reader.row]:
            self._submit(request, reader, hands_over=False)
            return True
        ask = self._ask(request)
        pick = self._policy.pick(ask, self.columns)
        if pick is None:
            return False
        prefill = None
        if self._config.roles is not None and not request.prefilled:
            prefill = pick_prefill(self._policy, self.columns, ask, pick, self._config.roles.min_tokens)
        self._submit(request, prefill or pick, hands_over=prefill is not None)
        return True

    def _ask(self, request: OpenRequest, decides: bool = True) -> Ask:
        hits = hits_of(self.index.reach(request.hashes), self.columns)
        if request.hashes and decides:
            self._sharing.decided(bool(hits.matched.any()))
        first_block = request.hashes[0] if request.hashes and self._sharing.seen else b""
        message = request.message
        return Ask(request.tokens, hits.matched, message.routing_key, message.lora, first_block=first_block, saved=hits.saved)

    def _submit(self, request: OpenRequest, pick: Pick, hands_over: bool) -> None:
        message = request.message
        self._stop_reading(request, tells=request.reader is not None and request.reader.row != pick.row)
        request.row = pick.row
        self._view.opened(pick.row, request.tokens)
        self._picked(pick.row, request)
        self._queue.charge(message.routing_key, len(message.prompt_ids))
        self._placed(message.handle, pick, request.sends > 0)
        request.sends += 1
        self._send(pick.row, self._resumed(request) if request.told else message, hands_over)

    def _picked(self, row: int, request: OpenRequest) -> None:
        """It goes there, or will."""
        self._picks += 1
        self.columns.last_pick[row] = self._picks
        self.index.speculate(int(self.columns.owner[row]), request.hashes, self._clock.now + self._config.speculative_s)

    def _resumed(self, request: OpenRequest) -> Submit:
        """A source is for one worker: what is read is read once."""
        output = self._script.output(request.message.handle)[: request.told]
        source, request.source, request.prefilled = request.source, None, False
        return replace(request.message, output_ids=tuple(output.tolist()), source=source)
