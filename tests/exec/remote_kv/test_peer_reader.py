"""The reader of remote workers' pages: with healthy and faulty servers, after reconnects, and with TLS."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from rootstock_llm.services.shared.tls import certificate_files
from rootstock_llm.services.worker.core.contracts.reservations import KvSource
from rootstock_llm.services.worker.core.contracts.transfers import Pull
from rootstock_llm.services.worker.exec.remote_kv import peer_reader
from rootstock_llm.services.worker.exec.remote_kv.connection import parse_address
from rootstock_llm.services.worker.exec.remote_kv.kv_server import ServerLimits
from rootstock_llm.services.worker.exec.remote_kv.tls import PeerTls
from tests.exec.remote_kv import sick_peers
from tests.exec.remote_kv.certificates import Authority
from tests.exec.remote_kv.served_reservations import PAGE_BYTES, Running, Served, proof_of, pull, reader, reservation, until
from tests.exec.remote_kv.sick_peers import Behaviour, SickPeer

PAGES = (5, 2, 9, 30, 0)
OURS = reservation(1, PAGES)
LINES = "rootstock_llm.services.worker.exec.remote_kv.peer_reader"


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


HOSTS = ["127.0.0.1", *(["::1", "::"] if has_ipv6() else [])]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [each for each in caplog.records if each.name == LINES and each.levelname == "WARNING"]
    return [each.__dict__["fields"]["error"] for each in found]


class TestReads:
    @pytest.mark.parametrize("host", HOSTS)
    def test_reader_uses_one_connection_for_several_reads(self, host: str) -> None:
        with Served(host=host) as served:
            opened, one = served.opened(), reader()
            for first, count in ((2, 3), (0, 1), (0, 5), (1, 1)):
                got = pull(one, served.source(opened), opened, first, count)
                assert got == served.pool.bytes_of(PAGES[first : first + count])
            assert sum(one.read_bytes().values()) == 10 * PAGE_BYTES
            assert served.server.counts().num_connections == 1
            one.close()
            until(lambda: served.left == [opened.reservation])

    def test_reader_keeps_the_connection_after_a_refusal(self, caplog: pytest.LogCaptureFixture) -> None:
        with Served() as served:
            opened, one = served.opened(), reader()
            source, unknown = served.source(opened), reservation(2, PAGES)
            assert pull(one, source, opened, 0, 1)
            assert pull(one, served.source(unknown), unknown, 0, 1) is None
            assert warnings(caplog) == []
            for _ in range(2):
                wrong = Pull(source, 0, proof_of(opened, 2))
                assert one.read(wrong, 1, memoryview(bytearray(PAGE_BYTES))) == 0
            assert warnings(caplog) == ["the remote worker refuses the request: other_prompt"]
            assert pull(one, source, opened, 0, 1)
            assert served.refused == {"no_room": 1, "other_prompt": 2}
            assert served.server.counts().num_connections == 1 and served.left == []
            assert sum(one.read_bytes().values()) == 2 * PAGE_BYTES
            one.close()

    def test_reader_warns_once_when_the_layout_differs(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(peer_reader, "REST_S", 0.0)
        with Served() as served:
            opened, one = served.opened(), reader(layout=b"another model")
            for _ in range(3):
                assert pull(one, served.source(opened), opened, 0, 1) is None
            assert warnings(caplog) == [
                "the server's pages are 4 tokens in 640 bytes: a model, bfloat16; "
                "the reader expects 4 tokens in 640 bytes: another model"
            ]
            assert served.refused == {"layout": 3} and served.pool.reads == []
            one.close()

    def test_release_of_a_reservation_uses_the_open_connection(self) -> None:
        with Served() as served:
            opened, one = served.opened(), reader()
            assert pull(one, served.source(opened), opened, 0, 1)
            one.leave(served.source(opened))
            until(lambda: served.left == [opened.reservation])
            assert served.server.counts().num_connections == 1
            one.close()

    def test_release_of_a_reservation_opens_a_connection_when_no_connection_is_open(self) -> None:
        with Served() as served:
            opened, one = served.opened(), reader()
            one.leave(served.source(opened))
            until(lambda: served.left == [opened.reservation])
            assert served.pool.reads == [] and served.refused == {}
            one.close()

    def test_reader_closes_the_least_recently_used_connection_beyond_max_peers(self) -> None:
        with Served() as first, Served() as second, Served() as third:
            one, opened = reader(max_peers=2), reservation(1, PAGES)
            for served in (first, second, first, third):
                if opened.reservation not in [each.version.reservation for each in served.server._reservations._offered.values()]:
                    served.server.open(opened)
                assert pull(one, served.source(opened), opened, 0, 1)
            until(lambda: second.server.counts().num_connections == 0)
            assert first.server.counts().num_connections == third.server.counts().num_connections == 1
            assert pull(one, second.source(opened), opened, 0, 1)
            one.close()


class TestReconnects:
    def test_reader_reconnects_after_a_restart_of_the_server(self) -> None:
        one = reader()
        port = 0
        for _ in range(3):
            with Served(port=port) as served:
                port = served.server.port
                opened = served.opened()
                assert pull(one, served.source(opened), opened, 1, 2) == served.pool.bytes_of(PAGES[1:3])
        one.close()

    def test_reader_reconnects_after_an_idle_timeout_of_the_server(self) -> None:
        with Served(ServerLimits(idle_timeout_s=0.5)) as served:
            opened, other, one = served.opened(), served.opened(number=2), reader()
            for _ in range(2):
                assert pull(one, served.source(opened), opened, 0, 1)
                until(lambda: served.server.counts().num_connections == 0)
            one.leave(served.source(other))
            until(lambda: served.left == [opened.reservation, other.reservation])
            one.close()

    ENDS: ClassVar = {
        "closed before the next request": {"reads_another": False},
        "closed after the next request": {"reads_another": True},
        "reset after the next request": {"reads_another": True, "resets": True},
    }

    @pytest.mark.parametrize("case", ENDS)
    def test_reader_reconnects_once_when_the_connection_has_ended(self, case: str) -> None:
        behaviour = sick_peers.responds_once(b"p" * PAGE_BYTES, **self.ENDS[case])
        with SickPeer(behaviour) as peer:
            one, source = reader(), KvSource(OURS.reservation, peer.address, 5)
            for _ in range(3):
                assert pull(one, source, OURS, 0, 1) == b"p" * PAGE_BYTES
            assert peer.num_connections == 3
            one.close()

    def test_reader_does_not_reconnect_when_a_new_connection_sends_no_response(self) -> None:
        with SickPeer(sick_peers.NO_RESPONSE) as peer:
            one = reader()
            assert pull(one, KvSource(OURS.reservation, peer.address, 5), OURS, 0, 2) is None
            assert peer.num_connections == 1
            one.close()


ENDED: dict[str, Behaviour] = {
    "reset within the response": sick_peers.resets_in_the_response,
    "HTTP server": sick_peers.HTTP_TO_HELLO,
    "refusal of a terabyte": sick_peers.LONG_REFUSAL,
    "hello response with a payload": sick_peers.HELLO_RESPONSE_WITH_PAYLOAD,
    "too few bytes": sick_peers.TOO_FEW_BYTES,
    "too many bytes": sick_peers.TOO_MANY_BYTES,
    "unknown status": sick_peers.UNKNOWN_STATUS,
    "half of a response header": sick_peers.HALF_A_HEADER,
    "no response": sick_peers.NO_RESPONSE,
}
SILENT: dict[str, Behaviour] = {
    "silent from the start": sick_peers.silent,
    "silent after the hello": sick_peers.silent_after_the_request,
    "silent within the response": sick_peers.silent_in_the_response,
    "slow response": sick_peers.slow_response,
    "slow hello response": sick_peers.slow_hello_response,
}


class TestFaultyServers:
    @pytest.mark.by_day(one_in=2, seed=1)
    @pytest.mark.parametrize("case", ENDED)
    def test_reader_warns_once_when_responses_are_invalid(self, case: str, caplog: pytest.LogCaptureFixture) -> None:
        with SickPeer(ENDED[case]) as peer:
            one = reader()
            for _ in range(2):
                assert pull(one, KvSource(OURS.reservation, peer.address, 5), OURS, 0, 2) is None
            assert len(warnings(caplog)) == 1 and sum(one.read_bytes().values()) == 0
            one.close()

    @pytest.mark.parametrize("case", SILENT)
    def test_reader_stops_at_the_deadline_when_the_server_is_silent(self, case: str) -> None:
        """The full response would take longer than any timeout."""
        with SickPeer(SILENT[case]) as peer:
            one = reader(read_timeout_s=0.3)
            asked = Running(lambda: pull(one, KvSource(OURS.reservation, peer.address, 5), OURS, 0, 2))
            assert asked.result() is None
            one.close()

    @pytest.mark.by_day(one_in=3, seed=11)
    @pytest.mark.parametrize("case", SILENT)
    def test_closing_the_reader_ends_waiting_reads(self, case: str, caplog: pytest.LogCaptureFixture) -> None:
        with SickPeer(SILENT[case]) as peer:
            one = reader(read_timeout_s=600.0, connect_timeout_s=600.0)
            asked = Running(lambda: pull(one, KvSource(OURS.reservation, peer.address, 5), OURS, 0, 2))
            assert peer.asked.wait(60)
            one.close()
            assert asked.result() is None
            assert warnings(caplog) == []

    def test_release_of_a_reservation_does_not_wait_for_connect_timeout_s_when_the_server_is_silent(self) -> None:
        with SickPeer(sick_peers.silent) as peer:
            one = reader(connect_timeout_s=600.0)
            begun = time.monotonic()
            Running(lambda: one.leave(KvSource(OURS.reservation, peer.address, 5))).result()
            assert time.monotonic() - begun < 60.0, "a release waits for much less than connect_timeout_s, 600 s"
            one.close()

    def test_reader_sends_nothing_to_a_server_during_the_pause_after_a_failure(self) -> None:
        """Without the pause, each of many reads would wait for the timeout."""
        with SickPeer(sick_peers.silent_after_the_request) as peer:
            one = reader(read_timeout_s=0.3)
            begun = time.monotonic()
            for _ in range(20):
                assert pull(one, KvSource(OURS.reservation, peer.address, 5), OURS, 0, 2) is None
                one.leave(KvSource(OURS.reservation, peer.address, 5))
            assert time.monotonic() - begun < peer_reader.REST_S
            assert peer.num_connections == 1, "releases open no connection during the pause, either"
            one.close()

    def test_reader_logs_when_a_server_disappears_and_when_the_server_returns(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(peer_reader, "REST_S", 0.0)
        caplog.set_level("INFO", LINES)
        with Served() as served:
            port = served.server.port
        one = reader()
        for _ in range(2):
            one.leave(KvSource(OURS.reservation, f"127.0.0.1:{port}", 5))
            assert pull(one, KvSource(OURS.reservation, f"127.0.0.1:{port}", 5), OURS, 0, 2) is None
        assert len(warnings(caplog)) == 1
        with Served(port=port) as served:
            opened = served.opened()
            assert pull(one, served.source(opened), opened, 0, 2)
        assert [each.message for each in caplog.records if each.name == LINES][1:] == ["a remote worker can be read again"]
        assert pull(one, KvSource(OURS.reservation, f"127.0.0.1:{port}", 5), OURS, 0, 2) is None
        assert len(warnings(caplog)) == 2
        one.close()

    @pytest.mark.by_day(one_in=2, seed=92)
    @pytest.mark.parametrize("address", ["", ":7000", "host", "host:", "host:0", "host:65536", "host:-1", "::1:7000", "[::1]"])
    def test_reader_warns_when_the_address_is_malformed(self, address: str, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(ValueError):
            parse_address(address)
        one = reader()
        assert pull(one, KvSource(OURS.reservation, address, 5), OURS, 0, 2) is None
        one.leave(KvSource(OURS.reservation, address, 5))
        assert warnings(caplog) == [f"{address!r} is not of the form host:port or [IPv6 address]:port"]
        one.close()

    def test_reader_reads_nothing_when_the_reservation_does_not_fit_into_a_frame(self) -> None:
        with Served() as served:
            one = reader()
            for too_large in (replace(OURS.reservation, number=1 << 64), replace(OURS.reservation, secret=b"short")):
                opened = replace(OURS, reservation=too_large)
                assert pull(one, served.source(opened), opened, 0, 1) is None
                one.leave(served.source(opened))
            assert served.refused == {}
            one.close()


def test_address_is_split_into_host_and_port() -> None:
    assert parse_address("prefill-0.worker:7000") == ("prefill-0.worker", 7000)
    assert parse_address("10.0.0.7:1") == ("10.0.0.7", 1)
    assert parse_address("[::1]:65535") == ("::1", 65535)


def test_closed_reader_reads_nothing() -> None:
    with Served() as served:
        opened, one = served.opened(), reader()
        assert pull(one, served.source(opened), opened, 0, 1)
        one.close()
        assert pull(one, served.source(opened), opened, 0, 1) is None
        until(lambda: served.left == [opened.reservation])


@pytest.mark.needs("openssl")
class TestTls:
    """TLS on both sides, with certificates of one authority."""

    def test_reader_gets_pages_over_tls(self, tmp_path: Path) -> None:
        page_bytes, ours = 1 << 18, Authority(tmp_path / "ours")
        with Served(page_bytes=page_bytes, tls=ours.tls("prefill")) as served:
            opened, one = served.opened(), reader(page_bytes=page_bytes, tls=ours.tls("decode"))
            for _ in range(2):
                assert pull(one, served.source(opened), opened, 0, 5, page_bytes) == served.pool.bytes_of(PAGES)
            assert served.server.counts().num_connections == 1
            one.leave(served.source(opened))
            until(lambda: served.left == [opened.reservation])
            one.close()

    def test_server_refuses_a_reader_without_tls(self, tmp_path: Path) -> None:
        with Served(tls=Authority(tmp_path / "ours").tls("prefill")) as served:
            opened, one = served.opened(), reader()
            assert pull(one, served.source(opened), opened, 0, 1) is None
            until(lambda: served.refused == {"tls": 1})
            one.close()

    def test_server_refuses_a_certificate_of_another_authority(self, tmp_path: Path) -> None:
        ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
        certificate, key, _ = other.files("stranger")
        with Served(tls=ours.tls("prefill")) as served:
            opened, one = served.opened(), reader(tls=PeerTls(certificate, key, ours.file))
            assert pull(one, served.source(opened), opened, 0, 1) is None
            until(lambda: served.refused == {"tls": 1})
            assert served.pool.reads == []
            one.close()

    def test_reader_refuses_a_server_of_another_authority(self, tmp_path: Path) -> None:
        ours, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
        with Served(tls=other.tls("stranger")) as served:
            opened, one = served.opened(), reader(tls=ours.tls("decode"))
            assert pull(one, served.source(opened), opened, 0, 1) is None
            assert served.pool.reads == []
            one.close()

    def test_workers_accept_only_certificates_with_the_configured_name(self, tmp_path: Path) -> None:
        ours = Authority(tmp_path / "ours")
        with Served(tls=ours.tls("rootstock-worker", "rootstock-worker")) as served:
            opened, right = served.opened(), reader(tls=PeerTls(*ours.files("rootstock-worker"), "rootstock-worker"))
            assert pull(right, served.source(opened), opened, 0, 1)
            wrong = reader(tls=PeerTls(*ours.files("rootstock-gateway")))
            assert pull(wrong, served.source(opened), opened, 1, 1) is None
            until(lambda: served.refused == {"tls": 1})
            for each in (right, wrong):
                each.close()
        with Served(tls=ours.tls("rootstock-tokenizer")) as served:
            opened, right = served.opened(), reader(tls=PeerTls(*ours.files("rootstock-worker"), "rootstock-worker"))
            assert pull(right, served.source(opened), opened, 0, 1) is None
            assert served.pool.reads == []
            right.close()

    def test_reader_and_server_use_replaced_certificate_files_for_new_connections(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(certificate_files, "CHECK_S", 0.0)
        ours, next_one = Authority(tmp_path / "ours"), Authority(tmp_path / "next")
        mine, theirs = ours.files("decode"), ours.files("prefill")
        with Served(tls=PeerTls(*theirs)) as served:
            opened, one = served.opened(), reader(tls=PeerTls(*mine))
            assert pull(one, served.source(opened), opened, 0, 1)
            for files, name in ((mine, "decode"), (theirs, "prefill")):
                for old, new in zip(files, next_one.files(name), strict=True):
                    new.replace(old)
            assert pull(one, served.source(opened), opened, 1, 1), "the open connection continues with the old files"
            another = reader(tls=PeerTls(*mine))
            assert pull(another, served.source(opened), opened, 2, 1), "a new connection uses the new files on both sides"
            theirs[1].write_text("no key")
            third = reader(tls=PeerTls(*mine))
            assert pull(third, served.source(opened), opened, 3, 1), "unusable files are not loaded"
            assert [each for each in caplog.records if each.levelname == "ERROR" and "cannot be used" in each.message]
            for each in (one, another, third):
                each.close()
