"""Reads pages of remote workers' KV reservations: through shared memory on one machine, through NIXL, or over TCP.

NIXL is used if both workers have it. The reader keeps one connection per address and connects at the first read. It has no
threads of its own; at most one thread at a time may read from one address. It logs when a remote worker becomes unreadable and
when it is readable again, but not each failed read.
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
from rootstock_llm.services.worker.exec.remote_kv.frames import Answer, Malformed, PageLayout, PageRequest, RequestKind, Status
from rootstock_llm.services.worker.exec.remote_kv.nixl_process import Carrier
from rootstock_llm.services.worker.exec.remote_kv.nixl_staging import StagingReceiver, Unstaged
from rootstock_llm.services.worker.exec.remote_kv.shared_ring import RingReader, RingShape
from rootstock_llm.services.worker.exec.remote_kv.socket_folder import SocketFolder
from rootstock_llm.services.worker.exec.remote_kv.tls import PeerTls

logger = logging.getLogger(__name__)
LEAVE_TIMEOUT_S = 0.5  # limit for the release of a reservation
MEASURED_BYTES = 8 << 20  # smallest read whose rate is measured
SLOW_BYTES_S = 1e9  # below this rate, reading KV may take longer than computing it; the log warns
STAGE_TIMEOUT_S = 2.0  # limit for the test of a NIXL path
UNSTAGED_S = 60.0  # time after a failed test in which new connections stay on TCP
REST_S = 2.0  # time after a failure in which reads from the remote worker fail at once, instead of waiting for the timeout


class _PeerRefuses(OSError):
    """Raised if the remote worker refuses the hello. The message is the remote worker's."""


class _Unanswered(ConnectionError):
    """Raised if the connection ends before the first byte of an answer. The request may be sent again."""


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
    connection: Connection | None = None  # open, or being made
    receiver: PageReceiver | None = None  # receives pages through a ring or a staging area; None: pages come over the connection
    nixl_is_decided: bool = False  # whether the connection uses NIXL has been negotiated
    is_busy: bool = False  # a thread uses the connection
    failure: str = ""  # last reason why the worker could not be read; empty if it can be read
    rests_until: float = 0.0  # time.monotonic() until which reads fail at once (REST_S)
    unstaged_until: float = 0.0  # time.monotonic() until which new connections stay on TCP (UNSTAGED_S)
    rate: PeerRate | None = None  # last measured rate, None before the first measurement


