"""Reads of pages through shared memory: the received bytes, reservations that are closed, and readers that are refused."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rootstock_llm.services.worker.exec.remote_kv import connection, frames, shared_ring
from rootstock_llm.services.worker.exec.remote_kv.frames import PageLayout, PageRequest, RequestKind, Response, Status
from rootstock_llm.services.worker.exec.remote_kv.kv_server import ServerLimits
from rootstock_llm.services.worker.exec.remote_kv.shared_ring import RingShape, RingWriter
from rootstock_llm.services.worker.exec.remote_kv.socket_folder import SocketFolder
from tests.exec.remote_kv.served_reservations import (
    LAYOUT,
    PAGE_BYTES,
    PAGE_SIZE,
    POOL_PAGES,
    Running,
    Served,
    proof_of,
    pull,
    reader,
    until,
)
from tests.exec.remote_kv.test_peer_reader import warnings

PAGES = tuple(range(POOL_PAGES))[::-1]
AT_ONCE = 2  # pages of a piece; a read of all pages fills the ring several times
PIECES = POOL_PAGES // AT_ONCE
assert PIECES > 2 * shared_ring.SLOTS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SocketFolder:
    monkeypatch.setattr(shared_ring, "SLOT_BYTES", AT_ONCE * PAGE_BYTES + 1)
    return SocketFolder(tmp_path / "kv")


@pytest.fixture
def served(folder: SocketFolder) -> Iterator[Served]:
    with Served(folder=folder) as it:
        yield it


def test_reader_gets_pages_in_pieces_over_one_connection(served: Served, folder: SocketFolder) -> None:
    opened, one = served.opened(pages=PAGES), reader(folder=folder)
    for first, count in ((0, POOL_PAGES), (3, 1), (5, 3 * AT_ONCE), (1, POOL_PAGES - 2)):
        assert pull(one, served.source(opened), opened, first, count) == served.pool.bytes_of(PAGES[first : first + count])
    total = (2 * POOL_PAGES - 1 + 3 * AT_ONCE) * PAGE_BYTES
    assert one.read_bytes() == {"shm": total}
    until(lambda: served.server.counts().served_bytes == total)
    assert served.server.counts().num_connections == 1
    one.close()
    until(lambda: served.left == [opened.reservation])


@pytest.mark.by_day(one_in=2, seed=15)
@pytest.mark.parametrize("piece", [0, 1, shared_ring.SLOTS, PIECES - shared_ring.SLOTS, PIECES - 1])
def test_reader_discards_pages_of_a_reservation_that_is_closed_during_the_read(
    served: Served, folder: SocketFolder, piece: int
) -> None:
    opened, other, one = served.opened(1, PAGES), served.opened(2, PAGES), reader(folder=folder)
    served.pool.after = lambda: (
        served.server.close_reservations([opened.reservation]) if len(served.pool.reads) == piece + 1 else None
    )
    assert pull(one, served.source(opened), opened, 0, POOL_PAGES) is None
    assert len(served.pool.reads) == piece + 1
    assert pull(one, served.source(other), other, 0, POOL_PAGES) == served.pool.bytes_of(PAGES)
    assert served.refused == {"no_room": 1} and served.server.counts().num_connections == 1
    assert one.read_bytes() == {"shm": POOL_PAGES * PAGE_BYTES}
    one.close()


def test_server_ends_the_connection_when_the_reader_frees_no_slot(folder: SocketFolder) -> None:
    with Served(ServerLimits(send_timeout_s=0.3), folder=folder) as served, socket.socket(socket.AF_UNIX) as silent:
        opened = served.opened(pages=PAGES)
        silent.connect(str(folder.path(served.server.port)))
        silent.sendall(frames.pack_hello(PageLayout(LAYOUT, PAGE_SIZE, PAGE_BYTES)))
        silent.recv(frames.RESPONSE_BYTES, socket.MSG_WAITALL)
        asked = PageRequest(RequestKind.READ, opened.reservation, 0, POOL_PAGES, proof_of(opened, POOL_PAGES))
        silent.sendall(frames.pack_request(asked))
        until(lambda: len(served.pool.reads) == shared_ring.SLOTS)
        until(lambda: served.server.counts().num_connections == 0)
        assert len(served.pool.reads) == shared_ring.SLOTS, "a slot is not overwritten before the reader frees it"


def test_ring_memory_cannot_be_written_or_truncated_by_the_reader() -> None:
    writer = RingWriter(RingShape(2, 4096))
    received = os.dup(writer.fd)
    with pytest.raises(PermissionError):
        os.ftruncate(received, 0)
    with pytest.raises(PermissionError):
        os.write(received, b"x")
    with pytest.raises(PermissionError):
        mmap.mmap(received, 8192)
    with pytest.raises(PermissionError):
        fcntl.fcntl(received, fcntl.F_ADD_SEALS, 0)
    os.close(received)
    writer.close()


def test_server_refuses_shared_memory_for_a_reader_with_another_user_id(
    served: Served, folder: SocketFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's user id is replaced here. The reader then reads over TCP."""
    opened, one = served.opened(pages=PAGES), reader(folder=folder)
    monkeypatch.setattr(connection.os, "geteuid", lambda: os.getuid() + 1)
    assert pull(one, served.source(opened), opened, 0, 2) == served.pool.bytes_of(PAGES[:2])
    assert one.read_bytes() == {"tcp": 2 * PAGE_BYTES}
    until(lambda: served.refused == {"user": 1})
    one.close()


