"""Reads pages of other workers' rooms: of those on this machine through shared memory, of others through NIXL where both sides
have it, and else over TCP. A PeerReader.

One connection for each address, made when it is needed and kept. No threads of its own: what is said to one address is said by
one thread at a time. A peer that cannot be read, or not by this worker, is a line of the log when that becomes so and when it is
over, and not for every read.
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

from services.shared import limits
from services.shared.observe.log_fields import fields
from services.worker.core.contracts.reservations import KvReservation, KvSource
from services.worker.core.contracts.transfers import Pull
from services.worker.exec.contracts.peer_pages import PeerRate
from services.worker.exec.peers import frames
from services.worker.exec.peers.connection import Connection, connect, connect_unix, is_local, parse_address
from services.worker.exec.peers.frames import Answer, Malformed, PageLayout, Request, RequestKind, Status
from services.worker.exec.peers.nixl_process import Carrier
from services.worker.exec.peers.nixl_staging import StagingReceiver, Unstaged
from services.worker.exec.peers.page_receiver import PageReceiver
from services.worker.exec.peers.shared_ring import RingReader, RingShape
from services.worker.exec.peers.socket_folder import SocketFolder
from services.worker.exec.peers.tls import PeerTls

logger = logging.getLogger(__name__)
LEAVE_TIMEOUT_S = 0.5
MEASURED_BYTES = 8 << 20
SLOW_BYTES_S = 1e9  # below which a network may cost more than it saves
STAGE_TIMEOUT_S = 2.0  # until it is known whether a peer is read through NIXL
UNSTAGED_S = 60.0  # in which a new connection to one that could not be is TCP's, for good
REST_S = 2.0  # after a failure, in which nothing is asked of a peer: what waits behind it need not wait as long as it has


class _PeerRefuses(OSError):
    """And says why."""


class _Unanswered(ConnectionError):
    """The connection has ended before a byte of an answer came."""


@dataclass(slots=True, eq=False)
class _Peer:
    """connection: that is kept, or being made. receiver: that pages come through beside it; None: through itself. has_asked:
    it is known whether they come through NIXL. complaint: what has last kept it from being read; empty: nothing has.
    rests_until: see REST_S. unstaged_until: see UNSTAGED_S. rate: measured last; None: not yet."""

    address: str
    connection: Connection | None = None
    receiver: PageReceiver | None = None
    has_asked: bool = False
    is_busy: bool = False
    complaint: str = ""
    rests_until: float = 0.0
    unstaged_until: float = 0.0
    rate: PeerRate | None = None


class TcpPeerReader:
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
        """layout, page_size, page_bytes: see TcpRoomServer. read_timeout_s: of a whole read, with what it takes to connect;
        looking up an address that is a name takes what the system gives it. max_peers: connections that are kept, beside those in
        use; who was not asked for longest goes. tls: None for none. folder: of the sockets of workers on this machine;
        None: they, too, are read over TCP. carrier: that pages come through where a peer has one; closed with this. None: none
        do."""
        self._layout = PageLayout(layout, page_size, page_bytes)
        self._connect_timeout_s, self._read_timeout_s, self._max_peers = connect_timeout_s, read_timeout_s, max_peers
        self._tls, self._folder, self._carrier = tls, folder, carrier
        self._lock = threading.Lock()  # of what follows, and of who is busy with which connection
        self._peers: dict[str, _Peer] = {}  # by address; who was asked last comes last
        self._is_closed = False
        self._read_bytes: Counter[str] = Counter()

    def rates(self) -> list[PeerRate]:
        with self._lock:
            return [peer.rate for peer in self._peers.values() if peer.rate is not None]

    def read_bytes(self) -> dict[str, int]:
        with self._lock:
            return dict(self._read_bytes)

    def read(self, pull: Pull, count: int, out: memoryview) -> int:
        assert count > 0 and out.nbytes == count * self._layout.page_bytes, "a page's room for every page"
        deadline = time.monotonic() + self._read_timeout_s
        request = Request(RequestKind.READ, pull.source.room, pull.first, count, pull.proof)
        is_read, transport = False, ""
        with self._talking_to(pull.source.address) as peer:
            if peer is not None and time.monotonic() >= peer.rests_until:
                was_connected, begun = self._kept(peer) is not None, time.monotonic()
                status, sentence = self._ask(peer, request, out.cast("B"), deadline)
                is_read, transport = self._has_answered(peer, status, sentence), self._transport(peer)
                if is_read and was_connected:
                    self._measured(peer, out.nbytes, time.monotonic() - begun)
        if not is_read:
            return 0
        with self._lock:
            self._read_bytes[transport] += out.nbytes
        return count

    def leave(self, source: KvSource) -> None:
        """Where it is not heard, the room goes with the connection over which it was read, or when its hold is over."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        with self._talking_to(source.address) as peer:
            if peer is not None and time.monotonic() >= peer.rests_until:
                frame = frames.pack_request(Request(RequestKind.LEAVE, source.room))
                connection = self._kept(peer) or self._connected(peer, deadline)
                connection.send(frame, deadline)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            peers = list(self._peers.values())
            self._peers.clear()
            idle = [peer for peer in peers if not peer.is_busy]
        for peer in peers:
            connection = peer.connection  # whoever is busy with it may hang up meanwhile
            if connection is not None:
                connection.shut_down()
        if self._carrier is not None:
            self._carrier.close()  # first: whoever gives memory back to one that hangs waits for it
        for peer in idle:
            _hang_up(peer)

    @contextmanager
    def _talking_to(self, address: str) -> Iterator[_Peer | None]:
        """The peer, for one thread; None once the reader is closed. What goes wrong in the block is said in the log and ends the
        connection, and the block."""
        peer = self._take(address)
        if peer is None:
            yield None
            return
        try:
            yield peer
        except (OSError, ValueError) as error:  # ValueError: an address that is none, a frame that is none
            _hang_up(peer)
            peer.rests_until = time.monotonic() + REST_S
            self._complain(peer, str(error))
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
            leaves = longest_idle if len(self._peers) >= self._max_peers else None
            if leaves is not None:
                del self._peers[leaves.address]
            self._peers[address] = peer
        if leaves is not None:
            _hang_up(leaves)  # nobody else finds it any more
        return peer

    def _give_back(self, peer: _Peer) -> None:
        with self._lock:
            peer.is_busy = False
            is_closed = self._is_closed
        if is_closed:
            _hang_up(peer)

    def _ask(self, peer: _Peer, request: Request, out: memoryview, deadline: float) -> tuple[Status, str]:
        """Status and sentence. Raises OSError, ValueError."""
        try:
            return self._ask_as_is(peer, request, out, deadline)
        except Unstaged as error:
            staged = replace(peer)
            peer.connection = peer.receiver = None
            peer.unstaged_until = time.monotonic() + UNSTAGED_S
            if not self._is_closed:
                logger.warning("a peer is not read through NIXL", extra=fields(address=peer.address, error=str(error)))
        try:
            return self._ask_as_is(peer, request, out, deadline)
        finally:
            _hang_up(staged)  # only then: with the connection over which it was read last, a room is left

    def _ask_as_is(self, peer: _Peer, request: Request, out: memoryview, deadline: float) -> tuple[Status, str]:
        """Over the connection that is kept, or a new one. Raises OSError, ValueError; Unstaged where it would come over TCP."""
        kept = self._kept(peer)
        if kept is not None:
            try:
                return self._read_over(peer, kept, request, out, deadline)
            except _Unanswered:  # the peer has hung up meanwhile, or is another one by now
                _hang_up(peer)
        return self._read_over(peer, self._connected(peer, deadline), request, out, deadline)

    def _read_over(
        self, peer: _Peer, connection: Connection, request: Request, out: memoryview, deadline: float
    ) -> tuple[Status, str]:
        """Status and sentence; OK: out has been filled. Raises OSError, ValueError."""
        if not self._stage(peer, connection, request.room, deadline):
            return Status.NO_ROOM, ""
        _send_request(connection, request, deadline)
        return _receive_answer(connection, out, deadline, peer.receiver)

    def _stage(self, peer: _Peer, connection: Connection, room: KvReservation, deadline: float) -> bool:
        """Has pages come through NIXL from here on, if they may, and it is not known that they do not. False: there is no such
        room. Raises _Unanswered, Unstaged."""
        if self._carrier is None or peer.receiver is not None or peer.has_asked:
            return True
        if time.monotonic() < peer.unstaged_until:
            peer.has_asked = True
            return True
        deadline = min(deadline, time.monotonic() + STAGE_TIMEOUT_S)
        try:
            _send_request(connection, Request(RequestKind.STAGE, room), deadline)
            status, told = _receive_area(connection, deadline)
        except _Unanswered:
            raise
        except (OSError, Malformed) as error:
            raise Unstaged(str(error)) from error
        if status is Status.OK:
            peer.receiver = StagingReceiver(told, self._layout.page_bytes, self._carrier, deadline)
        elif status not in (Status.NO_AREA, Status.NO_ROOM):
            raise Unstaged(_refusal(status, frames.parse_sentence(told)))
        peer.has_asked = status is not Status.NO_ROOM
        return peer.has_asked

    def _kept(self, peer: _Peer) -> Connection | None:
        if peer.connection is not None and peer.connection.is_stale():
            _hang_up(peer)
        return peer.connection

    def _connected(self, peer: _Peer, deadline: float) -> Connection:
        """A new connection, on which pages can be asked for. Raises OSError, ValueError."""
        deadline = min(deadline, time.monotonic() + self._connect_timeout_s)
        if self._folder is not None and is_local(peer.address):
            try:
                return self._through_memory(peer, self._folder.path(parse_address(peer.address)[1]), deadline)
            except (FileNotFoundError, ConnectionRefusedError):  # it has no such socket
                _hang_up(peer)
            except _PeerRefuses:
                raise
            except (OSError, Malformed) as error:
                _hang_up(peer)
                logger.warning("memory is not shared with a peer", extra=fields(address=peer.address, error=str(error)))
        context, name = (None, "") if self._tls is None else (self._tls.contexts().client, self._tls.name)
        connection = connect(peer.address, context, deadline, partial(self._keep, peer), name)
        self._greet(connection, deadline)
        self._keep(peer, connection)  # TLS has another socket than `close` may have seen
        return connection

    def _through_memory(self, peer: _Peer, path: Path, deadline: float) -> Connection:
        """Raises OSError, Malformed."""
        connection = connect_unix(path, deadline, partial(self._keep, peer))
        self._greet(connection, deadline)
        fd, frame = connection.receive_with(frames.RING_BYTES, deadline)
        if fd is None:
            raise Malformed("it shares no memory")
        try:
            if len(frame) < frames.RING_BYTES:
                raise Malformed("its ring has broken off")
            peer.receiver = RingReader(fd, RingShape(*frames.parse_ring(frame)), self._layout.page_bytes)
        finally:
            os.close(fd)
        return connection

    def _greet(self, connection: Connection, deadline: float) -> None:
        """Raises OSError, Malformed."""
        connection.send(frames.pack_hello(self._layout), deadline)
        status, sentence = _receive_answer(connection, memoryview(b""), deadline)
        if status is not Status.OK:
            raise _PeerRefuses(_refusal(status, sentence))

    def _keep(self, peer: _Peer, connection: Connection) -> None:
        """From here on `close` ends it. Raises OSError where that was called."""
        with self._lock:
            if self._is_closed:
                raise OSError("nothing is read any more")
            peer.connection = connection

    def _has_answered(self, peer: _Peer, status: Status, sentence: str) -> bool:
        """Whether pages have been read. A refusal leaves the connection: other rooms have been read over it."""
        if status not in (Status.OK, Status.NO_ROOM):
            self._complain(peer, _refusal(status, sentence))
        elif peer.complaint:
            peer.complaint = ""
            logger.info("a peer can be read again", extra=fields(address=peer.address))
        return status is Status.OK

    def _complain(self, peer: _Peer, complaint: str) -> None:
        if complaint != peer.complaint and not self._is_closed:
            peer.complaint = complaint
            logger.warning("a peer cannot be read", extra=fields(address=peer.address, error=complaint))

    def _transport(self, peer: _Peer) -> str:
        if peer.receiver is not None:
            return peer.receiver.transport
        return "tcp" if self._tls is None else "tls"

    def _measured(self, peer: _Peer, size: int, seconds: float) -> None:
        """Of a read that is large enough to tell, without what it takes to connect; in the log, the first of a peer and way."""
        if size < MEASURED_BYTES:
            return
        transport = self._transport(peer)
        measured = PeerRate(peer.address, transport, size / max(seconds, 1e-9))
        is_news = peer.rate is None or peer.rate.transport != transport
        with self._lock:
            peer.rate = measured
        if is_news:
            say = logger.warning if measured.bytes_s < SLOW_BYTES_S else logger.info
            rate = round(measured.bytes_s / 1e9, 2)
            say(f"pages are read over {transport}", extra=fields(address=peer.address, gb_per_s=rate))


