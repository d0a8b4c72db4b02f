"""Reads of pages through NIXL: the received bytes, the times at which pages are readable in memory, and the fallback to TCP."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rootstock_llm.protos import kv_pb2 as pb
from rootstock_llm.services.shared import limits
from rootstock_llm.services.worker.exec.remote_kv import frames, peer_reader
from rootstock_llm.services.worker.exec.remote_kv import nixl_staging as staging
from rootstock_llm.services.worker.exec.remote_kv.frames import PageRequest, RequestKind, Status
from rootstock_llm.services.worker.exec.remote_kv.kv_server import ServerLimits
from rootstock_llm.services.worker.exec.remote_kv.nixl_process import CarriedArea
from rootstock_llm.services.worker.exec.remote_kv.nixl_staging import Unstaged, parse_area, staging_shape
from rootstock_llm.services.worker.exec.remote_kv.shared_ring import FILLED, FREE
from rootstock_llm.services.worker.exec.remote_kv.socket_folder import SocketFolder
from tests.exec.remote_kv import sick_peers
from tests.exec.remote_kv.carriers import LIBRARIES, KeptCarrier, carrier
from tests.exec.remote_kv.served_reservations import (
    PAGE_BYTES,
    PATIENCE_S,
    POOL_PAGES,
    Asking,
    Served,
    pull,
    read_request,
    reader,
    reservation,
    until,
)
from tests.exec.remote_kv.sick_peers import SickPeer
from tests.exec.remote_kv.test_peer_reader import warnings

PAGES = tuple(range(POOL_PAGES))[::-1]
AT_ONCE = 2  # pages per piece; a read of all pages fills each slot several times
PIECES = POOL_PAGES // AT_ONCE
assert PIECES > 2 * staging.SLOTS
ALL = POOL_PAGES * PAGE_BYTES
SLOT_BYTES = AT_ONCE * PAGE_BYTES


@pytest.fixture(scope="module", params=LIBRARIES)
def both(request: pytest.FixtureRequest) -> Iterator[tuple[KeptCarrier, KeptCarrier]]:
    """Yields the carriers of a server and of a reader."""
    with carrier(request.param) as its, carrier(request.param) as own:
        yield its, own


@pytest.fixture(scope="module")
def fakes() -> Iterator[tuple[KeptCarrier, KeptCarrier]]:
    with carrier("fake") as its, carrier("fake") as own:
        yield its, own


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLOT_BYTES", SLOT_BYTES + 1)


def is_empty(one: KeptCarrier, size: int) -> bool:
    """Returns whether the staging area that was last returned to the carrier has only zeros."""
    area = one.area(size, time.monotonic() + PATIENCE_S)
    had_any = bool(area.data.any())
    area.close()
    return not had_any


class Tapping(Asking):
    """A connection whose staging area the test reads slot by slot."""

    def __init__(self, served: Served, own: KeptCarrier) -> None:
        super().__init__(served.server.port)
        self.opened = served.opened(pages=PAGES)
        status, payload = self.ask(PageRequest(RequestKind.STAGE, self.opened.reservation))
        assert status is Status.OK
        self.area_message = pb.StagingArea.FromString(payload)
        self._area: CarriedArea = own.area(staging_shape(PAGE_BYTES).slot_bytes, time.monotonic() + PATIENCE_S)
        self._area.load(self.area_message.metadata, time.monotonic() + PATIENCE_S)

    def slot(self, number: int) -> bytes:
        self._area.read(self.area_message.addresses[number], SLOT_BYTES, time.monotonic() + PATIENCE_S)
        return self._area.data[:SLOT_BYTES].tobytes()

    def ask_for_all(self) -> None:
        self.socket.sendall(frames.pack_request(read_request(self.opened, 0, POOL_PAGES)))

    def stop(self) -> None:
        self.socket.close()
        self._area.close()


def test_reader_gets_pages_in_pieces_and_all_memory_areas_are_wiped(both: tuple[KeptCarrier, KeptCarrier]) -> None:
    its, own = both
    with Served(carrier=its) as served:
        opened = served.opened(pages=PAGES)
        for _ in range(limits.MAX_STAGING_AREAS + 1):  # each connection returns its staging area when it ends
            one = reader(carrier=own)
            assert pull(one, served.source(opened), opened, 3, 1) == served.pool.bytes_of(PAGES[3:4])
            one.close()
            until(lambda: served.server.counts().num_connections == 0)
        one, had = reader(carrier=own), served.server.counts().served_bytes
        for first, count in ((0, POOL_PAGES), (5, 3 * AT_ONCE), (1, POOL_PAGES - 2)):
            assert pull(one, served.source(opened), opened, first, count) == served.pool.bytes_of(PAGES[first : first + count])
        total = 2 * ALL + (3 * AT_ONCE - 2) * PAGE_BYTES
        assert one.read_bytes() == {"nixl": total}
        until(lambda: served.server.counts().served_bytes == had + total)
        assert served.server.counts().num_connections == 1 and not served.refused
        one.close()
    assert is_empty(its, staging_shape(PAGE_BYTES).num_bytes) and is_empty(own, staging_shape(PAGE_BYTES).slot_bytes)


def test_server_wipes_a_slot_when_the_reader_marks_the_slot_as_free(both: tuple[KeptCarrier, KeptCarrier]) -> None:
    with Served(carrier=both[0]) as served, Tapping(served, both[1]) as tapping:
        assert tapping.slot(0)[: staging.NONCE_BYTES] == tapping.area_message.nonce and not any(tapping.slot(1))
        tapping.ask_for_all()
        tapping.socket.recv(frames.RESPONSE_BYTES, socket.MSG_WAITALL)
        for slot in range(staging.SLOTS):
            assert tapping.socket.recv(1) == FILLED
            assert tapping.slot(slot) == served.pool.bytes_of(PAGES[slot * AT_ONCE : (slot + 1) * AT_ONCE])
        assert len(served.pool.reads) == staging.SLOTS, "a slot is not overwritten before the reader frees it"
        served.server.close_reservations([tapping.opened.reservation])
        tapping.socket.sendall(FREE * staging.SLOTS)
        until(lambda: not any(any(tapping.slot(slot)) for slot in range(staging.SLOTS)))
        tapping.stop()


def test_server_wipes_the_area_when_a_reader_sends_no_mark(both: tuple[KeptCarrier, KeptCarrier]) -> None:
    with Served(ServerLimits(send_timeout_s=0.3), carrier=both[0]) as served, Tapping(served, both[1]) as tapping:
        tapping.ask_for_all()
        assert tapping.wait_for_end()
        until(lambda: served.server.counts().num_connections == 0)
        try:
            assert not any(tapping.slot(0))
        except OSError:  # the server has already released the area
            assert served.server.counts().num_connections == 0
        assert is_empty(both[0], staging_shape(PAGE_BYTES).num_bytes)
        tapping.stop()


def test_server_stages_no_page_of_a_reservation_that_is_closed_during_the_read(
    both: tuple[KeptCarrier, KeptCarrier],
) -> None:
    with Served(carrier=both[0]) as served:
        other, one = served.opened(2, PAGES), reader(carrier=both[1])
        for rounds, piece in enumerate((0, 1, staging.SLOTS, PIECES - 1), 1):
            opened, had = served.opened(1, PAGES), len(served.pool.reads)
            last = had + piece + 1

            def close_one(last: int = last) -> None:
                if len(served.pool.reads) == last:
                    served.server.close_reservations([reservation(1, PAGES).reservation])

            served.pool.after = close_one
            assert pull(one, served.source(opened), opened, 0, POOL_PAGES) is None
            assert len(served.pool.reads) == last, f"the server copies no piece after piece {piece}"
            assert pull(one, served.source(other), other, 0, POOL_PAGES) == served.pool.bytes_of(PAGES)
            assert served.refused == {"no_room": rounds} and served.server.counts().num_connections == 1
            assert one.read_bytes() == {"nixl": rounds * ALL}
        one.close()
    with Served(carrier=both[0]) as served, Tapping(served, both[1]) as tapping:
        served.pool.after = lambda: served.server.close_reservations([tapping.opened.reservation])
        assert tapping.ask(read_request(tapping.opened, 0, AT_ONCE)) == (Status.NO_RESERVATION, b"")
        assert served.pool.bytes_of(PAGES[:1]) not in tapping.slot(0), (
            "pages of a closed reservation are not readable in the area"
        )
        tapping.stop()


def test_server_grants_one_staging_area_per_connection_for_a_known_reservation(
    fakes: tuple[KeptCarrier, KeptCarrier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = PageRequest(RequestKind.STAGE, reservation(2, PAGES).reservation)
    folder = SocketFolder(tmp_path / "kv")
    with Served(carrier=fakes[0], folder=folder) as served:
        stage = PageRequest(RequestKind.STAGE, served.opened().reservation)
        with Asking(served.server.port) as asking:
            assert asking.ask(unknown) == (Status.NO_RESERVATION, b"")
            assert asking.ask(stage)[0] is Status.OK
            assert asking.ask(stage)[0] is Status.MALFORMED and asking.wait_for_end()
        one = reader(folder=folder, carrier=fakes[1])  # shared memory is preferred
        assert pull(one, served.source(served.opened(3)), served.opened(3), 0, 2)
        assert one.read_bytes() == {"shm": 2 * PAGE_BYTES}
        one.close()
        assert served.refused == {"no_room": 1, "malformed": 1}
        one = reader(carrier=fakes[1])
        assert pull(one, served.source(reservation(2, PAGES)), reservation(2, PAGES), 0, 2) is None
        assert served.refused["no_room"] == 2, "the refused STAGE request is not followed by a request for pages"
        assert pull(one, served.source(served.opened(3)), served.opened(3), 0, 2) and set(one.read_bytes()) == {"nixl"}
        one.close()
    with Served() as served, Asking(served.server.port) as asking:
        opened = served.opened(pages=PAGES)
        assert asking.ask(PageRequest(RequestKind.STAGE, opened.reservation)) == (Status.NO_AREA, b"") and not served.refused
        assert asking.ask(read_request(opened, 0, 1)) == (Status.OK, served.pool.bytes_of(PAGES[:1]))
    with carrier("fake") as its, Served(carrier=its) as served:
        monkeypatch.setattr(limits, "MAX_STAGING_AREAS", 1)
        first, second = (reader(carrier=fakes[1]) for _ in range(2))
        opened = served.opened(pages=PAGES)
        for one, transport in ((first, "nixl"), (second, "tcp"), (second, "tcp")):
            assert pull(one, served.source(opened), opened, 0, 2) == served.pool.bytes_of(PAGES[:2])
            assert set(one.read_bytes()) == {transport}
        assert served.refused == {"areas": 1}
        first.close()
        second.close()


def reads_over_tcp(served: Served, own: KeptCarrier, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Reads all pages twice over TCP, and returns the warnings: at most one, because NIXL is not tried again immediately."""
    opened, one = served.opened(pages=PAGES), reader(carrier=own)
    for _ in range(2):
        assert pull(one, served.source(opened), opened, 0, POOL_PAGES) == served.pool.bytes_of(PAGES)
    assert one.read_bytes() == {"tcp": 2 * ALL} and not served.refused
    assert served.left == [], "a reservation is released only with the connection of its last read"
    one.close()
    return warnings(caplog)


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("fault", ["stuck", "late"])
def test_reader_falls_back_to_tcp_when_a_read_through_nixl_does_not_end(
    fault: str, fakes: tuple[KeptCarrier, KeptCarrier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(staging, "PIECE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(peer_reader, "STAGE_TIMEOUT_S", 1.0)
    with carrier("fake", fault) as own, Served(carrier=fakes[0]) as served:
        (warning,) = reads_over_tcp(served, own, caplog)
        assert "a read through NIXL has not ended within" in warning


def test_reader_falls_back_to_tcp_when_the_bytes_are_wrong(
    fakes: tuple[KeptCarrier, KeptCarrier], caplog: pytest.LogCaptureFixture
) -> None:
    with carrier("fake", "wrong") as own, Served(carrier=fakes[0]) as served:
        (warning,) = reads_over_tcp(served, own, caplog)
        assert "the bytes that were read through NIXL differ from the nonce" in warning


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("whose", [0, 1])
def test_worker_uses_tcp_and_no_staging_area_when_nixl_cannot_register_memory(
    whose: int, fakes: tuple[KeptCarrier, KeptCarrier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with carrier("fake", "refuses") as one:
        its, own = (one, fakes[1]) if whose == 0 else (fakes[0], one)
        with Served(carrier=its) as served:
            assert len(reads_over_tcp(served, own, caplog)) == whose
        (record,) = (each for each in caplog.records if each.levelname == "WARNING")
        assert "NIXL cannot register memory" in record.__dict__["fields"]["error"], (
            "only the worker without memory logs the error"
        )
        monkeypatch.setattr(limits, "MAX_STAGING_AREAS", 1)
        shape = staging_shape(PAGE_BYTES)
        with pytest.raises(OSError, match="NIXL cannot register memory"):
            one.area(shape.num_bytes if whose == 0 else shape.slot_bytes, time.monotonic() + PATIENCE_S)


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("whose", [0, 1])
def test_reader_continues_over_tcp_when_a_carrier_process_dies(whose: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_TIMEOUT_S", 1.0)
    with carrier("fake") as its, carrier("fake") as own, Served(carrier=its) as served:
        opened, one = served.opened(pages=PAGES), reader(carrier=own)
        assert pull(one, served.source(opened), opened, 0, 2)
        os.kill((its, own)[whose].pid, signal.SIGKILL)
        for _ in range(2):
            assert pull(one, served.source(opened), opened, 0, POOL_PAGES) == served.pool.bytes_of(PAGES)
        assert one.read_bytes() == {"nixl": 2 * PAGE_BYTES, "tcp": 2 * ALL}
        one.close()


def _response(payload: bytes, status: Status = Status.OK) -> bytes:
    return struct.pack("<B7xQ", status, len(payload)) + payload


def _area(**changes: object) -> pb.StagingArea:
    fields = {"metadata": b"m", "addresses": [1 << 20], "slot_bytes": SLOT_BYTES, "nonce": b"n" * staging.NONCE_BYTES}
    return pb.StagingArea(**{**fields, **changes})  # type: ignore[arg-type]


AREAS: dict[str, bytes] = {
    "no StagingArea message": b"\xff",
    "empty": b"",
    "no slots": _area(addresses=[]).SerializeToString(),
    "more slots than the limit": _area(addresses=[0] * (limits.MAX_STAGING_SLOTS + 1)).SerializeToString(),
    "more metadata than the limit": _area(metadata=bytes(limits.MAX_NIXL_METADATA_BYTES + 1)).SerializeToString(),
    "no metadata": _area(metadata=b"").SerializeToString(),
    "slots of parts of pages": _area(slot_bytes=SLOT_BYTES - 1).SerializeToString(),
    "slots larger than the reader's": _area(slot_bytes=SLOT_BYTES + PAGE_BYTES).SerializeToString(),
    "slots of no bytes": _area(slot_bytes=0).SerializeToString(),
    "no nonce": _area(nonce=b"").SerializeToString(),
    "a nonce that is too long": _area(nonce=bytes(staging.NONCE_BYTES + 1)).SerializeToString(),
    "an address whose slot ends after 2^64": _area(addresses=[(1 << 64) - 1]).SerializeToString(),
}


def test_invalid_messages_about_a_staging_area_are_refused() -> None:
    parse_area(_area().SerializeToString(), PAGE_BYTES, SLOT_BYTES)
    for case, message in AREAS.items():
        try:
            parse_area(message, PAGE_BYTES, SLOT_BYTES)
        except Unstaged as error:
            assert str(error), case
        else:
            pytest.fail(f"accepted: {case}")


RESPONSES: dict[str, bytes] = {
    "a worker without STAGE requests": _response(b"unknown request kind 3", Status.MALFORMED),
    "metadata of no agent": _response(_area().SerializeToString()),
    "more than the limit of a message": struct.pack("<B7xQ", Status.OK, limits.MAX_STAGING_MESSAGE_BYTES + 1),
    "an incomplete message": _response(_area().SerializeToString())[:-3],
    "an unknown status": struct.pack("<B7xQ", 200, 0),
}


def test_reader_falls_back_to_tcp_when_the_response_to_a_stage_request_is_invalid(
    fakes: tuple[KeptCarrier, KeptCarrier], caplog: pytest.LogCaptureFixture
) -> None:
    page = bytes(range(128)) * (PAGE_BYTES // 128)
    for case, response in RESPONSES.items():
        with SickPeer(sick_peers.sends(response), sick_peers.sends(_response(page))) as peer:
            opened, one = reservation(1, PAGES), reader(carrier=fakes[1])
            source = Served.source(peer, opened)  # type: ignore[arg-type]
            assert pull(one, source, opened, 0, 1) == page, case
            assert one.read_bytes() == {"tcp": PAGE_BYTES} and peer.num_connections == 2, case
            assert len(warnings(caplog)) == 1, case
            one.close()
        caplog.clear()


def test_carrier_process_has_no_secrets_and_ends_with_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOTSTOCK_CONTROL_TOKEN", "a secret")
    monkeypatch.setenv("UCX_TLS", "tcp")
    with carrier("fake") as one:
        process = Path(f"/proc/{one.pid}")
        environment = process.joinpath("environ").read_bytes()
        assert b"a secret" not in environment and b"UCX_TLS=tcp" in environment
        os.kill(one.pid, signal.SIGINT)  # Ctrl-C in a terminal reaches the carrier, too
        one.area(SLOT_BYTES, time.monotonic() + PATIENCE_S).close()
    until(lambda: not process.exists())
