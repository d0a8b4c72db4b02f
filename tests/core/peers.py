"""Two real cores on fake executors, of which one reads the other's pages: a prefill worker and a decode worker."""

from __future__ import annotations

from typing import Any

from services.worker.core.contracts.messages import Finish, FinishReason
from services.worker.core.contracts.rooms import Room, Source
from tests.core.harness import Engine, slow, small

ADDRESS = "10.0.0.1:7103"
EPOCH = 5


def worker(overlap: bool = True, page_moved_s: float = 0.0, **changes: Any) -> Engine:
    return small(overlap, page_moved_s, **{"num_pages": 32, "context_len": 128, **changes})


class Pair:
    """first: computes prompts. second: goes on with them. Both turn on one clock."""

    def __init__(self, page_moved_s: float = 0.0, first: dict[str, Any] | None = None, **second: Any) -> None:
        self.first = worker(**(first or {}))
        self.second = slow(worker(reads_peers=True, page_moved_s=page_moved_s, **second))
        self.second.executor.peers[ADDRESS] = self.first.executor
        self._rooms = 0

    def new_room(self) -> Room:
        self._rooms += 1
        return Room(self._rooms, EPOCH, self._rooms.to_bytes(16, "little"))

    def compute(self, handle: int, prompt: list[int], **params: Any) -> Finish:
        """By the first worker, up to the first token."""
        self.first.submit(handle, prompt, hand_over=self.new_room(), ignore_eos=True, **params)
        self.first.drain()
        self.first.check_answer(handle)
        return self.first.finishes[handle]

    def go_on(self, handle: int, prompt: list[int], **params: Any) -> None:
        """By the second worker, with what the first has said."""
        finish, output = self.first.finishes[handle], self.first.outputs[handle]
        assert finish.reason is FinishReason.HANDED_OVER
        source = None if finish.room is None else Source(finish.room, ADDRESS, finish.room_pages)
        self.second.submit(handle, prompt, output=output, source=source, ignore_eos=True, **params)

    def answer(self, handle: int, prompt: list[int], **params: Any) -> Finish:
        """By both, whole."""
        self.compute(handle, prompt, **params)
        self.go_on(handle, prompt, **params)
        self.second.drain()
        self.second.check_answer(handle)
        self.turn()
        return self.second.finishes[handle]

    def turn(self) -> None:
        self.first.turn()
        self.second.turn()

    def assert_all_is_free(self) -> None:
        """But for what is cached, which nobody uses."""
        for engine in (self.first, self.second):
            memory = engine.core.table.memory
            assert memory.num_available == memory.pages.num_pages, "a page is held by nobody"
            assert not len(engine.core.table.rooms) and not memory.quarantined


def computed_tokens(engine: Engine) -> int:
    """That its steps have computed the KV of."""
    return sum(int(plan.num_tokens.sum()) for plan in engine.plans)
