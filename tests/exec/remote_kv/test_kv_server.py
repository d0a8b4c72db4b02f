"""The server of KV reservations: reads, refusals, and faulty clients."""

from __future__ import annotations

import resource
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, ReservationReleased
from rootstock_llm.services.worker.exec.contracts.peer_pages import PeerCounts
from rootstock_llm.services.worker.exec.remote_kv import frames
from rootstock_llm.services.worker.exec.remote_kv.frames import PageLayout, PageRequest, RequestKind, Status
from rootstock_llm.services.worker.exec.remote_kv.kv_server import ServerLimits
from tests.exec.remote_kv.served_reservations import (
    EPOCH,
    LAYOUT,
    PAGE_BYTES,
    PAGE_SIZE,
    TREE,
    Asking,
    Running,
    Served,
    proof_of,
    read_request,
    reservation,
    secret_of,
    until,
)

HELLO = frames.pack_hello(PageLayout(LAYOUT, PAGE_SIZE, PAGE_BYTES))
PAGES = (5, 2, 9, 30, 0)
OURS, OTHERS = reservation(1, PAGES), reservation(2, (7, 8, 3))
SMALL = ServerLimits(max_read_bytes=4 * PAGE_BYTES)
READ = read_request(OURS, 1, 2)


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(SMALL) as one:
        one.server.open(OURS)
        one.server.open(OTHERS)
        yield one


def serves(one: Served) -> None:
    with Asking(one.server.port) as asking:
        assert asking.ask(READ) == (Status.OK, one.pool.bytes_of(PAGES[1:3]))


class TestPages:
    @pytest.mark.by_day(one_in=3)
    @pytest.mark.parametrize("ranges", [[(0, 4)], [(3, 2), (0, 1), (1, 3)], [(4, 1), (4, 1), (0, 4), (2, 1)]])
    def test_server_sends_any_ranges_of_pages_in_any_order(self, served: Served, ranges: list[tuple[int, int]]) -> None:
        with Asking(served.server.port) as asking:
            for first, count in ranges:
                got = asking.ask(read_request(OURS, first, count))
                assert got == (Status.OK, served.pool.bytes_of(PAGES[first : first + count]))
            assert asking.ask(read_request(OTHERS, 0, 3)) == (Status.OK, served.pool.bytes_of((7, 8, 3)))
            size = (sum(count for _, count in ranges) + 3) * PAGE_BYTES
            until(lambda: served.server.counts() == PeerCounts(size, {}, 1))

    def test_server_sends_one_page_when_max_read_bytes_is_smaller_than_a_page(self) -> None:
        with Served(ServerLimits(max_read_bytes=PAGE_BYTES - 1)) as served:
            served.server.open(OURS)
            with Asking(served.server.port) as asking:
                assert asking.ask(read_request(OURS, 0, 1))[0] is Status.OK
                assert asking.ask(read_request(OURS, 0, 2))[0] is Status.TOO_LARGE