@pytest.mark.parametrize("existing", ["nothing", "a socket of a process that has died"])
def test_reader_uses_tcp_when_the_server_has_no_socket(
    folder: SocketFolder, existing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Served() as served:
        path = folder.path(served.server.port)
        if existing != "nothing":
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(path))
        opened, one = served.opened(pages=PAGES), reader(folder=folder)
        assert pull(one, served.source(opened), opened, 0, 2) == served.pool.bytes_of(PAGES[:2])
        assert one.read_bytes() == {"tcp": 2 * PAGE_BYTES} and not warnings(caplog)
        one.close()


def _unsealed() -> int:
    fd = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8 * PAGE_BYTES)
    return fd


def _sealed() -> int:
    return RingWriter(RingShape(4, 2 * PAGE_BYTES)).fd


RINGS: dict[str, tuple[Callable[[], int | None], bytes]] = {
    "unsealed memory": (_unsealed, frames.pack_ring(4, 2 * PAGE_BYTES)),
    "less memory than the frame states": (_sealed, frames.pack_ring(64, 2 * PAGE_BYTES)),
    "more memory than an address space has": (_sealed, frames.pack_ring(1 << 31, 1 << 40)),
    "slots of parts of pages": (_sealed, frames.pack_ring(4, PAGE_BYTES + 1)),
    "no slots": (_sealed, frames.pack_ring(0, PAGE_BYTES)),
    "half a frame": (_sealed, frames.pack_ring(4, PAGE_BYTES)[:7]),
    "no memory": (lambda: None, frames.pack_ring(4, 2 * PAGE_BYTES)),
}


@pytest.mark.parametrize("case", RINGS)
def test_reader_warns_and_uses_tcp_when_the_ring_is_invalid(
    folder: SocketFolder, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, frame = RINGS[case]
    with Served() as served, folder.listen(served.server.port, 4) as sick:

        def offer() -> None:
            one, _ = sick.accept()
            with one, suppress(OSError):
                one.recv(len(frames.pack_hello(PageLayout(LAYOUT, PAGE_SIZE, PAGE_BYTES))), socket.MSG_WAITALL)
                one.sendall(frames.pack_response(Response(Status.OK)))
                fd = make()
                socket.send_fds(one, [frame], [] if fd is None else [fd])

        offering = Running(offer)
        opened, one = served.opened(pages=PAGES), reader(folder=folder)
        assert pull(one, served.source(opened), opened, 0, 2) == served.pool.bytes_of(PAGES[:2])
        offering.result()
        assert one.read_bytes() == {"tcp": 2 * PAGE_BYTES}
        assert (
            len(warnings(caplog)) == 1
            and "could not read a worker on this machine through shared memory; it is read over TCP" in caplog.text
        )
        one.close()


def test_socket_is_private_and_ends_with_the_server(folder: SocketFolder) -> None:
    with Served(folder=folder) as served:
        path = folder.path(served.server.port)
        assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.exists()


def test_socket_folder_refuses_shared_folders_and_long_paths(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ValueError, match="other users may write"):
        SocketFolder(tmp_path / "open")
    with pytest.raises(ValueError, match="too long a path"):
        SocketFolder(tmp_path / ("x" * 90))
