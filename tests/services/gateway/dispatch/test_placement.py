"""Tests of Placement: the KV reservations that it releases, and the time that a choice may wait."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.dispatch.placement import KvReservation, Placement


@dataclass
class Link:
    """A link that records aborts and released reservations."""

    has_submit: bool = True  # the worker has received the submit
    released: list[int] = field(default_factory=list)  # handles of released reservations
    aborted: list[int] = field(default_factory=list)  # handles
    info: Any = field(default_factory=lambda: worker_pb2.WorkerInfo(role="decode", kv_layout=b"pages"))
    model_version: Any = None

    def abort(self, handle: int) -> bool:
        self.aborted.append(handle)
        return not self.has_submit

    def release_reservation(self, handle: int) -> None:
        self.released.append(handle)


UNUSED: Any = None


@pytest.mark.parametrize(("has_submit", "released"), [(True, [8]), (False, [7])])
def test_placement_releases_the_kv_reservation_when_no_worker_reads_the_pages(has_submit: bool, released: list[int]) -> None:
    """A connected decode worker that has received the submit releases the KV reservation itself."""
    prefill, decode, copy = Link(), Link(has_submit), Link(has_submit=False)
    placement = Placement(UNUSED, UNUSED, UNUSED)
    placement.choice = type("Choice", (), {"output_ids": [1]})()
    source = worker_pb2.KvSource()
    placement.hand_over(KvReservation(prefill, 7, source, b"pages"))  # type: ignore[arg-type]
    assert placement.take_source(decode, 12) is source  # type: ignore[arg-type]
    placement.place(decode, 12, 0, 0.0)  # type: ignore[arg-type]
    placement.copy_to(copy, 13)  # type: ignore[arg-type]
    placement.cancel_hedge()
    assert copy.aborted == [13] and prefill.released == [], "a hedge copy has no KV reservation"
    again = Placement(UNUSED, UNUSED, UNUSED)
    again.choice = placement.choice
    again.choice.trace = None
    again.hand_over(KvReservation(prefill, 8, source, b"pages"))  # type: ignore[arg-type]
    again.take_source(decode, 14)  # type: ignore[arg-type]
    again.lost(14, was_sent=has_submit)
    assert again.prefilled is not has_submit and again.source_layout == (b"" if has_submit else b"pages")
    placement.withdraw()
    assert decode.aborted == [12] and prefill.released == released


def test_placement_counts_only_queue_time_against_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time on workers between two waits does not count. A choice with output gets the whole time again."""

    async def run() -> list[float]:
        loop, placement, now = asyncio.get_running_loop(), Placement(UNUSED, UNUSED, UNUSED), 0.0
        monkeypatch.setattr(loop, "time", lambda: now)
        ends = []
        for begins, lasts, is_reset in ((100.0, 4.0, False), (500.0, 2.0, False), (900.0, 1.0, True), (950.0, 1.0, False)):
            now = begins
            placement.begin_wait(10.0, is_reset, lambda: None)
            assert placement.wait_timer is not None
            ends.append(placement.wait_timer.when())
            now += lasts
            assert placement.end_wait() == lasts
        now = 1000.0
        placement.begin_wait(10.0, False, lambda: None)
        now = 1008.0  # the wait expires and is prolonged
        placement.prolong_wait(10.0, lambda: None)
        assert placement.wait_timer is not None
        ends.append(placement.wait_timer.when())
        now = 1011.0
        placement.end_wait()
        placement.begin_wait(10.0, False, lambda: None)
        assert placement.wait_timer is not None
        ends.append(placement.wait_timer.when())
        placement.end_wait()
        return ends

    assert asyncio.run(run()) == [110.0, 506.0, 910.0, 959.0, 1018.0, 1018.0]
