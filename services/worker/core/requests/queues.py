"""The queues of one worker's requests, and the allowed moves between them.

add ──► gate ◄──────────┐
 │        │             │ importing
 └──────► waiting ──────┘
            │  ▲
            ▼  │ retract
         extending ◄──► decoding      remove: from every queue
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.grammar import GrammarBook
from rootstock_llm.services.worker.core.requests.gates import GrammarGate
from rootstock_llm.services.worker.core.requests.request import Phase, Request
from rootstock_llm.services.worker.core.requests.shares import Shares
from rootstock_llm.services.worker.core.requests.waiting_queue import WaitingQueue


class RequestQueues:
    """All requests of the worker, each in the queue of its phase.

    A move changes the phase and the queue together, and updates the flows of the shares. RequestLifecycle calls the moves,
    because most of them also allocate or free memory.
    """

    def __init__(self, book: GrammarBook | None) -> None:
        self.by_key: dict[tuple[int, int], Request] = {}  # by (peer, handle), in every phase but FINISHED
        self.by_routing_key: Counter[str] = Counter()  # number of requests of each routing key
        self.gate = GrammarGate(book)  # GATED: requests that wait for a grammar
        self.importing: dict[int, Request] = {}  # GATED, by seq: requests that wait for a prefix from another tier
        self.waiting = WaitingQueue()  # WAITING: requests that wait for a lease
        self.extending: list[Request] = []  # EXTEND, in the order of admission
        self.decoding: list[Request] = []  # DECODE, in the order of their last chunks
        self.shares = Shares()
        # Whether admission passes are skipped until memory may have become free (docs/design/scheduler.md#admission-and-budgets).
        self.batch_is_full = False
        self._slots: NDArray[np.int64] | None = None  # slots of `decoding`; None after a change of `decoding`

    @property
    def num_waiting(self) -> int:
        """Number of requests without a lease, including gated requests."""
        return len(self.waiting) + len(self.gate) + len(self.importing)

    @property
    def waiting_tokens(self) -> int:
        """Prompt and output tokens of the requests without a lease, counted when they began to wait."""
        importing = sum(request.queued_tokens for request in self.importing.values())
        return self.waiting.num_tokens + self.gate.num_tokens + importing

    @property
    def num_running(self) -> int:
        return len(self.extending) + len(self.decoding)

    def running(self) -> list[Request]:
        """Returns a new list of the extending requests, followed by the decoding requests."""
        return self.extending + self.decoding

    def decoding_slots(self) -> NDArray[np.int64]:
        """Returns the slots of `decoding`, in its order, as int64[n]."""
        if self._slots is None:
            self._slots = np.array([r.kv.lease.slot for r in self.decoding if r.kv.lease], dtype=np.int64)
            assert len(self._slots) == len(self.decoding), "each decoding request has a slot"
        return self._slots

    def adds_up(self, num_leased: int) -> bool:
        """Returns whether each request is in exactly one queue, and the number of running requests is `num_leased`."""
        return self.num_waiting + self.num_running == len(self.by_key) and self.num_running == num_leased

    def add(self, request: Request) -> bool:
        """Adds a new request to the waiting queue, or to the grammar gate if it must wait for its grammar or for its matcher.

        Returns:
            Whether the request is in the waiting queue.
        """
        assert (request.peer, request.handle) not in self.by_key, "(peer, handle) identifies one request"
        self.by_key[request.peer, request.handle] = request
        if request.routing_key:
            self.by_routing_key[request.routing_key] += 1
        if self.gate.admits(request):
            self._wait(request, back=request.progress.num_given > 0)
            return True
        request.phase = Phase.GATED
        self.gate.wait(request)
        return False

    def ungate(self, request: Request) -> None:
        """Moves a request from the grammar gate to the waiting queue."""
        self.gate.leave(request)
        request.move(Phase.WAITING)
        self._wait(request, back=request.progress.num_given > 0)

    def begin_import(self, request: Request) -> None:
        """Moves a request from the waiting queue to `importing`."""
        self.waiting.remove(request)
        self._unshare(request)
        request.move(Phase.GATED)
        self.importing[request.seq] = request

    def end_import(self, seq: int) -> Request:
        """Moves a request from `importing` back to the waiting queue, and returns it."""
        request = self.importing.pop(seq)
        request.move(Phase.WAITING)
        self._wait(request, back=request.progress.num_given > 0 or request.progress.queue_s >= 0)
        self.batch_is_full = False
        return request

    def admit(self, request: Request) -> None:
        """Moves a waiting request to `extending`. The caller sets its lease before the next call of decoding_slots()."""
        self.waiting.remove(request)
        request.move(Phase.EXTEND)
        self.extending.append(request)

    def decode(self, request: Request) -> None:
        """Moves a request from `extending` to `decoding`."""
        request.move(Phase.DECODE)
        self._unshare(request)
        self.extending.remove(request)
        self.decoding.append(request)
        self._slots = None

    def extend_again(self, request: Request) -> None:
        """Moves a request from `decoding` back to `extending`."""
        request.move(Phase.EXTEND)
        self._share(request)
        self.decoding.remove(request)
        self.extending.append(request)
        self._slots = None

    def retract(self, request: Request) -> None:
        """Moves a running request back to the waiting queue, before the requests of its rank that never ran."""
        self._stop_running(request)
        request.move(Phase.WAITING)
        self._wait(request, back=True)
        self.batch_is_full = False

    def remove(self, request: Request) -> None:
        """Removes a request from its queue and sets the phase FINISHED."""
        assert self.by_key[request.peer, request.handle] is request, "a request ends once"
        match request.phase:
            case Phase.EXTEND | Phase.DECODE:
                self._stop_running(request)
                self.batch_is_full = False
            case Phase.GATED if request.seq in self.importing:
                del self.importing[request.seq]
            case Phase.GATED:
                self.gate.leave(request)
            case _:
                self.waiting.remove(request)
        request.move(Phase.FINISHED)
        if request.flow is not None:
            self._unshare(request)
        del self.by_key[request.peer, request.handle]
        if request.routing_key:
            self.by_routing_key[request.routing_key] -= 1
            if not self.by_routing_key[request.routing_key]:
                del self.by_routing_key[request.routing_key]

    def _wait(self, request: Request, back: bool) -> None:
        if request.flow is None:
            self._share(request)
        self.waiting.add(request, back=back)

    def _stop_running(self, request: Request) -> None:
        if request.phase is Phase.EXTEND:
            self.extending.remove(request)
        else:
            self.decoding.remove(request)
            self._slots = None

    def _share(self, request: Request) -> None:
        """Adds the request to its flow.

        Resets batch_is_full if the flow had no request, because fair shares may let this flow's request be admitted next.
        """
        assert request.flow is None, "a request is in at most one flow"
        request.flow = self.shares.enter(request.payer, request.weight)
        if request.flow.num_pending == 1 and self.shares.num_flows > 1:
            self.batch_is_full = False

    def _unshare(self, request: Request) -> None:
        assert request.flow is not None, "a request that leaves its flow is in it"
        self.shares.leave(request.flow)
        request.flow = None
