"""All requests of a worker, the queues they stand in, and the transitions between them: one writer for both.

Every request that comes in leaves through `end`, which frees what it holds and emits its one terminal output.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from services.worker.core.columns import SlotColumns
from services.worker.core.config import SchedulerConfig
from services.worker.core.finish import Ending
from services.worker.core.memory import KVMemory, Lease
from services.worker.core.messages import ErrorCode, Finish, FinishReason
from services.worker.core.outputs import Outputs
from services.worker.core.radix_cache import Match
from services.worker.core.request import Phase, Request

_WAITING, _RUNNING = 0, 1


class RequestTable:
    """extending, decoding: running requests in order of admission. Waiting ones are served in order of arrival, those that
    were retracted first.

    batch_is_full: nothing can be admitted until a running request leaves (reference 2 §19).
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.memory = self._new_memory()
        self.columns = SlotColumns(config.max_running_requests)
        self.outputs = Outputs()
        self.by_key: dict[tuple[int, int], Request] = {}
        self.extending: list[Request] = []
        self.decoding: list[Request] = []
        self.batch_is_full = False
        self.requests_total = self.aborts_total = self.retractions_total = 0
        self.prompt_tokens_total = self.cached_tokens_total = self.generated_tokens_total = 0
        self._fresh: dict[int, Request] = {}
        self._retracted: list[Request] = []
        self._deadlines: list[tuple[float, int, int, int, int]] = []
        self._slots: NDArray[np.int64] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._fresh) + len(self._retracted)

    @property
    def num_running(self) -> int:
        return len(self.extending) + len(self.decoding)

    def next_waiting(self) -> Request | None:
        """First in order of service."""
        if self._retracted:
            return self._retracted[0]
        return next(iter(self._fresh.values()), None)

    def decoding_slots(self) -> NDArray[np.int64]:
        """int64[n], aligned with `decoding`."""
        if self._slots is None:
            self._slots = np.array([r.lease.slot for r in self.decoding if r.lease], dtype=np.int64)
        return self._slots

    def enqueue(self, request: Request) -> None:
        self.requests_total += 1
        self.by_key[request.peer, request.handle] = request
        self._fresh[request.seq] = request
        if request.deadline != float("inf"):
            self._watch(request.deadline, request, _RUNNING)
        if self._config.waiting_timeout_s:
            self._watch(request.arrival + self._config.waiting_timeout_s, request, _WAITING)

    def begin(self, request: Request, match: Match, now: float) -> Lease:
        """WAITING to EXTEND. `match` is locked and its lock goes to the lease."""
        self._unqueue(request)
        request.move(Phase.EXTEND)
        lease = request.lease = self.memory.lease(match)
        cached = len(match.pages) * self._config.page_size
        self.columns.begin(lease.slot, request, cached)
        self.extending.append(request)
        if request.queue_s < 0:
            request.queue_s = now - request.arrival
            request.num_cached_tokens = min(cached, request.num_prompt_tokens)
            self.prompt_tokens_total += request.num_prompt_tokens
            self.cached_tokens_total += request.num_cached_tokens
            if self._config.running_timeout_s:
                self._watch(now + self._config.running_timeout_s, request, _RUNNING)
        return lease

    def decode(self, request: Request) -> None:
        """EXTEND to DECODE: the last chunk is planned."""
        request.move(Phase.DECODE)
        self.extending.remove(request)
        self.decoding.append(request)
        self._slots = None

    def retract(self, request: Request, flight_step: int) -> None:
        """Back to WAITING with its output kept, its computed pages cached, everything else freed."""
        assert request.lease is not None
        request.num_sent = int(self.columns.sent[request.lease.slot])
        self._release(request)
        request.move(Phase.WAITING)
        request.rekey()
        request.flight_step = flight_step
        self._retracted.append(request)
        self._retracted.sort(key=lambda r: r.seq)
        self.retractions_total += 1
        self.batch_is_full = False

    def end(self, request: Request, ending: Ending, now: float) -> None:
        """The request's one terminal output, from any phase but FINISHED."""
        if request.lease is not None:
            request.num_sent = int(self.columns.sent[request.lease.slot])
            self._release(request)
            self.batch_is_full = False
        else:
            self._unqueue(request)
        request.move(Phase.FINISHED)
        del self.by_key[request.peer, request.handle]
        self.aborts_total += ending.reason is FinishReason.ABORT
        self.outputs.add_finish(request.peer, self._finish(request, ending, now), request.output_ids[request.num_sent :])

    def reset_memory(self) -> None:
        """Forgets every page, cached ones too. Only while no request is here."""
        assert not self.by_key
        self.memory = self._new_memory()

    def refuse(self, peer: int, handle: int, request_id: str, error: ErrorCode, message: str) -> None:
        """The terminal output of a request that never came in."""
        self.requests_total += 1
        self.aborts_total += 1
        finish = Finish(handle, request_id, FinishReason.ABORT, error=error, message=message)
        self.outputs.add_finish(peer, finish, ())

    def expired(self, now: float) -> list[tuple[Request, str]]:
        """Requests whose waiting or running time is over, each once, with what to tell the client."""
        out: dict[int, tuple[Request, str]] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            _, seq, peer, handle, kind = heapq.heappop(self._deadlines)
            request = self.by_key.get((peer, handle))
            if request is None or request.seq != seq:
                continue
            if kind == _RUNNING:
                out.setdefault(seq, (request, "the request's time is over"))
            elif request.queue_s < 0:
                out.setdefault(seq, (request, "the request waited too long in the queue"))
        return list(out.values())

    def _new_memory(self) -> KVMemory:
        config = self._config
        return KVMemory(
            config.num_pages,
            config.page_size,
            config.max_running_requests,
            config.max_pages_per_request,
            config.enable_radix_cache,
        )

    def _finish(self, request: Request, ending: Ending, now: float) -> Finish:
        return Finish(
            request.handle,
            request.request_id,
            ending.reason,
            ending.matched_stop,
            ending.matched_token,
            ending.error,
            ending.message,
            request.num_prompt_tokens,
            request.num_cached_tokens,
            len(request.output_ids),
            request.queue_s if request.queue_s >= 0 else now - request.arrival,
        )

    def _release(self, request: Request) -> None:
        lease = request.lease
        assert lease is not None
        committed = int(self.columns.committed[lease.slot])
        self.memory.release(lease, request.tokens()[:committed].tobytes())
        self.columns.end(lease.slot)
        request.lease = None
        if request.phase is Phase.EXTEND:
            self.extending.remove(request)
        else:
            self.decoding.remove(request)
            self._slots = None

    def _unqueue(self, request: Request) -> None:
        if self._fresh.pop(request.seq, None) is None:
            self._retracted.remove(request)

    def _watch(self, at: float, request: Request, kind: int) -> None:
        heapq.heappush(self._deadlines, (at, request.seq, request.peer, request.handle, kind))
        if len(self._deadlines) > 4 * len(self.by_key) + 64:
            alive = {r.seq for r in self.by_key.values()}
            self._deadlines = [entry for entry in self._deadlines if entry[1] in alive]
            heapq.heapify(self._deadlines)
