"""Requests that wait for their first or next admission. Single owner: RequestTable.

Order of service where no policy says otherwise: by rank, within a rank those that lost their lease first, then by arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.worker.core.request import Request


@dataclass(slots=True)
class _Rank:
    """Requests of one rank. fresh: by seq, in order of arrival. back: those that have run before, by arrival."""

    fresh: dict[int, Request] = field(default_factory=dict)
    back: list[Request] = field(default_factory=list)


class WaitingQueue:
    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._order: list[int] = []
        self._size = 0
        self.num_tokens = 0  # of prompts and outputs, as they were when they came

    def __len__(self) -> int:
        return self._size

    @property
    def num_back(self) -> int:
        """Those that have run before."""
        return sum(len(rank.back) for rank in self._ranks.values())

    def add(self, request: Request, back: bool = False) -> None:
        rank = self._ranks.get(request.rank)
        if rank is None:
            rank = self._ranks[request.rank] = _Rank()
            self._order = sorted(self._ranks)
        if back:
            rank.back.append(request)
            rank.back.sort(key=lambda r: r.seq)
        else:
            rank.fresh[request.seq] = request
        self._size += 1
        request.queued_tokens = request.num_prompt_tokens + len(request.output_ids)
        self.num_tokens += request.queued_tokens

    def remove(self, request: Request) -> None:
        rank = self._ranks[request.rank]
        if rank.fresh.pop(request.seq, None) is None:
            rank.back.remove(request)
        self._size -= 1
        self.num_tokens -= request.queued_tokens
        if not rank.fresh and not rank.back:
            del self._ranks[request.rank]
            self._order = sorted(self._ranks)

    def first(self) -> Request | None:
        for rank in self._order:
            mine = self._ranks[rank]
            return mine.back[0] if mine.back else next(iter(mine.fresh.values()))
        return None

    def last_fresh(self) -> Request | None:
        """Of those that have never run, the one that would be served after all others."""
        for rank in reversed(self._order):
            if fresh := self._ranks[rank].fresh:
                return next(reversed(fresh.values()))
        return None

    def __iter__(self) -> Iterator[Request]:
        """In order of service. The queue must not change meanwhile."""
        for rank in self._order:
            yield from self._ranks[rank].back
            yield from self._ranks[rank].fresh.values()

    def in_turn(self) -> Iterator[Request]:
        """The first one, again and again, for a caller that takes each out before it asks for the next."""
        while (request := self.first()) is not None:
            yield request