REFUSED = {
    "a zero secret": (replace(READ, reservation=replace(OURS.reservation, secret=bytes(16))), Status.NO_RESERVATION),
    "a secret with another last byte": (
        replace(READ, reservation=replace(OURS.reservation, secret=secret_of(1)[:-1] + b"!")),
        Status.NO_RESERVATION,
    ),
    "the secret of another reservation": (
        replace(READ, reservation=replace(OURS.reservation, secret=OTHERS.reservation.secret)),
        Status.NO_RESERVATION,
    ),
    "the number of another reservation": (replace(READ, reservation=replace(OURS.reservation, number=2)), Status.NO_RESERVATION),
    "another epoch": (replace(READ, reservation=replace(OURS.reservation, epoch=EPOCH + 1)), Status.NO_RESERVATION),
    "a reservation that was never open": (replace(READ, reservation=replace(OURS.reservation, number=99)), Status.NO_RESERVATION),
    "the largest number": (
        replace(READ, reservation=KvReservation((1 << 64) - 1, (1 << 64) - 1, b"\xff" * 16)),
        Status.NO_RESERVATION,
    ),
    "a zero secret, and pages out of range": (
        replace(READ, reservation=replace(OURS.reservation, secret=bytes(16)), first=99),
        Status.NO_RESERVATION,
    ),
    "a range that ends after the last page": (read_request(OURS, 4, 2), Status.OUT_OF_RANGE),
    "a range after the last page": (read_request(OURS, 5, 1), Status.OUT_OF_RANGE),
    "the largest page": (replace(READ, first=(1 << 32) - 1), Status.OUT_OF_RANGE),
    "no page": (read_request(OURS, 1, 0), Status.OUT_OF_RANGE),
    "no proof": (replace(READ, proof=bytes(32)), Status.OTHER_PROMPT),
    "a proof of fewer pages": (replace(READ, proof=proof_of(OURS, 2)), Status.OTHER_PROMPT),
    "a proof of more pages": (replace(READ, proof=proof_of(OURS, 4)), Status.OTHER_PROMPT),
    "a proof of another tree": (replace(READ, proof=proof_of(reservation(1, PAGES, TREE + "!"), 3)), Status.OTHER_PROMPT),
    "a proof by another secret": (
        replace(READ, proof=proof_of(replace(OURS, reservation=OTHERS.reservation), 3)),
        Status.OTHER_PROMPT,
    ),
    "more than max_read_bytes": (read_request(OURS, 0, 5), Status.TOO_LARGE),
    "the largest count": (replace(READ, count=(1 << 32) - 1), Status.TOO_LARGE),
}


@pytest.mark.by_day(one_in=10, seed=94)
@pytest.mark.parametrize("case", REFUSED)
def test_server_refuses_a_read_and_keeps_the_connection(served: Served, case: str) -> None:
    request, status = REFUSED[case]
    with Asking(served.server.port) as asking:
        assert asking.ask(request) == (status, b"")
        assert served.pool.reads == []
        assert served.refused == {status.name.lower(): 1}
        assert asking.ask(READ)[0] is Status.OK, "the connection still serves reads"


BAD = {
    "an HTTP request": b"GET / HTTP/1.1\r\n" + b"x" * 200,
    "half a hello": HELLO[:20],
    "a hello without its layout": HELLO[: frames.HELLO_BYTES],
    "a layout of the largest size": struct.pack("<8sII32s", HELLO[:8], 1, (1 << 32) - 1, bytes(32)),
    "half a request": HELLO + frames.pack_request(READ)[:-1],
    "one byte of a request": HELLO + b"\x01",
    "a request of an unknown kind": HELLO + b"\x07" * frames.REQUEST_BYTES,
    "a request of kind 0": HELLO + bytes(frames.REQUEST_BYTES),
}
SILENT = {
    "from the start": (b"", {}),
    "in its hello": (HELLO[:9], {"malformed": 1}),
    "in its layout": (HELLO[:-1], {"malformed": 1}),
    "after its hello": (HELLO, {}),
    "in a request": (HELLO + b"\1", {"malformed": 1}),
}


class TestFrames:
    @pytest.mark.by_day(one_in=2, seed=6)
    @pytest.mark.parametrize("case", BAD)
    def test_server_ends_only_one_connection_after_a_malformed_frame(self, served: Served, case: str) -> None:
        with Asking(served.server.port) as other:
            with Asking(served.server.port, hello=BAD[case]) as asking:
                asking.end_sending()
                assert asking.wait_for_end()
            until(lambda: served.server.counts().num_connections == 1)
            assert served.refused == {"malformed": 1} and served.pool.reads == []
            assert other.ask(READ)[0] is Status.OK
        serves(served)

    @pytest.mark.parametrize("sent", [b"", HELLO], ids=["without a hello", "with a hello"])
    def test_server_counts_no_refusal_when_a_client_only_connects(self, served: Served, sent: bytes) -> None:
        with Asking(served.server.port, hello=sent) as asking:
            asking.end_sending()
            assert asking.wait_for_end()
        until(lambda: served.server.counts() == PeerCounts(0, {}, 0))

    @pytest.mark.by_day(one_in=3, seed=10)
    @pytest.mark.parametrize("case", SILENT)
    def test_server_ends_silent_connections(self, case: str) -> None:
        sent, refused = SILENT[case]
        with Served(ServerLimits(hello_timeout_s=0.2, idle_timeout_s=0.2)) as served:
            with Asking(served.server.port, hello=sent) as asking:
                assert asking.wait_for_end()
            until(lambda: served.server.counts().num_connections == 0)
            assert served.refused == refused

    @settings(max_examples=50)
    @given(before=st.sampled_from([b"", HELLO, HELLO + frames.pack_request(READ)]), sent=st.binary(max_size=300))
    @example(before=HELLO, sent=frames.pack_request(READ) * 3)
    def test_server_serves_other_connections_after_one_sent_arbitrary_bytes(self, before: bytes, sent: bytes) -> None:
        with Served(SMALL) as served:
            served.server.open(OURS)
            with Asking(served.server.port, hello=before + sent) as asking:
                asking.end_sending()
                assert asking.wait_for_end()
            serves(served)
            assert all(read == [*PAGES[1:3]] for read in served.pool.reads), (
                "only pages of a request with a valid proof are copied"
            )


