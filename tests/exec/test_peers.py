"""Two real executors, the second of which reads the first one's KV over TCP.

Read pages must be bitwise equal to the computed pages. A page that was overwritten during its read must not be published.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.messages import FinishReason, Prefetch
from rootstock_llm.services.worker.core.contracts.reservations import (
    RESERVATION_SECRET_BYTES,
    KvReservation,
    KvSource,
    ReservationReleased,
)
from rootstock_llm.services.worker.core.contracts.transfers import I32, Tier
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.exec.contracts.options import PeerOptions
from rootstock_llm.services.worker.exec.contracts.peer_pages import KvServer, ReadPages
from rootstock_llm.services.worker.exec.remote_kv.kv_server import TcpKvServer
from rootstock_llm.services.worker.exec.remote_kv.peer_reader import TcpPeerReader
from tests.exec.tier_prompts import POOL_PAGES, PROMPT_TOKENS
from tests.exec.tiered import PAGE_SIZE, Answer, Served, build
from tests.exec.tiny_models import TinyModel
from tests.night import NIGHTLY

SAMPLED: dict[str, Any] = {"temperature": 1.0, "frequency_penalty": 0.3}
SEEDS = 30 if NIGHTLY else 3
LATE_S = (0.0, 0.02, 0.2)  # delays of a read, in seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    TinyModel("Qwen3", {"head_dim": 64, "num_attention_heads": 8, "hidden_size": 128}).build(made)
    return made


def prompt(number: int, length: int = PROMPT_TOKENS) -> list[int]:
    return [(number * 37 + at * at) % 90 + 1 for at in range(length)]


class Apart:
    """Two executors. The first computes prompts. The second reads their pages and decodes.

    The second reads the pages of some prompts while the first still computes these prompts.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        """Builds both executors.

        Args:
            folder: folder of the model.
            options: fields of DeviceOptions.
        """
        self.before: Callable[[], None] = lambda: None  # called before each copy of pages, on a thread of the KV server
        self.after: Callable[[], None] = lambda: None  # called after each copy of pages, on a thread of the KV server
        self.receives: Callable[[], bool] = lambda: True  # whether the second executor gets the first one's next message
        self._prompts: dict[int, list[int]] = {}  # prompts by the first executor's handle
        self._ahead: dict[int, int] = {}  # by the first executor's handle: handle of the second executor's prefetch
        self._left: queue.SimpleQueue[ReservationReleased] = queue.SimpleQueue()
        self._num_reservations = 0
        self.first = Served(
            *build(folder, POOL_PAGES, None, peers=PeerOptions(open_server=self._serve), **options), poisoned=True
        )
        reads = PeerOptions(open_reader=lambda layout, page_bytes: TcpPeerReader(layout, PAGE_SIZE, page_bytes))
        self.second = Served(*build(folder, POOL_PAGES, None, peers=reads, **options), poisoned=True)
        server = self.first.executor.kv_server
        assert server is not None
        self.address = f"127.0.0.1:{server.port}"

    def _serve(self, layout: bytes, page_bytes: int, read_pages: ReadPages, num_parts: Sequence[int]) -> KvServer:
        self.page_bytes = page_bytes

        def late(pages: I32, out: memoryview, group: int = 0) -> None:
            self.before()
            read_pages(pages, out, group)
            self.after()

        return TcpKvServer("127.0.0.1", 0, layout, PAGE_SIZE, page_bytes, late, self._left.put, num_parts=num_parts)

    def turn(self) -> None:
        while not self._left.empty():
            self.first.core.release_reservation(self._left.get_nowait())
        self.first.turn()
        self._relay()
        self.second.turn()

    def _relay(self) -> None:
        for ready in self.first.ready:
            now = time.monotonic()
            if not self.receives():
                continue
            if ready.handle in self._ahead:
                self.second.core.prefetch_more(0, replace(ready, handle=self._ahead[ready.handle]), now)
            else:
                ids = np.array(self._prompts[ready.handle], dtype=np.int32)
                self._ahead[ready.handle] = self.second.reserve()
                source = KvSource(ready.reservation, self.address, ready.num_pages)
                self.second.core.prefetch(Prefetch(0, self._ahead[ready.handle], ids, source, revision="r1"), now)
        self.first.ready.clear()

    def compute(self, ids: list[int], seed: int) -> int:
        self._num_reservations += 1
        reservation = KvReservation(
            self._num_reservations, 1, self._num_reservations.to_bytes(RESERVATION_SECRET_BYTES, "little")
        )
        handle = self.first.submit(ids, seed, hand_over=reservation, **SAMPLED)
        self._prompts[handle] = ids
        return handle

    def reads_ahead(self, handle: int) -> bool:
        return handle in self._ahead

    def abort(self, handle: int) -> None:
        """Aborts a request at both executors."""
        self.first.abort(handle)
        if handle in self._ahead:
            self.second.abort(self._ahead.pop(handle))

    def go_on(self, handle: int, ids: list[int], seed: int) -> int | None:
        """Continues the request on the second executor.

        Returns:
            Handle on the second executor. None if the request has ended or was aborted at the first executor before its handover.
        """
        answer = self.first.answers[handle]
        assert answer.finish is not None
        if answer.finish.reason is not FinishReason.HANDED_OVER:
            return None
        reservation = answer.finish.reservation
        source = None if reservation is None else KvSource(reservation, self.address, answer.finish.reserved_pages)
        ahead = self._ahead.pop(handle, None)
        return self.second.submit(ids, seed, output=answer.tokens, source=source, handle=ahead, **SAMPLED)

    def whole(self, handle: int, second: int) -> Answer:
        first, rest = self.first.answers[handle], self.second.answers[second]
        return Answer(first.tokens + rest.tokens, first.logprobs + rest.logprobs, rest.finish)

    def close(self) -> None:
        self.second.close()
        self.first.close()


