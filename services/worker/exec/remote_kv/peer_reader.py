"""Reads pages of remote workers' KV reservations: through shared memory on the same machine, through NIXL, or over TCP.

NIXL is used if both workers have it. The reader has one connection per address, and connects at the first read. It starts no
threads; at most one thread at a time may read from an address. It logs when a remote worker cannot be read, and when it can be
read again, but not each failed read.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, KvSource
from rootstock_llm.services.worker.core.contracts.transfers import Pull
from rootstock_llm.services.worker.exec.contracts.peer_pages import PeerRate
from rootstock_llm.services.worker.exec.remote_kv import frames
from rootstock_llm.services.worker.exec.remote_kv.connection import Connection, connect, connect_unix, is_local, parse_address
from rootstock_llm.services.worker.exec.remote_kv.frames import Malformed, PageLayout, PageRequest, RequestKind, Response, Status
from rootstock_llm.services.worker.exec.remote_kv.nixl_process import Carrier
from rootstock_llm.services.worker.exec.remote_kv.nixl_staging import StagingReceiver, Unstaged
from rootstock_llm.services.worker.exec.remote_kv.shared_ring import RingReader, RingShape
from rootstock_llm.services.worker.exec.remote_kv.socket_folder import SocketFolder
from rootstock_llm.services.worker.exec.remote_kv.tls import PeerTls

logger = logging.getLogger(__name__)
LEAVE_TIMEOUT_S = 0.5  # seconds; limit for the release of a reservation
MEASURED_BYTES = 8 << 20  # smallest read whose rate is measured
SLOW_BYTES_S = 1e9  # bytes per second; a slower read may take longer than computing the KV, so the log has a warning
STAGE_TIMEOUT_S = 2.0  # seconds; limit for switching a connection to NIXL
UNSTAGED_S = 60.0  # seconds after a failure of NIXL for which new connections to the remote worker do not try NIXL
REST_S = 2.0  # seconds after a failure for which reads from the remote worker fail without an attempt


class _PeerRefuses(OSError):
    """Raised if the remote worker refuses the hello. The message is from the remote worker."""


class _NoResponse(ConnectionError):
    """Raised if the connection ends before the first byte of a response. The request may be sent again."""


class PageReceiver(Protocol):
    """Receives the pages of one connection on one thread."""

    @property
    def transport(self) -> str:
        """Name of the transport in metrics."""

    def receive_into(self, connection: Connection, out: memoryview, deadline: float) -> bool:
        """Fills `out` with whole pages.

        Returns:
            False if the reservation was closed during the read.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: the connection is broken.
            Malformed: the server has sent an invalid mark.
        """

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Peer:
    """A remote worker and the connection to it."""

    address: str
    connection: Connection | None = None  # connection that is open or being opened
    receiver: PageReceiver | None = None  # receives pages through a ring or a staging area; None if the connection carries them
    nixl_is_decided: bool = False  # whether a decision for or against NIXL was made for this connection
    is_busy: bool = False  # whether a thread uses the connection
    failure: str = ""  # reason why the last read failed; empty if the remote worker can be read
    rests_until: float = 0.0  # time.monotonic() until which reads fail without an attempt (REST_S)
    unstaged_until: float = 0.0  # time.monotonic() until which new connections do not try NIXL (UNSTAGED_S)
    rate: PeerRate | None = None  # last measured rate, None before the first measurement


class TcpPeerReader:
    """Implements PeerReader."""

    def __init__(
        self,
        layout: bytes,
        page_size: int,
        page_bytes: int,
        connect_timeout_s: float = 2.0,
        read_timeout_s: float = 10.0,
        max_peers: int = 256,
        tls: PeerTls | None = None,
        folder: SocketFolder | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        """Starts without connections.

        Args:
            layout: KV layout, which must equal that of the remote workers.
            page_size: tokens of a page.
            page_bytes: bytes of a page.
            connect_timeout_s: limit in seconds for opening a connection.
            read_timeout_s: limit in seconds for a whole read, with the opening of a connection, but without the lookup of a host
                name.
            max_peers: largest number of connections. If it is reached, the connection that has been idle for longest is closed.
            tls: certificates, None for no TLS.
            folder: folder with the Unix sockets of workers on this machine, which are read through shared memory. None:
                these workers are read over TCP.
            carrier: process that reads through NIXL. It is closed with this reader. None if NIXL is not used.
        """
        self._layout = PageLayout(layout, page_size, page_bytes)
        self._connect_timeout_s, self._read_timeout_s, self._max_peers = connect_timeout_s, read_timeout_s, max_peers
        self._tls, self._folder, self._carrier = tls, folder, carrier
        self._lock = threading.Lock()  # guards the fields below, and _Peer.connection and is_busy
        self._peers: dict[str, _Peer] = {}  # by address, the last used one at the end
        self._is_closed = False
        self._read_bytes: Counter[str] = Counter()

    def rates(self) -> list[PeerRate]:
        with self._lock:
            return [peer.rate for peer in self._peers.values() if peer.rate is not None]

    def read_bytes(self) -> dict[str, int]:
        with self._lock:
            return dict(self._read_bytes)

    def read(self, pull: Pull, count: int, out: memoryview, group: int = 0) -> int:
        assert count > 0 and out.nbytes == count * self._layout.page_bytes, "`out` has the size of all pages"
        deadline = time.monotonic() + self._read_timeout_s
        request = PageRequest(RequestKind.READ, pull.source.reservation, pull.first, count, pull.proof, group)
        is_read, transport = False, ""
        with self._exclusive(pull.source.address) as peer:
            if peer is not None and time.monotonic() >= peer.rests_until:
                was_connected, begun = self._open_connection(peer) is not None, time.monotonic()
                status, message = self._request_pages(peer, request, out.cast("B"), deadline)
                is_read, transport = self._log_status(peer, status, message), self._transport(peer)
                if is_read and was_connected:
                    self._record_rate(peer, out.nbytes, time.monotonic() - begun)
        if not is_read:
            return 0
        with self._lock:
            self._read_bytes[transport] += out.nbytes
        return count

    def leave(self, source: KvSource) -> None:
        """Releases the reservation.

        If this fails, the remote worker frees the reservation when the connection of the last read ends, or after the hold time.
        """
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        with self._exclusive(source.address) as peer:
            if peer is not None and time.monotonic() >= peer.rests_until:
                frame = frames.pack_request(PageRequest(RequestKind.LEAVE, source.reservation))
                connection = self._open_connection(peer) or self._connect(peer, deadline)
                connection.send(frame, deadline)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            peers = list(self._peers.values())
            self._peers.clear()
            idle = [peer for peer in peers if not peer.is_busy]
        for peer in peers:
            connection = peer.connection  # read once, because the thread that uses it may set it to None
            if connection is not None:
                connection.shut_down()
        if self._carrier is not None:
            self._carrier.close()  # before _disconnect(), which would wait for a carrier process that hangs
        for peer in idle:
            _disconnect(peer)

    @contextmanager
    def _exclusive(self, address: str) -> Iterator[_Peer | None]:
        """Lets only the calling thread use the connection to an address during the block. Yields None if the reader is closed.

        An OSError or ValueError in the block is logged, closes the connection, and is not raised.
        """
        peer = self._acquire(address)
        if peer is None:
            yield None
            return
        try:
            yield peer
        except (OSError, ValueError) as error:  # ValueError: a malformed address or frame
            _disconnect(peer)
            peer.rests_until = time.monotonic() + REST_S
            self._log_failure(peer, str(error))
        finally:
            self._release(peer)

    def _acquire(self, address: str) -> _Peer | None:
        with self._lock:
            if self._is_closed:
                return None
            peer = self._peers.pop(address, None) or _Peer(address)
            assert not peer.is_busy, "only one thread at a time reads from an address"
            peer.is_busy = True
            longest_idle = next((each for each in self._peers.values() if not each.is_busy), None)
            evicted = longest_idle if len(self._peers) >= self._max_peers else None
            if evicted is not None:
                del self._peers[evicted.address]
            self._peers[address] = peer
        if evicted is not None:
            _disconnect(evicted)  # it is not in _peers any more, so no other thread uses it
        return peer

    def _release(self, peer: _Peer) -> None:
        with self._lock:
            peer.is_busy = False
            is_closed = self._is_closed
        if is_closed:
            _disconnect(peer)

    def _request_pages(self, peer: _Peer, request: PageRequest, out: memoryview, deadline: float) -> tuple[Status, str]:
        """Requests pages. If NIXL fails, requests them again over TCP.

        Returns:
            Status and error message of the response. With OK, `out` is filled.

        Raises:
            OSError: the request has failed.
            ValueError: the address or a frame is malformed.
        """
        try:
            return self._request_once(peer, request, out, deadline)
        except Unstaged as error:
            staged = replace(peer)
            peer.connection = peer.receiver = None
            peer.unstaged_until = time.monotonic() + UNSTAGED_S
            if not self._is_closed:
                logger.warning(
                    "could not read a remote worker through NIXL; it is read over TCP",
                    extra=fields(address=peer.address, error=str(error)),
                )
        try:
            return self._request_once(peer, request, out, deadline)
        finally:
            _disconnect(
                staged
            )  # after the new read, because the server releases a reservation when the connection of its last read ends

    def _request_once(self, peer: _Peer, request: PageRequest, out: memoryview, deadline: float) -> tuple[Status, str]:
        """Requests pages over the open connection, or over a new one.

        Raises:
            Unstaged: NIXL has failed. The caller may retry over a new connection without NIXL.
            OSError: the request has failed.
            ValueError: the address or a frame is malformed.
        """
        connection = self._open_connection(peer)
        if connection is not None:
            try:
                return self._request_over(peer, connection, request, out, deadline)
            except _NoResponse:  # the remote worker has closed the connection, for example because it has restarted
                _disconnect(peer)
        return self._request_over(peer, self._connect(peer, deadline), request, out, deadline)

    def _request_over(
        self, peer: _Peer, connection: Connection, request: PageRequest, out: memoryview, deadline: float
    ) -> tuple[Status, str]:
        """Requests pages over a connection.

        Returns:
            Status and error message of the response. With OK, `out` is filled.

        Raises:
            OSError: the connection is broken.
            ValueError: a frame is malformed.
        """
        if not self._negotiate_nixl(peer, connection, request.reservation, deadline):
            return Status.NO_RESERVATION, ""
        _send_request(connection, request, deadline)
        return _receive_response(connection, out, deadline, peer.receiver)

    def _negotiate_nixl(self, peer: _Peer, connection: Connection, reservation: KvReservation, deadline: float) -> bool:
        """Switches the connection to NIXL if both sides have it. Does nothing if this is already negotiated.

        Returns:
            False if the server does not have the reservation.

        Raises:
            _NoResponse: the server has closed the connection.
            Unstaged: NIXL has failed.
        """
        if self._carrier is None or peer.receiver is not None or peer.nixl_is_decided:
            return True
        if time.monotonic() < peer.unstaged_until:
            peer.nixl_is_decided = True
            return True
        deadline = min(deadline, time.monotonic() + STAGE_TIMEOUT_S)
        try:
            _send_request(connection, PageRequest(RequestKind.STAGE, reservation), deadline)
            status, payload = _receive_area(connection, deadline)
        except _NoResponse:
            raise
        except (OSError, Malformed) as error:
            raise Unstaged(str(error)) from error
        if status is Status.OK:
            peer.receiver = StagingReceiver(payload, self._layout.page_bytes, self._carrier, deadline)
        elif status not in (Status.NO_AREA, Status.NO_RESERVATION):
            raise Unstaged(_refusal(status, frames.parse_error(payload)))
        peer.nixl_is_decided = status is not Status.NO_RESERVATION
        return peer.nixl_is_decided

    def _open_connection(self, peer: _Peer) -> Connection | None:
        """Returns the open connection to a remote worker, or None. Closes a connection that is stale."""
        if peer.connection is not None and peer.connection.is_stale():
            _disconnect(peer)
        return peer.connection

    def _connect(self, peer: _Peer, deadline: float) -> Connection:
        """Opens a connection and exchanges the hello.

        Raises:
            OSError: no connection could be opened, or the remote worker refuses the hello.
            ValueError: the address or a frame is malformed.
        """
        deadline = min(deadline, time.monotonic() + self._connect_timeout_s)
        if self._folder is not None and is_local(peer.address):
            try:
                return self._connect_on_machine(peer, self._folder.path(parse_address(peer.address)[1]), deadline)
            except (FileNotFoundError, ConnectionRefusedError):  # the worker has no Unix socket
                _disconnect(peer)
            except _PeerRefuses:
                raise
            except (OSError, Malformed) as error:
                _disconnect(peer)
                logger.warning(
                    "could not read a worker on this machine through shared memory; it is read over TCP",
                    extra=fields(address=peer.address, error=str(error)),
                )
        context, name = (None, "") if self._tls is None else (self._tls.contexts().client, self._tls.name)
        connection = connect(peer.address, context, deadline, partial(self._register, peer), name)
        self._exchange_hello(connection, deadline)
        self._register(peer, connection)  # again: if close() came before TLS replaced the socket, it has shut down the old socket
        return connection

    def _connect_on_machine(self, peer: _Peer, path: Path, deadline: float) -> Connection:
        """Connects to the Unix socket of a worker on this machine, and maps its ring. Raises OSError or Malformed."""
        connection = connect_unix(path, deadline, partial(self._register, peer))
        self._exchange_hello(connection, deadline)
        fd, frame = connection.receive_with_fd(frames.RING_BYTES, deadline)
        if fd is None:
            raise Malformed("the server did not send the descriptor of a ring")
        try:
            if len(frame) < frames.RING_BYTES:
                raise Malformed("the connection ended within the description of the ring")
            peer.receiver = RingReader(fd, RingShape(*frames.parse_ring(frame)), self._layout.page_bytes)
        finally:
            os.close(fd)
        return connection

    def _exchange_hello(self, connection: Connection, deadline: float) -> None:
        """Sends a hello and receives the response.

        Raises:
            _PeerRefuses: the remote worker has refused the hello.
            OSError: the connection is broken.
            Malformed: the response is invalid.
        """
        connection.send(frames.pack_hello(self._layout), deadline)
        status, message = _receive_response(connection, memoryview(b""), deadline)
        if status is not Status.OK:
            raise _PeerRefuses(_refusal(status, message))

    def _register(self, peer: _Peer, connection: Connection) -> None:
        """Sets the connection of a remote worker, so that close() ends it. Raises OSError if the reader is already closed."""
        with self._lock:
            if self._is_closed:
                raise OSError("the reader of remote workers is closed")
            peer.connection = connection

    def _log_status(self, peer: _Peer, status: Status, message: str) -> bool:
        """Logs a new failure, or the first response without a failure after one. Returns whether pages were read.

        NO_RESERVATION is not a failure of the remote worker. After a refusal, the connection stays open, because its end makes
        the server release the other reservations that were read over it.
        """
        if status not in (Status.OK, Status.NO_RESERVATION):
            self._log_failure(peer, _refusal(status, message))
        elif peer.failure:
            peer.failure = ""
            logger.info("a remote worker can be read again", extra=fields(address=peer.address))
        return status is Status.OK

    def _log_failure(self, peer: _Peer, failure: str) -> None:
        """Logs a failure, unless it equals the last one of this remote worker."""
        if failure != peer.failure and not self._is_closed:
            peer.failure = failure
            logger.warning("a remote worker cannot be read", extra=fields(address=peer.address, error=failure))

    def _transport(self, peer: _Peer) -> str:
        if peer.receiver is not None:
            return peer.receiver.transport
        return "tcp" if self._tls is None else "tls"

    def _record_rate(self, peer: _Peer, size: int, seconds: float) -> None:
        """Records the rate of a large read. Logs the first rate per remote worker and transport.

        Args:
            peer: the remote worker.
            size: bytes that were read.
            seconds: duration of the read over an open connection.
        """
        if size < MEASURED_BYTES:
            return
        transport = self._transport(peer)
        measured = PeerRate(peer.address, transport, size / max(seconds, 1e-9))
        is_first = peer.rate is None or peer.rate.transport != transport
        with self._lock:
            peer.rate = measured
        if is_first:
            log = logger.warning if measured.bytes_s < SLOW_BYTES_S else logger.info
            rate = round(measured.bytes_s / 1e9, 2)
            log(f"pages are read over {transport}", extra=fields(address=peer.address, gb_per_s=rate))


def _disconnect(peer: _Peer) -> None:
    """Closes the connection. Called by the thread that uses the connection, or by any thread if no thread uses it."""
    if peer.connection is not None:
        peer.connection.close()
        if peer.receiver is not None:
            peer.receiver.close()
        peer.connection = peer.receiver = None
        peer.nixl_is_decided = False


def _send_request(connection: Connection, request: PageRequest, deadline: float) -> None:
    """Sends a request. Raises _NoResponse if the connection has ended, and OSError."""
    try:
        connection.send(frames.pack_request(request), deadline)
    except (ConnectionError, ssl.SSLEOFError) as error:
        raise _NoResponse(str(error)) from error


def _receive_area(connection: Connection, deadline: float) -> tuple[Status, bytes]:
    """Receives the response to STAGE: its status and payload. Raises OSError or Malformed."""
    response = _receive_head(connection, deadline)
    if response.payload_bytes > limits.MAX_STAGING_MESSAGE_BYTES:
        raise Malformed(
            f"the response to STAGE has {response.payload_bytes} bytes; the limit is {limits.MAX_STAGING_MESSAGE_BYTES} bytes"
        )
    payload = bytearray(response.payload_bytes)
    if connection.receive_into(payload, deadline) < len(payload):
        raise ConnectionError("the connection ended within a response")
    return response.status, bytes(payload)


def _receive_response(
    connection: Connection, out: memoryview, deadline: float, receiver: PageReceiver | None = None
) -> tuple[Status, str]:
    """Receives a response, with its pages into `out`.

    Returns:
        Status, and the error message if the status is not OK. With OK, `out` is filled.

    Raises:
        Malformed: the response does not match the request.
        OSError: the connection is broken.
    """
    response = _receive_head(connection, deadline)
    if response.status is Status.OK:
        if response.payload_bytes != out.nbytes:
            raise Malformed(f"the response has {response.payload_bytes} bytes; {out.nbytes} were requested")
        if receiver is not None and out.nbytes:
            return (Status.OK if receiver.receive_into(connection, out, deadline) else Status.NO_RESERVATION), ""
        payload = out
    else:
        if response.payload_bytes > frames.MAX_ERROR_BYTES:
            raise Malformed(
                f"the error message of a response has {response.payload_bytes} bytes; the limit is {frames.MAX_ERROR_BYTES} bytes"
            )
        payload = memoryview(bytearray(response.payload_bytes))
    if connection.receive_into(payload, deadline) < payload.nbytes:
        raise ConnectionError("the connection ended within a response")
    return response.status, "" if response.status is Status.OK else frames.parse_error(bytes(payload))


def _receive_head(connection: Connection, deadline: float) -> Response:
    """Receives the first frame of a response. Raises _NoResponse, OSError or Malformed."""
    head = bytearray(frames.RESPONSE_BYTES)
    received = connection.receive_into(head, deadline)
    if not received:
        raise _NoResponse("the connection ended before the response")
    if received < len(head):
        raise Malformed("the connection ended within the first frame of a response")
    return frames.parse_response(head)


def _refusal(status: Status, message: str) -> str:
    return message or f"the remote worker refuses the request: {status.label}"