class TestLayouts:
    @pytest.mark.by_day(one_in=2, seed=4)
    @pytest.mark.parametrize(
        "layout",
        [
            PageLayout(b"another model", PAGE_SIZE, PAGE_BYTES),
            PageLayout(LAYOUT, 2 * PAGE_SIZE, PAGE_BYTES),
            PageLayout(LAYOUT, PAGE_SIZE, 2 * PAGE_BYTES),
            PageLayout(LAYOUT + b" " * 5000, PAGE_SIZE, PAGE_BYTES),
            PageLayout(b"\xff" * 5000, PAGE_SIZE, PAGE_BYTES),
        ],
    )
    def test_server_refuses_another_layout_with_a_message(self, served: Served, layout: PageLayout) -> None:
        with Asking(served.server.port, hello=frames.pack_hello(layout)) as asking:
            status, message = asking.response()
            assert status is Status.LAYOUT
            text = message.decode()
            assert text.startswith("the server's pages are 4 tokens in 640 bytes: a model, bfloat16; the reader expects ")
            assert layout.description.decode(errors="replace") in text
            assert asking.wait_for_end()
        assert served.refused == {"layout": 1}
        serves(served)

    def test_server_refuses_another_version_with_a_message(self, served: Served) -> None:
        hello = HELLO[:8] + struct.pack("<I", 2) + HELLO[12:]
        with Asking(served.server.port, hello=hello) as asking:
            assert asking.response() == (
                Status.LAYOUT,
                b"the server has version 1 of the page transport; the reader has version 2",
            )