class TcpPeerReader:
    """A PeerReader."""

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
            layout: as in TcpKvServer.
            page_size: as in TcpKvServer.
            page_bytes: as in TcpKvServer.
            connect_timeout_s: limit for making a connection.
            read_timeout_s: limit for a whole read, including the connection, except the lookup of a host name.
            max_peers: number of connections from which on the connection that has been idle for longest is closed.
            tls: certificates, None for no TLS.
            folder: folder of the sockets of workers on this machine; None: these workers are read over TCP, too.
            carrier: NIXL, closed with this reader; None: NIXL is not used.
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

    def read(self, pull: Pull, count: int, out: memoryview) -> int:
        assert count > 0 and out.nbytes == count * self._layout.page_bytes, "`out` has the size of all pages"
        deadline = time.monotonic() + self._read_timeout_s
        request = PageRequest(RequestKind.READ, pull.source.reservation, pull.first, count, pull.proof)
        is_read, transport = False, ""
        with self._exclusive(pull.source.address) as peer:
            if peer is not None and time.monotonic() >= peer.rests_until:
                was_connected, begun = self._open_connection(peer) is not None, time.monotonic()
                status, message = self._ask(peer, request, out.cast("B"), deadline)
                is_read, transport = self._has_answered(peer, status, message), self._transport(peer)
                if is_read and was_connected:
                    self._measured(peer, out.nbytes, time.monotonic() - begun)
        if not is_read:
            return 0
        with self._lock:
            self._read_bytes[transport] += out.nbytes
        return count

    def leave(self, source: KvSource) -> None:
        """Releases the reservation.

        If this fails, the reservation ends with the connection of its last read, or with its hold time.
        """
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        with self._exclusive(source.address) as peer:
            if peer is not None and time.monotonic() >= peer.rests_until:
                frame = frames.pack_request(PageRequest(RequestKind.LEAVE, source.reservation))
                connection = self._open_connection(peer) or self._connected(peer, deadline)
                connection.send(frame, deadline)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            peers = list(self._peers.values())
            self._peers.clear()
            idle = [peer for peer in peers if not peer.is_busy]
        for peer in peers:
            connection = peer.connection  # the thread that uses the connection may close it at the same time
            if connection is not None:
                connection.shut_down()
        if self._carrier is not None:
            self._carrier.close()  # before _disconnect(), which would wait for a carrier that hangs
        for peer in idle:
            _disconnect(peer)

    @contextmanager
    def _exclusive(self, address: str) -> Iterator[_Peer | None]:
        """Gives the calling thread exclusive use of the remote worker of an address. Yields None if the reader is closed.

        An OSError or ValueError in the block ends the block. It is logged and closes the connection.
        """
        peer = self._take(address)
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
            self._give_back(peer)

    def _take(self, address: str) -> _Peer | None:
        with self._lock:
            if self._is_closed:
                return None
            peer = self._peers.pop(address, None) or _Peer(address)
            assert not peer.is_busy, "one thread at a time for an address"
            peer.is_busy = True
            longest_idle = next((each for each in self._peers.values() if not each.is_busy), None)
            evicted = longest_idle if len(self._peers) >= self._max_peers else None
            if evicted is not None:
                del self._peers[evicted.address]
            self._peers[address] = peer
        if evicted is not None:
            _disconnect(evicted)  # no other thread can find it
        return peer

    def _give_back(self, peer: _Peer) -> None:
        with self._lock:
            peer.is_busy = False
            is_closed = self._is_closed
        if is_closed:
            _disconnect(peer)

    def _ask(self, peer: _Peer, request: PageRequest, out: memoryview, deadline: float) -> tuple[Status, str]:
        """Sends a request, and sends it again over TCP if NIXL fails.

        Returns:
            Status and error message.

        Raises:
            OSError: the request has failed.
            ValueError: the address or a frame is malformed.
        """
        try:
            return self._ask_as_is(peer, request, out, deadline)
        except Unstaged as error:
            staged = replace(peer)
            peer.connection = peer.receiver = None
            peer.unstaged_until = time.monotonic() + UNSTAGED_S
            if not self._is_closed:
                logger.warning(
                    "NIXL failed, a remote worker is read over TCP", extra=fields(address=peer.address, error=str(error))
                )
        try:
            return self._ask_as_is(peer, request, out, deadline)
        finally:
            _disconnect(staged)  # not earlier: the server releases a reservation when the connection of its last read ends

    def _ask_as_is(self, peer: _Peer, request: PageRequest, out: memoryview, deadline: float) -> tuple[Status, str]:
        """Sends a request over the open connection, or over a new one.

        Raises:
            Unstaged: NIXL has failed. The caller may retry over TCP with a new connection.
            OSError: the request has failed.
            ValueError: the address or a frame is malformed.
        """
        connection = self._open_connection(peer)
        if connection is not None:
            try:
                return self._read_over(peer, connection, request, out, deadline)
            except _Unanswered:  # the remote worker has closed the connection, or has been restarted
                _disconnect(peer)
        return self._read_over(peer, self._connected(peer, deadline), request, out, deadline)

    def _read_over(
        self, peer: _Peer, connection: Connection, request: PageRequest, out: memoryview, deadline: float
    ) -> tuple[Status, str]:
        """Sends a request over a connection.

        Returns:
            Status and error message. With OK, `out` is filled.

        Raises:
            OSError: the connection is broken.
            ValueError: a frame is malformed.
        """
        if not self._stage(peer, connection, request.reservation, deadline):
            return Status.NO_RESERVATION, ""
        _send_request(connection, request, deadline)
        return _receive_answer(connection, out, deadline, peer.receiver)

    def _stage(self, peer: _Peer, connection: Connection, reservation: KvReservation, deadline: float) -> bool:
        """Switches the connection to NIXL if possible. No effect if this was negotiated before.

        Returns:
            False if the server does not have the reservation.

        Raises:
            _Unanswered: the server has closed the connection.
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
        except _Unanswered:
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
        """Returns the usable connection to a remote worker, or None. Closes a stale connection."""
        if peer.connection is not None and peer.connection.is_stale():
            _disconnect(peer)
        return peer.connection

    def _connected(self, peer: _Peer, deadline: float) -> Connection:
        """Returns a new connection that is ready for requests.

        Raises:
            OSError: no connection could be made, or the remote worker refuses.
            ValueError: the address or a frame is malformed.
        """
        deadline = min(deadline, time.monotonic() + self._connect_timeout_s)
        if self._folder is not None and is_local(peer.address):
            try:
                return self._through_memory(peer, self._folder.path(parse_address(peer.address)[1]), deadline)
            except (FileNotFoundError, ConnectionRefusedError):  # the worker has no such socket
                _disconnect(peer)
            except _PeerRefuses:
                raise
            except (OSError, Malformed) as error:
                _disconnect(peer)
                logger.warning(
                    "shared memory failed, a worker on this machine is read over TCP",
                    extra=fields(address=peer.address, error=str(error)),
                )
        context, name = (None, "") if self._tls is None else (self._tls.contexts().client, self._tls.name)
        connection = connect(peer.address, context, deadline, partial(self._keep, peer), name)
        self._greet(connection, deadline)
        self._keep(peer, connection)  # TLS has replaced the socket that close() may have seen
        return connection

    def _through_memory(self, peer: _Peer, path: Path, deadline: float) -> Connection:
        """Connects to a worker on this machine and maps its ring. Raises OSError or Malformed."""
        connection = connect_unix(path, deadline, partial(self._keep, peer))
        self._greet(connection, deadline)
        fd, frame = connection.receive_with(frames.RING_BYTES, deadline)
        if fd is None:
            raise Malformed("the server sent no descriptor of a ring")
        try:
            if len(frame) < frames.RING_BYTES:
                raise Malformed("the connection ended within the description of the ring")
            peer.receiver = RingReader(fd, RingShape(*frames.parse_ring(frame)), self._layout.page_bytes)
        finally:
            os.close(fd)
        return connection

    def _greet(self, connection: Connection, deadline: float) -> None:
        """Sends a hello and receives the answer.

        Raises:
            _PeerRefuses: the remote worker has refused the hello.
            OSError: the connection is broken.
            Malformed: the answer is invalid.
        """
        connection.send(frames.pack_hello(self._layout), deadline)
        status, message = _receive_answer(connection, memoryview(b""), deadline)
        if status is not Status.OK:
            raise _PeerRefuses(_refusal(status, message))

    def _keep(self, peer: _Peer, connection: Connection) -> None:
        """Registers a connection, so that close() ends it. Raises OSError if the reader is closed already."""
        with self._lock:
            if self._is_closed:
                raise OSError("the reader is closed")
            peer.connection = connection

    def _has_answered(self, peer: _Peer, status: Status, message: str) -> bool:
        """Returns whether pages were read, and logs changes of the worker's state.

        A refusal does not close the connection, because other reservations have been read over it and would be released.
        """
        if status not in (Status.OK, Status.NO_RESERVATION):
            self._log_failure(peer, _refusal(status, message))
        elif peer.failure:
            peer.failure = ""
            logger.info("a remote worker can be read again", extra=fields(address=peer.address))
        return status is Status.OK

    def _log_failure(self, peer: _Peer, failure: str) -> None:
        """Logs a failure, unless it equals the last one."""
        if failure != peer.failure and not self._is_closed:
            peer.failure = failure
            logger.warning("a remote worker cannot be read", extra=fields(address=peer.address, error=failure))

    def _transport(self, peer: _Peer) -> str:
        if peer.receiver is not None:
            return peer.receiver.transport
        return "tcp" if self._tls is None else "tls"

    def _measured(self, peer: _Peer, size: int, seconds: float) -> None:
        """Records the rate of a large read over an open connection. Logs the first rate per remote worker and transport.

        Args:
            peer: the remote worker.
            size: bytes.
            seconds: duration, connecting excluded.
        """
        if size < MEASURED_BYTES:
            return
        transport = self._transport(peer)
        measured = PeerRate(peer.address, transport, size / max(seconds, 1e-9))
        is_news = peer.rate is None or peer.rate.transport != transport
        with self._lock:
            peer.rate = measured
        if is_news:
            log = logger.warning if measured.bytes_s < SLOW_BYTES_S else logger.info
            rate = round(measured.bytes_s / 1e9, 2)
            log(f"pages are read over {transport}", extra=fields(address=peer.address, gb_per_s=rate))


def _disconnect(peer: _Peer) -> None:
    """Closes the connection. Only the thread that uses the connection may call this; any thread may if no thread uses it."""
    if peer.connection is not None:
        peer.connection.close()
        if peer.receiver is not None:
            peer.receiver.close()
        peer.connection = peer.receiver = None
        peer.nixl_is_decided = False


def _send_request(connection: Connection, request: PageRequest, deadline: float) -> None:
    """Sends a request. Raises _Unanswered if the connection has ended, and OSError."""
    try:
        connection.send(frames.pack_request(request), deadline)
    except (ConnectionError, ssl.SSLEOFError) as error:
        raise _Unanswered(str(error)) from error


def _receive_area(connection: Connection, deadline: float) -> tuple[Status, bytes]:
    """Returns status and payload of the answer to STAGE. Raises OSError or Malformed."""
    answer = _receive_head(connection, deadline)
    if answer.payload_bytes > limits.MAX_STAGING_MESSAGE_BYTES:
        raise Malformed(
            f"the answer to STAGE has {answer.payload_bytes} bytes; the limit is {limits.MAX_STAGING_MESSAGE_BYTES} bytes"
        )
    payload = bytearray(answer.payload_bytes)
    if connection.receive_into(payload, deadline) < len(payload):
        raise ConnectionError("the connection ended within an answer")
    return answer.status, bytes(payload)


def _receive_answer(
    connection: Connection, out: memoryview, deadline: float, receiver: PageReceiver | None = None
) -> tuple[Status, str]:
    """Receives an answer, and its pages into `out`.

    Returns:
        Status, and the error message if the status is not OK. With OK, `out` is filled.

    Raises:
        Malformed: the answer does not belong to the request.
        OSError: the connection is broken.
    """
    answer = _receive_head(connection, deadline)
    if answer.status is Status.OK:
        if answer.payload_bytes != out.nbytes:
            raise Malformed(f"the response has {answer.payload_bytes} bytes; {out.nbytes} were requested")
        if receiver is not None and out.nbytes:
            return (Status.OK if receiver.receive_into(connection, out, deadline) else Status.NO_RESERVATION), ""
        payload = out
    else:
        if answer.payload_bytes > frames.MAX_ERROR_BYTES:
            raise Malformed(f"an error message has {answer.payload_bytes} bytes; the limit is {frames.MAX_ERROR_BYTES} bytes")
        payload = memoryview(bytearray(answer.payload_bytes))
    if connection.receive_into(payload, deadline) < payload.nbytes:
        raise ConnectionError("the connection ended within an answer")
    return answer.status, "" if answer.status is Status.OK else frames.parse_error(bytes(payload))


def _receive_head(connection: Connection, deadline: float) -> Answer:
    """Returns the head of an answer. Raises _Unanswered, OSError or Malformed."""
    head = bytearray(frames.ANSWER_BYTES)
    received = connection.receive_into(head, deadline)
    if not received:
        raise _Unanswered("the connection ended before the answer")
    if received < len(head):
        raise Malformed("the connection ended within the head of an answer")
    return frames.parse_answer(head)


def _refusal(status: Status, message: str) -> str:
    return message or f"the remote worker refuses: {status.label}"
