"""A server with a pool of small, distinct pages and its KV reservations, and a client that sends frames by hand."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import numpy as np

from rootstock_llm.services.worker.core.contracts.reservations import (
    KvReservation,
    KvSource,
    OpenReservation,
    ReservationReleased,
    proof,
)
from rootstock_llm.services.worker.core.contracts.transfers import I32, Pull
from rootstock_llm.services.worker.exec.remote_kv import frames
from rootstock_llm.services.worker.exec.remote_kv.frames import PageLayout, PageRequest, RequestKind, Status
from rootstock_llm.services.worker.exec.remote_kv.kv_server import ServerLimits, TcpKvServer
from rootstock_llm.services.worker.exec.remote_kv.nixl_process import Carrier
from rootstock_llm.services.worker.exec.remote_kv.peer_reader import TcpPeerReader
from rootstock_llm.services.worker.exec.remote_kv.socket_folder import SocketFolder
from rootstock_llm.services.worker.exec.remote_kv.tls import PeerTls

LAYOUT, PAGE_SIZE, PAGE_BYTES = b"a model, bfloat16", 4, 640
POOL_PAGES = 32
EPOCH = 3
TREE = "a tree"
PATIENCE_S = 60.0  # longest wait of a test for an event that comes soon


def until(is_so: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
    """Waits until the condition holds. Fails after `seconds`."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.005)


class Pool:
    """An implementation of ReadPages that calls `before` and `after` around each copy. `reads` records the pages of each call."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self.pages = np.zeros((POOL_PAGES, page_bytes), np.uint8)
        differs = self.pages[:, : 1 << 18]
        differs[:] = np.frombuffer(np.random.default_rng(7).bytes(differs.size), np.uint8).reshape(differs.shape)
        self.reads: list[list[int]] = []
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None

    def __call__(self, pages: I32, out: memoryview, group: int = 0) -> None:
        self.reads.append(pages.tolist())
        self.before()
        np.take(self.pages, pages, 0, np.frombuffer(out, np.uint8).reshape(len(pages), -1), mode="clip")
        self.after()

    def bytes_of(self, pages: Sequence[int]) -> bytes:
        return self.pages[list(pages)].tobytes()


def secret_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()[:16]


def reservation(number: int, pages: Sequence[int], tree: str = TREE) -> OpenReservation:
    """Returns a reservation whose prompt continues after its last page."""
    tokens = np.arange(number, number + len(pages) * PAGE_SIZE + 3, dtype=np.int32).tobytes()
    return OpenReservation(KvReservation(number, EPOCH, secret_of(number)), tree, tokens, np.array(pages, dtype=np.int32))


def proof_of(opened: OpenReservation, end: int) -> bytes:
    """Returns the proof of the pages before `end`."""
    return proof(opened.reservation.secret, opened.tree, opened.tokens[: end * PAGE_SIZE * 4])


def read_request(opened: OpenReservation, first: int, count: int) -> PageRequest:
    return PageRequest(RequestKind.READ, opened.reservation, first, count, proof_of(opened, first + count))


class Served:
    """A pool and its server. `releases` has the releases that the server has reported, in order."""

    def __init__(
        self,
        limits: ServerLimits | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        page_bytes: int = PAGE_BYTES,
        tls: PeerTls | None = None,
        folder: SocketFolder | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        self.pool = Pool(page_bytes)
        self.releases: list[ReservationReleased] = []
        on_left = self.releases.append
        self.server = TcpKvServer(host, port, LAYOUT, PAGE_SIZE, page_bytes, self.pool, on_left, limits, tls, folder, carrier)
        self.address = f"[{host}]:{self.server.port}" if ":" in host else f"{host}:{self.server.port}"

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.server.close()

    @property
    def left(self) -> list[KvReservation]:
        return [each.reservation for each in self.releases]

    @property
    def refused(self) -> dict[str, int]:
        return self.server.counts().refused

    def opened(self, number: int = 1, pages: Sequence[int] = (5, 2, 9, 30, 0)) -> OpenReservation:
        made = reservation(number, pages)
        self.server.open(made)
        return made

    def source(self, opened: OpenReservation) -> KvSource:
        return KvSource(opened.reservation, self.address, len(opened.pages))


class Asking:
    """A client that sends given frames to a port."""

    def __init__(self, port: int, hello: bytes | None = None) -> None:
        """Connects and sends a hello.

        Args:
            port: port of the server.
            hello: bytes to send, None for a valid hello, empty for no hello.
        """
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        sent = frames.pack_hello(PageLayout(LAYOUT, PAGE_SIZE, PAGE_BYTES)) if hello is None else hello
        self.socket.sendall(sent)
        if hello is None:
            assert self.response() == (Status.OK, b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()

    def ask(self, request: PageRequest) -> tuple[Status, bytes]:
        self.socket.sendall(frames.pack_request(request))
        return self.response()

    def response(self) -> tuple[Status, bytes]:
        head = frames.parse_response(self._receive(frames.RESPONSE_BYTES))
        return head.status, self._receive(head.payload_bytes)

    def end_sending(self) -> None:
        with suppress(OSError):  # the server has ended the connection already
            self.socket.shutdown(socket.SHUT_WR)

    def wait_for_end(self) -> bool:
        """Waits until the server ends the connection. Returns True, so that a test can assert the call."""
        with suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass
        return True

    def _receive(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            part = self.socket.recv(size - len(got))
            assert part, "the connection ended before the whole response"
            got += part
        return got


def reader(layout: bytes = LAYOUT, page_bytes: int = PAGE_BYTES, **limits: Any) -> TcpPeerReader:
    limits = {"connect_timeout_s": PATIENCE_S, "read_timeout_s": PATIENCE_S} | limits
    return TcpPeerReader(layout, PAGE_SIZE, page_bytes, **limits)


def pull(
    one: TcpPeerReader, source: KvSource, opened: OpenReservation, first: int, count: int, page_bytes: int = PAGE_BYTES
) -> bytes | None:
    """Reads pages. Returns their bytes, or None if the read failed."""
    out = bytearray(count * page_bytes)
    got = one.read(Pull(source, first, proof_of(opened, first + count)), count, memoryview(out))
    assert got in (0, count)
    return bytes(out) if got else None


class Running:
    """Work on a thread of its own. result() raises the work's exception."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(PATIENCE_S)
        assert self.is_done, "the work has not ended"
        if self._error is not None:
            raise self._error
        return self._outcome

    def _run(self) -> None:
        try:
            self._outcome = self._work()
        except BaseException as error:
            self._error = error
