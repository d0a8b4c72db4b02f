"""Checks simulated reads of other workers' KV: their time, their order per address, and the cases in which no pages arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.sim.core.run.remote_reads import READ_TIMEOUT_S, OpenReservations, RemoteReads, Wire
from rootstock_llm.services.worker.core.contracts.reservations import (
    KvReservation,
    KvSource,
    OpenReservation,
    ReservationEvents,
    proof,
)
from rootstock_llm.services.worker.core.contracts.transfers import NO_PAGES, Fact, OperationKind, PageOperation, Pull

PAGE_SIZE, PAGE_BYTES = 4, 1000
WIRE = Wire(bytes_per_s=10_000.0, latency_s=0.5)
RESERVATION = KvReservation(7, 1, b"s" * 16)
TOKENS = np.arange(40, dtype=np.int32).tobytes()
TREE = "a tree"


class Reading:
    """A reader, and two workers `a` and `b` with ten pages of the same prompt in the KV reservation RESERVATION."""

    def __init__(self, wire: Wire = WIRE) -> None:
        self.reservations = OpenReservations()
        self.left: list[tuple[str, float]] = []
        self.reads = RemoteReads(
            "c", self.reservations, wire, PAGE_BYTES, PAGE_SIZE, lambda source, at: self.left.append((source.address, at))
        )
        opened = OpenReservation(RESERVATION, TREE, TOKENS, np.arange(10, dtype=np.int32))
        for address in ("a", "b"):
            self.reservations.update(address, ReservationEvents(opened=(opened,)))

    def begin(self, op_id: int, count: int, address: str = "a", first: int = 0, at: float = 0.0, **changes: Any) -> None:
        source = KvSource(replace(RESERVATION, **changes), address, 10)
        pull = Pull(source, first, proof(RESERVATION.secret, TREE, TOKENS[: (first + count) * PAGE_SIZE * 4]))
        keys = tuple(bytes([op_id, number]) for number in range(count))
        operation = PageOperation(op_id, OperationKind.PULL, keys, np.arange(count, dtype=np.int32), NO_PAGES, pull=pull)
        self.reads.begin([operation], at)

    def facts(self, now: float) -> list[Fact]:
        return self.reads.ended(now)


def test_read_takes_latency_and_transfer_time() -> None:
    reading = Reading()
    reading.begin(1, 5, at=2.0)
    assert reading.reads.next_end() == 3.0 and not reading.facts(2.99)
    assert reading.facts(3.0) == [Fact(1, 5, 1.0)] and reading.reads.next_end() is None
    assert reading.reads.read_bytes == 5000


def test_reads_run_in_sequence_per_address() -> None:
    reading = Reading()
    reading.begin(1, 5)
    reading.begin(2, 5, first=5)
    reading.begin(3, 10, "b")
    assert [fact.op_id for fact in reading.facts(1.0)] == [1]
    assert reading.reads.next_end() == 1.5
    assert [fact.op_id for fact in reading.facts(1.5)] == [3]
    assert [(fact.op_id, fact.seconds) for fact in reading.facts(2.0)] == [(2, 1.0)]


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda r: r.reservations.update("a", ReservationEvents(closed=(RESERVATION,))), id="closed reservation"),
        pytest.param(lambda r: r.reservations.drop("a"), id="lost worker"),
    ],
)
def test_read_fails_when_the_reservation_ends_early(spoil: Callable[[Reading], None]) -> None:
    reading = Reading()
    reading.begin(1, 5)
    spoil(reading)
    assert reading.facts(1.0) == [Fact(1)] and reading.reads.read_bytes == 0


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"epoch": 2}, id="another start of the worker"),
        pytest.param({"number": 8}, id="no such reservation"),
        pytest.param({"secret": b"t" * 16}, id="another secret"),
        pytest.param({"address": "d"}, id="no such worker"),
    ],
)
def test_read_fails_when_the_reservation_is_unknown(other: dict[str, Any]) -> None:
    reading = Reading()
    reading.begin(1, 5, **other)
    assert reading.facts(1.0) == [Fact(1)]


def test_read_fails_when_the_proof_is_wrong() -> None:
    reading = Reading()
    pull = Pull(KvSource(RESERVATION, "a", 10), 0, proof(RESERVATION.secret, TREE, b"x" * 16))
    reading.reads.begin([PageOperation(1, OperationKind.PULL, (b"k",), np.zeros(1, np.int32), NO_PAGES, pull=pull)], 0.0)
    assert reading.facts(1.0) == [Fact(1)]


def test_read_fails_when_pages_exceed_the_reservation() -> None:
    reading = Reading()
    reading.begin(1, 5, first=6)
    assert reading.facts(1.0) == [Fact(1)]


@pytest.mark.parametrize("wire", [Wire(0.0, 0.0), Wire(10.0, 0.0)])
def test_read_fails_after_the_timeout(wire: Wire) -> None:
    reading = Reading(wire)
    reading.begin(1, 5)
    assert reading.reads.next_end() == READ_TIMEOUT_S and reading.facts(READ_TIMEOUT_S) == [Fact(1)]


def test_release_is_sent_after_the_reads_from_the_same_address() -> None:
    reading = Reading()
    reading.begin(1, 5)
    reading.reads.change_reservations(
        ReservationEvents(released=(KvSource(RESERVATION, "a", 10), KvSource(RESERVATION, "b", 10))), 0.25
    )
    assert reading.left == [("a", 1.0), ("b", 0.25)]