class TestConnections:
    def test_server_refuses_connections_beyond_the_limit_when_a_thousand_clients_connect(self) -> None:
        """The timeout is long, so that the server ends no connection while a slow machine still makes further ones."""
        most, count = ServerLimits().max_connections, 1000
        with Served(replace(SMALL, hello_timeout_s=300.0)) as served:
            served.server.open(OURS)
            assert self._crowd(served, count) == ({"connections": count - most}, most)
            serves(served)

    def _crowd(self, served: Served, count: int) -> tuple[dict[str, int], int]:
        """Makes `count` connections and closes them again. Returns the refusals, and the number of connections that were open."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < 4 * count:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * count, hard), hard))
        made: list[socket.socket] = []
        try:
            for _ in range(count):
                made.append(socket.create_connection(("127.0.0.1", served.server.port)))
            until(lambda: sum(served.refused.values()) + served.server.counts().num_connections == count)
            found = served.refused, served.server.counts().num_connections
        finally:
            for one in made:
                one.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: served.server.counts().num_connections == 0)
        return found

    def test_error_while_reading_pages_ends_only_the_affected_connection(
        self, served: Served, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail() -> None:
            raise RuntimeError("the device is lost")

        served.pool.before = fail
        with Asking(served.server.port) as asking:
            asking.socket.sendall(frames.pack_request(READ))
            assert asking.wait_for_end()
        assert "the device is lost" in caplog.text
        served.pool.before = lambda: None
        serves(served)
        served.server.close_all_reservations()

    def test_server_ends_the_connection_when_the_client_reads_no_response(self) -> None:
        page_bytes = 4 << 20  # five pages are more than the socket buffers hold
        limits = ServerLimits(send_timeout_s=0.3)
        hello = frames.pack_hello(PageLayout(LAYOUT, PAGE_SIZE, page_bytes))
        with Served(limits, page_bytes=page_bytes) as served:
            served.server.open(OURS)
            with Asking(served.server.port, hello=hello) as asking:
                asking.socket.sendall(frames.pack_request(read_request(OURS, 0, 5)))
                until(lambda: served.pool.reads)
                until(lambda: served.server.counts().num_connections == 0)
                assert served.server.counts().served_bytes == 0
                until(lambda: served.left == [OURS.reservation])
                served.server.close_all_reservations()


class TestClosing:
    def test_server_discards_a_copy_when_the_reservation_is_closed(self, served: Served) -> None:
        copying, closed = threading.Event(), threading.Event()
        served.pool.before = copying.set
        served.pool.after = closed.wait
        with Asking(served.server.port) as asking:
            asked = Running(lambda: asking.ask(READ))
            assert copying.wait(60)
            served.server.close_reservations([OURS.reservation])
            assert not asked.is_done
            closed.set()
            assert asked.result() == (Status.NO_RESERVATION, b"")
            assert served.server.counts().served_bytes == 0 and served.refused == {"no_room": 1}
            assert asking.ask(read_request(OTHERS, 0, 1))[0] is Status.OK

    def test_server_discards_a_copy_when_the_reservation_was_opened_again(self, served: Served) -> None:
        def close_and_open() -> None:
            served.server.close_reservations([OURS.reservation])
            served.server.open(OURS)

        served.pool.after = close_and_open
        with Asking(served.server.port) as asking:
            assert asking.ask(READ) == (Status.NO_RESERVATION, b"")

    def test_server_refuses_reads_of_a_closed_reservation(self, served: Served) -> None:
        with Asking(served.server.port) as asking:
            assert asking.ask(READ)[0] is Status.OK
            served.server.close_reservations([OURS.reservation, OURS.reservation, KvReservation(77, EPOCH, secret_of(77))])
            assert asking.ask(READ) == (Status.NO_RESERVATION, b"")
            assert len(served.pool.reads) == 1
            assert asking.ask(read_request(OTHERS, 0, 1))[0] is Status.OK

    def test_closing_all_reservations_waits_for_running_copies(self, served: Served) -> None:
        go_on = threading.Event()
        ended: list[int] = []

        def copy_slowly() -> None:
            go_on.wait()
            ended.append(1)

        def close_and_count() -> int:
            served.server.close_all_reservations()
            return len(ended)

        served.pool.before = copy_slowly
        with Asking(served.server.port) as one, Asking(served.server.port) as other:
            asked = [Running(lambda: one.ask(READ)), Running(lambda: other.ask(read_request(OTHERS, 0, 1)))]
            until(lambda: len(served.pool.reads) == 2)
            closing = Running(close_and_count)
            until(lambda: served.server._reservations.find(OURS.reservation) is None)
            assert not closing.is_done
            go_on.set()
            assert closing.result() == 2
            assert [each.result() for each in asked] == [(Status.NO_RESERVATION, b"")] * 2
            assert one.ask(READ) == (Status.NO_RESERVATION, b"") and len(served.pool.reads) == 2


class TestLeaving:
    LEAVE = frames.pack_request(PageRequest(RequestKind.LEAVE, OURS.reservation))

    def test_released_reservation_is_reported_once_and_stays_open(self, served: Served) -> None:
        with Asking(served.server.port) as asking:
            asking.socket.sendall(self.LEAVE * 2)
            assert asking.ask(READ)[0] is Status.OK
            assert served.left == [OURS.reservation]
        until(lambda: served.server.counts().num_connections == 0)
        served.server.close()  # ends its threads
        assert served.left == [OURS.reservation]

    def test_growing_reservation_can_be_released_once_per_version(self, served: Served) -> None:
        """A release names the version that the reader knew."""
        whole = replace(reservation(7, (3, 8, 13)), opening=5)
        served.server.open(replace(whole, pages=whole.pages[:2], opening=4))
        leave = frames.pack_request(PageRequest(RequestKind.LEAVE, whole.reservation))
        with Asking(served.server.port) as asking:
            assert asking.ask(read_request(whole, 1, 2))[0] is Status.OUT_OF_RANGE
            assert asking.ask(read_request(whole, 0, 2)) == (Status.OK, served.pool.bytes_of([3, 8]))
            asking.socket.sendall(leave)
            until(lambda: served.left == [whole.reservation])
            served.server.open(whole)
            assert asking.ask(read_request(whole, 1, 2)) == (Status.OK, served.pool.bytes_of([8, 13]))
            asking.socket.sendall(leave * 2)
            until(
                lambda: served.releases == [ReservationReleased(whole.reservation, 4), ReservationReleased(whole.reservation, 5)]
            )
            assert asking.ask(read_request(whole, 0, 1))[0] is Status.OK

    def test_reader_of_an_older_version_releases_nothing_when_disconnecting(self, served: Served) -> None:
        """Another reader may use the new version of the reservation."""
        whole = replace(reservation(7, (3, 8, 13)), opening=5)
        served.server.open(replace(whole, pages=whole.pages[:2], opening=4))
        with Asking(served.server.port) as before:
            assert before.ask(read_request(whole, 0, 2))[0] is Status.OK
            served.server.open(whole)
        until(lambda: not served.server.counts().num_connections)
        with Asking(served.server.port) as after:
            assert after.ask(read_request(whole, 0, 3))[0] is Status.OK
            assert served.releases == []
        until(lambda: served.releases == [ReservationReleased(whole.reservation, 5)])

    def test_closed_connection_releases_only_reservations_that_no_other_connection_reads(self, served: Served) -> None:
        first, last = Asking(served.server.port), Asking(served.server.port)
        assert first.ask(READ)[0] is first.ask(read_request(OTHERS, 0, 1))[0] is Status.OK
        assert last.ask(READ)[0] is Status.OK
        until(lambda: served.server.counts().served_bytes == 5 * PAGE_BYTES)
        first.socket.close()
        until(lambda: served.left == [OTHERS.reservation])
        last.socket.close()
        until(lambda: served.left == [OTHERS.reservation, OURS.reservation])

    @pytest.mark.parametrize("by", ["the end of the connection", "a LEAVE request"])
    def test_closed_reservation_is_not_reported_as_released(self, served: Served, by: str) -> None:
        with Asking(served.server.port) as asking:
            assert asking.ask(READ)[0] is Status.OK
            served.server.close_reservations([OURS.reservation])
            if by == "a LEAVE request":
                asking.socket.sendall(self.LEAVE)
        until(lambda: served.server.counts().num_connections == 0)
        served.server.close()
        assert served.left == [] and served.refused == {}

    @pytest.mark.parametrize(
        "case", ["a zero secret", "the secret of another reservation", "another epoch", "a reservation that was never open"]
    )
    def test_server_ignores_a_release_with_wrong_credentials(self, served: Served, case: str) -> None:
        with Asking(served.server.port) as asking:
            asking.socket.sendall(frames.pack_request(replace(REFUSED[case][0], kind=RequestKind.LEAVE)))
            assert asking.ask(READ)[0] is Status.OK
            assert served.left == []

    def test_server_reports_all_releases_when_the_callback_for_one_release_fails(self, served: Served) -> None:
        def fail_first(left: ReservationReleased) -> None:
            served.releases.append(left)
            if len(served.releases) == 1:
                raise RuntimeError("the first release fails")

        served.server._on_left = fail_first
        with Asking(served.server.port) as asking:
            assert asking.ask(READ)[0] is asking.ask(read_request(OTHERS, 0, 1))[0] is Status.OK
        until(lambda: len(served.left) == 2)
        serves(served)

    def test_closed_server_reports_no_release(self, served: Served) -> None:
        with Asking(served.server.port) as asking:
            assert asking.ask(READ)[0] is Status.OK
            served.server.close()
            assert asking.wait_for_end()
        assert served.left == [] and served.server.counts().num_connections == 0
        served.server.close()