@pytest.fixture
def apart(folder: Path) -> Iterator[Apart]:
    made = Apart(folder)
    yield made
    made.close()


@pytest.fixture
def plain(folder: Path) -> Iterator[Served]:
    served = Served(*build(folder, 200, None))
    yield served
    served.close()


def ended(apart: Apart, handle: int, ids: list[int], seed: int) -> Answer:
    """Runs a request on both executors and returns the whole result."""
    until(apart, lambda: apart.first.answers[handle].finish is not None)
    second = apart.go_on(handle, ids, seed)
    assert second is not None
    until(apart, lambda: apart.second.answers[second].finish is not None)
    return apart.whole(handle, second)


def until(turning: Apart | Served, holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"the condition was not true within {seconds} s"
        turning.turn()


def test_decode_worker_continues_a_handed_over_request_with_the_same_bits(apart: Apart, plain: Served) -> None:
    for number in range(4):
        answer = ended(apart, apart.compute(prompt(number), number), prompt(number), number)
        assert answer.bits == plain.ask(prompt(number), seed=number, **SAMPLED).bits
        assert answer.finish is not None
        assert answer.finish.cached_from[Tier.PEER] == PROMPT_TOKENS // PAGE_SIZE * PAGE_SIZE
    stats, reader = apart.second.core.stats(), apart.second.executor.peer_reader
    assert stats.refused_pulls_total == 0 < stats.prefetched_pages_total
    assert reader is not None
    pages = 4 * (PROMPT_TOKENS // PAGE_SIZE)
    assert stats.pulled_pages_total == pages and reader.read_bytes() == {"tcp": pages * apart.page_bytes}, (
        "each page must be read once"
    )


@pytest.mark.parametrize("when", ["before", "after"])
def test_pages_of_an_aborted_prompt_are_not_published(apart: Apart, plain: Served, when: str) -> None:
    """The prompt is aborted during the read of its first chunk. The pages then belong to another prompt before the read ends."""
    ids, begun = prompt(0), threading.Event()

    def wait() -> None:
        begun.set()
        time.sleep(0.3)

    setattr(apart, when, wait)
    handle = apart.compute(ids, 0)
    until(apart, lambda: apart.reads_ahead(handle))
    until(apart.second, begun.is_set)  # only the second executor runs
    assert apart.first.answers[handle].finish is None, "the first executor must still compute the prompt"
    apart.first.abort(handle)
    SchedulerControl(apart.first.core).flush_cache()
    other = apart.first.submit(prompt(5), 5, **SAMPLED)
    until(apart, lambda: apart.first.answers[other].finish is not None)
    until(apart, lambda: apart.second.core.settled)
    stats = apart.second.core.stats()
    assert stats.pulled_pages_total == 0 < stats.refused_pulls_total
    assert apart.second.ask(ids, seed=0, **SAMPLED).bits == plain.ask(ids, seed=0, **SAMPLED).bits


def test_second_worker_computes_missing_pages_when_the_first_worker_dies_between_chunks(apart: Apart, plain: Served) -> None:
    ids = prompt(0)
    handle = apart.compute(ids, 0)
    until(apart, lambda: handle in apart._ahead)
    deadline = time.monotonic() + 60.0
    while not apart.second.core.stats().pulled_pages_total:
        assert time.monotonic() < deadline, "the first chunk was not read within 60 s"
        apart.second.turn()  # only the second executor runs, so the first computes no second chunk
    assert apart.first.answers[handle].finish is None, "the first executor must still compute the prompt"
    server = apart.first.executor.kv_server
    assert server is not None
    server.close()
    answer = apart.second.ask(ids, seed=0, **SAMPLED)
    assert answer.bits == plain.ask(ids, seed=0, **SAMPLED).bits
    assert answer.finish is not None and 0 < answer.finish.cached_tokens < PROMPT_TOKENS


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("late_s", [pytest.param(0.3, id="late"), *([pytest.param(5.0, id="very late")] if NIGHTLY else [])])
def test_page_written_during_a_read_is_not_published(apart: Apart, plain: Served, when: str, late_s: float) -> None:
    """The reservation ends during the read, and its pages then belong to another prompt."""
    apart.receives = lambda: False  # so the second executor reads all pages after the end of the prompt
    ids = prompt(0)
    handle = apart.compute(ids, 0)
    until(apart, lambda: apart.first.answers[handle].finish is not None)
    begun: list[float] = []

    def wait() -> None:
        begun.append(time.monotonic())
        time.sleep(late_s)

    setattr(apart, when, wait)
    second = apart.go_on(handle, ids, 0)
    assert second is not None
    until(apart, lambda: bool(begun))
    SchedulerControl(apart.first.core).flush_cache()
    other = apart.first.submit(prompt(5), 5, **SAMPLED)
    until(apart, lambda: apart.first.answers[other].finish is not None)
    until(apart, lambda: apart.second.answers[second].finish is not None)
    assert apart.whole(handle, second).bits == plain.ask(ids, seed=0, **SAMPLED).bits
    assert apart.second.core.stats().pulled_pages_total == 0 < apart.second.core.stats().refused_pulls_total


@pytest.mark.parametrize("seed", range(SEEDS))
def test_answers_of_two_workers_have_the_same_bits_as_answers_of_one_worker(apart: Apart, plain: Served, seed: int) -> None:
    """The steps include late reads, prefetches, aborts on both sides, flushes and shared prefixes.

    The KV pools have pages for one and a half prompts.
    """
    rng = random.Random(seed)
    apart.receives = lambda: rng.random() < 0.7
    apart.before = apart.after = lambda: time.sleep(rng.choice(LATE_S))
    asked: dict[int, tuple[list[int], int]] = {}
    gone_on: dict[int, int] = {}

    def turns(count: int) -> None:
        for _ in range(count):
            apart.turn()
            for handle, (ids, number) in asked.items():
                if apart.first.answers[handle].finish is not None and handle not in gone_on:
                    second = apart.go_on(handle, ids, number)
                    gone_on[handle] = -1 if second is None else second

    for _ in range(10):
        number, length = rng.randrange(3), rng.choice((60, 120, PROMPT_TOKENS))
        asked[apart.compute(prompt(number, length), number)] = prompt(number, length), number
        turns(rng.randrange(12))
        if rng.random() < 0.2:
            apart.abort(rng.choice(list(asked)))
        if rng.random() < 0.2 and apart.second.answers:
            apart.second.abort(rng.choice(list(apart.second.answers)))
        if rng.random() < 0.1:
            SchedulerControl(apart.first.core).flush_cache()
    deadline = time.monotonic() + 120
    while not all(answer.finish for served in (apart.first, apart.second) for answer in served.answers.values()) or len(
        gone_on
    ) < len(asked):
        assert time.monotonic() < deadline, "the requests did not end within 120 s"
        turns(1)
    for handle, second in gone_on.items():
        if second < 0:
            continue
        answer, (ids, number) = apart.whole(handle, second), asked[handle]
        assert answer.finish is not None
        if answer.finish.reason is FinishReason.LENGTH:
            assert answer.bits == plain.ask(ids, seed=number, **SAMPLED).bits
    until(apart, lambda: apart.second.core.settled and not len(apart.first.core.reservations))
    for served in (apart.first, apart.second):
        memory = served.core.memory
        assert memory.num_leased == 0 and not memory.quarantined and memory.num_available == memory.pages.num_pages
