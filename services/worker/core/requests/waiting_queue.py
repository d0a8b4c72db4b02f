"""The requests that wait for their first or next admission. RequestQueues is the owner.

Without another policy, requests are served by rank. Within a rank, requests that lost their lease come first, then requests by
arrival. A request that an admission gate holds keeps its position, and passes skip it until the gate frees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from services.worker.core.requests.request import Request
from services.worker.core.requests.shares import Flow


@dataclass(slots=True)
class _Rank:
    """The requests of one rank."""

    fresh: dict[int, Request] = field(default_factory=dict)  # requests that never ran, by seq, in order of arrival
    flows: dict[Flow, dict[int, Request]] = field(default_factory=dict)  # the same requests, by flow
    back: list[Request] = field(default_factory=list)  # requests that ran before, by arrival


@dataclass(slots=True)
class HeldCapacity:
    """The slots and the KV that are set aside for held requests."""

    slots: int = 0
    tokens: int = 0  # upper limit of their KV in tokens

    def add(self, slots: int, tokens: int) -> None:
        self.slots += slots
        self.tokens += tokens


class WaitingQueue:
    """The waiting requests, by rank."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._order: list[int] = []
        self._size = 0
        self._kept: dict[int, HeldCapacity] = {}  # by rank
        self.num_held = 0  # requests that gates hold
        self.num_tokens = 0  # prompt and output tokens, counted when the requests were added
        self._have_run: set[int] = set()  # seqs of the requests that have run on this worker

    def __len__(self) -> int:
        return self._size

    @property
    def num_retracted(self) -> int:
        """Number of waiting requests that have run on this worker before."""
        return len(self._have_run)

    def add(self, request: Request, back: bool = False) -> None:
        assert not request.held, "no gate holds a request that enters the queue"
        rank = self._ranks.get(request.rank)
        if rank is None:
            rank = self._ranks[request.rank] = _Rank()
            self._order = sorted(self._ranks)
        if back:
            rank.back.append(request)
            rank.back.sort(key=lambda r: r.seq)
            if request.progress.queue_s >= 0:
                self._have_run.add(request.seq)
        else:
            assert request.seq not in rank.fresh, "a request stands in the queue twice"
            assert request.flow is not None, "a waiting request has prompt tokens to plan"
            rank.fresh = _with(rank.fresh, request)
            rank.flows[request.flow] = _with(rank.flows.get(request.flow, {}), request)
        self._size += 1
        request.queued_tokens = request.num_prompt_tokens + len(request.progress.output_ids)
        self.num_tokens += request.queued_tokens

    def remove(self, request: Request) -> None:
        if request.held:
            self.free(request)
        rank = self._ranks[request.rank]
        if rank.fresh.pop(request.seq, None) is None:
            rank.back.remove(request)
            self._have_run.discard(request.seq)
        else:
            assert request.flow is not None, "a waiting request has prompt tokens to plan"
            mine = rank.flows[request.flow]
            del mine[request.seq]
            if not mine:
                del rank.flows[request.flow]
        self._size -= 1
        self.num_tokens -= request.queued_tokens
        assert 0 <= self._size <= self.num_tokens, "each that waits has a token"
        if not rank.fresh and not rank.back:
            del self._ranks[request.rank]
            self._order = sorted(self._ranks)

    def hold(self, request: Request, tokens: int) -> None:
        """Holds a request for a gate. `tokens` is the upper limit of its KV, 1 or more."""
        assert tokens > 0 and not request.held, "a request is held once"
        kept = self._kept.get(request.rank)
        if kept is None:
            kept = self._kept[request.rank] = HeldCapacity()
        kept.add(1, tokens)
        request.held = tokens
        self.num_held += 1
        assert self.num_held <= self._size, "only requests of the queue are held"

    def free(self, request: Request) -> None:
        """Ends the hold of a request, so that the next pass looks at it again."""
        assert request.held > 0, "a request is freed that no gate holds"
        kept = self._kept[request.rank]
        kept.add(-1, -request.held)
        assert kept.slots >= 0 and kept.tokens >= 0, "more is given back than was kept"
        if not kept.slots:
            assert not kept.tokens, "tokens are kept for nobody"
            del self._kept[request.rank]
        request.held = 0
        self.num_held -= 1

    def kept_from(self, rank: int) -> HeldCapacity:
        """Returns the slots and the KV set aside for held requests that are more urgent than `rank`."""
        if not self.num_held or rank == self._order[0]:
            return HeldCapacity()
        above = [kept for each, kept in self._kept.items() if each < rank]
        return HeldCapacity(sum(kept.slots for kept in above), sum(kept.tokens for kept in above))

    def kept_by_rank(self) -> dict[int, HeldCapacity]:
        """Returns the slots and the KV set aside for held requests, by rank, for checks."""
        return {rank: replace(kept) for rank, kept in self._kept.items()}

    def last_fresh(self) -> Request | None:
        """Returns the last request in the order of service that never ran, or None."""
        for rank in reversed(self._order):
            if fresh := self._ranks[rank].fresh:
                return next(reversed(fresh.values()))
        return None

    def __iter__(self) -> Iterator[Request]:
        """Yields all requests in the order of service, including held ones. The queue must not change during the iteration."""
        for rank in self._order:
            yield from self._ranks[rank].back
            yield from self._ranks[rank].fresh.values()

    def ranks(self) -> tuple[int, ...]:
        """Returns the ranks of the waiting requests, most urgent first."""
        return tuple(self._order)

    def back(self, rank: int) -> list[Request]:
        """Returns the requests of the rank that ran before, by arrival, including held ones."""
        return list(self._ranks[rank].back)

    def flows(self, rank: int) -> dict[Flow, list[Request]]:
        """Returns the requests of the rank that never ran, by flow and arrival, including held ones."""
        return {flow: list(requests.values()) for flow, requests in self._ranks[rank].flows.items()}

    def eligible(self) -> list[Request]:
        """Returns the requests that are not held, in the order of service."""
        return [request for request in self if not request.held] if self.num_held else list(self)

    def first(self) -> Request | None:
        """Returns the first request in the order of service that is not held, or None."""
        for rank in self._order:
            mine = self._ranks[rank]
            for request in mine.back:
                if not request.held:
                    return request
            for request in mine.fresh.values():
                if not request.held:
                    return request
        return None

    def in_turn(self) -> Iterator[Request]:
        """Yields the same requests as eligible(), in the same order.

        The caller may remove or hold a request before it takes the next one.
        """
        while not self.num_held and (request := self.first()) is not None:
            yield request
        if self.num_held == self._size:
            return
        for rank in tuple(self._order):
            mine = self._ranks[rank]
            yield from [request for request in mine.back if not request.held]
            passed, size = 0, 8
            while some := list(islice(mine.fresh.values(), passed, passed + size)):
                free = [request for request in some if not request.held]
                yield from free
                passed += len(some) - sum(request.seq not in mine.fresh for request in free)
                size *= 2


def _with(requests: dict[int, Request], request: Request) -> dict[int, Request]:
    """Adds the request, and returns the dictionary in order of arrival.

    It is a new dictionary if the request arrived before the last one.
    """
    came_back = bool(requests) and next(reversed(requests)) > request.seq
    requests[request.seq] = request
    return dict(sorted(requests.items())) if came_back else requests