def _hang_up(peer: _Peer) -> None:
    """By who is busy with it, or where nobody is."""
    if peer.connection is not None:
        peer.connection.close()
        if peer.receiver is not None:
            peer.receiver.close()
        peer.connection = peer.receiver = None
        peer.has_asked = False


def _send_request(connection: Connection, request: Request, deadline: float) -> None:
    """Raises OSError."""
    try:
        connection.send(frames.pack_request(request), deadline)
    except (ConnectionError, ssl.SSLEOFError) as error:
        raise _Unanswered(str(error)) from error


def _receive_area(connection: Connection, deadline: float) -> tuple[Status, bytes]:
    """Status, and what is told with it. Raises OSError, Malformed."""
    answer = _receive_head(connection, deadline)
    if answer.payload_bytes > limits.MAX_STAGING_MESSAGE_BYTES:
        raise Malformed(f"it tells of memory in {answer.payload_bytes} bytes; {limits.MAX_STAGING_MESSAGE_BYTES} are the most")
    told = bytearray(answer.payload_bytes)
    if connection.receive_into(told, deadline) < len(told):
        raise ConnectionError("it has closed the connection in the midst of an answer")
    return answer.status, bytes(told)


def _receive_answer(
    connection: Connection, out: memoryview, deadline: float, receiver: PageReceiver | None = None
) -> tuple[Status, str]:
    """Status, and the sentence where it is not OK; out: filled where it is. Raises OSError; Malformed for what is not the answer
    to what was asked."""
    answer = _receive_head(connection, deadline)
    if answer.status is Status.OK:
        if answer.payload_bytes != out.nbytes:
            raise Malformed(f"it has answered with {answer.payload_bytes} bytes to who asked for {out.nbytes}")
        if receiver is not None and out.nbytes:
            return (Status.OK if receiver.receive_into(connection, out, deadline) else Status.NO_ROOM), ""
        payload = out
    else:
        if answer.payload_bytes > frames.MOST_SENTENCE_BYTES:
            raise Malformed(f"it refuses in {answer.payload_bytes} bytes; {frames.MOST_SENTENCE_BYTES} are the most")
        payload = memoryview(bytearray(answer.payload_bytes))
    if connection.receive_into(payload, deadline) < payload.nbytes:
        raise ConnectionError("it has closed the connection in the midst of an answer")
    return answer.status, "" if answer.status is Status.OK else frames.parse_sentence(bytes(payload))


def _receive_head(connection: Connection, deadline: float) -> Answer:
    """Raises OSError, Malformed; _Unanswered."""
    head = bytearray(frames.ANSWER_BYTES)
    received = connection.receive_into(head, deadline)
    if not received:
        raise _Unanswered("it has closed the connection")
    if received < len(head):
        raise Malformed("its answer has broken off")
    return frames.parse_answer(head)


def _refusal(status: Status, sentence: str) -> str:
    return sentence or f"it refuses: {status.name.lower()}"
