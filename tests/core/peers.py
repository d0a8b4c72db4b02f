"""Two real cores on fake executors: a prefill worker, and a decode worker that reads the pages of the prefill worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rootstock_llm.services.worker.core.contracts.messages import Finish, FinishReason, PagesReady, Prefetch
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, KvSource, ReservationReleased
from tests.core.harness import Engine, slow, small

ADDRESS = "10.0.0.1:7103"
EPOCH = 5


def worker(overlap: bool = True, page_moved_s: float = 0.0, **changes: Any) -> Engine:
    return small(overlap, page_moved_s, **{"num_pages": 32, "context_len": 128, **changes})


class Pair:
    """A prefill worker `first` and a decode worker `second`. turn() runs one iteration of each worker's loop."""

    def __init__(self, page_moved_s: float = 0.0, first: dict[str, Any] | None = None, **second: Any) -> None:
        self.first = worker(**(first or {}))
        self.second = slow(worker(reads_peers=True, page_moved_s=page_moved_s, **second))
        self.second.executor.peers[ADDRESS] = self.first.executor
        self._num_reservations = 0

    def new_reservation(self) -> KvReservation:
        self._num_reservations += 1
        return KvReservation(self._num_reservations, EPOCH, self._num_reservations.to_bytes(16, "little"))

    def compute(self, handle: int, prompt: list[int], **params: Any) -> Finish:
        """Runs a request on the prefill worker up to its first token."""
        self.first.submit(handle, prompt, hand_over=self.new_reservation(), ignore_eos=True, **params)
        self.first.drain()
        self.first.check_answer(handle)
        return self.first.finishes[handle]

    def go_on(self, handle: int, prompt: list[int], **params: Any) -> None:
        """Submits the request to the decode worker with the output of the prefill worker."""
        finish, output = self.first.finishes[handle], self.first.outputs[handle]
        assert finish.reason is FinishReason.HANDED_OVER
        source = None if finish.reservation is None else KvSource(finish.reservation, ADDRESS, finish.reserved_pages)
        self.second.submit(handle, prompt, output=output, source=source, ignore_eos=True, **params)

    def answer(self, handle: int, prompt: list[int], **params: Any) -> Finish:
        """Runs a request on both workers to its end."""
        self.compute(handle, prompt, **params)
        self.go_on(handle, prompt, **params)
        self.second.drain()
        self.second.check_answer(handle)
        self.turn()
        return self.second.finishes[handle]

    def turn(self) -> None:
        self.first.turn()
        self.second.turn()

    def release_of(self, reservation: KvReservation) -> ReservationReleased:
        """Returns the release that a reader sends if it has read the latest opening of the reservation."""
        opened = self.first.executor.open_reservations.get(reservation.number)
        return ReservationReleased(reservation, 0 if opened is None else opened.opening)

    def assert_all_is_free(self) -> None:
        """Checks that all pages are free or evictable, and that no reservation is open."""
        for engine in (self.first, self.second):
            memory = engine.core.memory
            assert memory.num_available == memory.pages.num_pages, "every page is free or evictable"
            assert not len(engine.core.reservations) and not memory.quarantined

    def assert_answers_and_ends(self) -> None:
        """Runs both workers until all time limits have passed.

        Then checks the results of the decode worker's ended requests, and that all pages are free or evictable.
        """
        for _ in range(40):
            self.first.now += 1.0
            self.second.now += 1.0
            self.turn()
        for handle in self.second.finishes:
            self.second.check_answer(handle)
        self.assert_all_is_free()


class Relayed(Pair):
    """A pair with a gateway that reports computed pages to the decode worker. `reports` has the reports by handle."""

    def __init__(self, page_moved_s: float = 0.0, first: dict[str, Any] | None = None, **second: Any) -> None:
        super().__init__(page_moved_s, first, **second)
        self.prompts: dict[int, list[int]] = {}
        self.reports: dict[int, list[PagesReady]] = {}

    def compute(self, handle: int, prompt: list[int], **params: Any) -> Finish:
        """Runs a request on the prefill worker up to its first token, and discards the reports of its computed pages."""
        finish = super().compute(handle, prompt, **params)
        self.first.ready.clear()
        return finish

    def begin(self, handle: int, prompt: list[int], **params: Any) -> None:
        """Submits a request to the prefill worker."""
        self.prompts[handle] = prompt
        self.first.submit(handle, prompt, hand_over=self.new_reservation(), ignore_eos=True, **params)

    def turn(self) -> None:
        self.first.turn()
        self.relay()
        self.second.turn()

    def relay(self) -> None:
        while self.first.ready:
            self.tell(self.first.ready.pop(0))

    def tell(self, ready: PagesReady) -> None:
        reports = self.reports.setdefault(ready.handle, [])
        if reports:
            self.second.core.prefetch_more(0, ready, self.second.now)
        else:
            ids, source = (
                np.array(self.prompts[ready.handle], dtype=np.int32),
                KvSource(ready.reservation, ADDRESS, ready.num_pages),
            )
            self.second.core.prefetch(Prefetch(0, ready.handle, ids, source), self.second.now)
        reports.append(ready)
        self.second.check()

    def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(400):
            if holds():
                return
            self.turn()
        raise AssertionError("the condition did not become true")

    def finish(self, handle: int, **params: Any) -> Finish:
        """Runs a request to its end on both workers. begin() has submitted it."""
        self.until(lambda: handle in self.first.finishes)
        self.first.check_answer(handle)
        self.go_on(handle, self.prompts[handle], **params)
        self.until(lambda: handle in self.second.finishes)
        self.second.check_answer(handle)
        for _ in range(3):
            self.turn()
        return self.second.finishes[handle]


def computed_tokens(engine: Engine) -> int:
    """Returns the number of tokens whose KV the engine's steps have computed."""
    return sum(int(plan.num_tokens.sum()) for plan in engine.plans)
