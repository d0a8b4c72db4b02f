"""Lets other workers read what is in this one's rooms: over TCP, through NIXL, or on this machine through shared memory.
A RoomServer.

Threads: one for each way accepts connections, and each connection has one, which ends with it; what goes wrong there ends that
connection alone. A reader has one read under way, so copies of pages take up max_connections times max_read_bytes at the
most, and as much again in pinned memory where the pool is on a GPU.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from services.shared.observe.log_fields import fields
from services.worker.core.contracts.reservations import KvReservation, OpenReservation, ReservationReleased, proof
from services.worker.core.kv.tree_node import TOKEN_BYTES
from services.worker.exec.contracts.peer_pages import PeerCounts, ReadPages
from services.worker.exec.peers import frames
from services.worker.exec.peers.connection import Connection
from services.worker.exec.peers.frames import Answer, Malformed, PageLayout, Request, RequestKind, Status
from services.worker.exec.peers.nixl_process import Carrier, NoAreaLeft
from services.worker.exec.peers.nixl_staging import StagingSender
from services.worker.exec.peers.open_rooms import OpenRooms
from services.worker.exec.peers.page_senders import PageSender, RingSender, SocketSender
from services.worker.exec.peers.socket_folder import SocketFolder
from services.worker.exec.peers.tls import PeerTls

logger = logging.getLogger(__name__)
ACCEPT_PAUSE_S = 0.5  # where none can be accepted: descriptors have run out, say
CLOSE_TIMEOUT_S = 5.0
BACKLOG = 128


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """hello_timeout_s: until a connection says what it is for; of every frame from its first byte on. idle_timeout_s: between
    requests. send_timeout_s: of a whole answer. max_read_bytes: of one answer; a page may always be read."""

    max_connections: int = 64
    hello_timeout_s: float = 5.0
    idle_timeout_s: float = 60.0
    send_timeout_s: float = 10.0
    max_read_bytes: int = 64 << 20


class TcpRoomServer:
    """Listens from its making on."""

    def __init__(
        self,
        host: str,
        port: int,
        layout: bytes,
        page_size: int,
        page_bytes: int,
        read_pages: ReadPages,
        on_left: Callable[[ReservationReleased], None],
        limits: ServerLimits | None = None,
        tls: PeerTls | None = None,
        folder: SocketFolder | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        """port: 0 for a free one. layout: what makes two pools' pages exchangeable, beside their sizes. page_size: tokens.
        on_left: called on any thread, once for an opening of a room at the most, when its reader says that it wants no more
        of it, or the connection ends over which it was last read; the room stands until it is shut. tls: None for none.
        folder: of the socket for those who share this machine's memory; None: they read over TCP. carrier: that pages go through
        where a reader asks for it, closed with this; None: there is no NIXL. Raises OSError where there is nothing to listen
        on."""
        self._layout = PageLayout(layout, page_size, page_bytes)
        self._limits = limits or ServerLimits()
        self._on_left, self._tls, self._carrier = on_left, tls, carrier
        self._rooms = OpenRooms(read_pages)
        self._lock = threading.Lock()  # of what follows
        self._connections: dict[Connection, threading.Thread] = {}
        self._served_bytes = 0
        self._refused: Counter[str] = Counter()
        self._closed = threading.Event()
        self._folder = folder
        self._listeners = [_listen(host, port)]
        self._port = int(self._listeners[0].getsockname()[1])
        if folder is not None:
            try:
                self._listeners.append(folder.listen(self.port, BACKLOG))
            except OSError:
                self._listeners[0].close()
                raise
        self._acceptors = [
            threading.Thread(target=self._accept, args=(each,), name="kv-accept", daemon=True) for each in self._listeners
        ]
        for acceptor in self._acceptors:
            acceptor.start()

    @property
    def port(self) -> int:
        return self._port

    def open(self, room: OpenReservation) -> None:
        self._rooms.open(room)

    def shut(self, rooms: Sequence[KvReservation]) -> None:
        self._rooms.shut(rooms)

    def shut_all(self) -> None:
        self._rooms.shut_all()

    def counts(self) -> PeerCounts:
        """refused: by frames.Status in lower case; `connections`: beyond the most; `areas`: the same of NIXL's, who reads
        over TCP then; `tls`: without it; `user`: another one of this machine."""
        with self._lock:
            return PeerCounts(self._served_bytes, dict(self._refused), len(self._connections))

    def close(self) -> None:
        """Shuts all rooms, of which nobody is told that they are left, and ends all connections."""
        self._rooms.shut_all()
        with self._lock:
            self._closed.set()
            serving = dict(self._connections)
        for listener in self._listeners:
            with suppress(OSError):  # it has been closed before
                listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
            listener.close()
        for connection in serving:
            connection.shut_down()
        if self._folder is not None:
            with suppress(OSError):  # it goes with the next one that listens there
                self._folder.remove(self._port)
        until = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in (*self._acceptors, *serving.values()):
            thread.join(max(0.0, until - time.monotonic()))
        if self._carrier is not None:
            self._carrier.close()

    def _accept(self, listener: socket.socket) -> None:
        is_shared = listener.family == socket.AF_UNIX
        while not self._closed.is_set():
            try:
                accepted, _ = listener.accept()
                self._admit(Connection(accepted), is_shared)
            except (OSError, RuntimeError) as error:  # RuntimeError: there is no thread to be had
                if not self._closed.is_set():
                    logger.error("a reader of pages was not accepted", extra=fields(error=str(error)))
                    self._closed.wait(ACCEPT_PAUSE_S)

    def _admit(self, connection: Connection, is_shared: bool) -> None:
        """Raises RuntimeError where no thread can be started."""
        thread = threading.Thread(target=self._serve, args=(connection, is_shared), name="kv-reader", daemon=True)
        with self._lock:
            admitted = len(self._connections) < self._limits.max_connections and not self._closed.is_set()
            if admitted:
                try:
                    thread.start()
                except RuntimeError:
                    connection.close()
                    raise
                self._connections[connection] = thread
            else:
                self._refused["connections"] += 1
        if not admitted:
            connection.close()

    def _serve(self, connection: Connection, is_shared: bool) -> None:
        with ExitStack() as ends:  # the last one that is named first; none is left out for what another has run into
            ends.callback(self._is_gone, connection)
            try:
                if self._is_let_in(connection, is_shared) and self._is_greeted(connection):
                    sender = self._sender(connection, is_shared)
                    ends.callback(sender.close)
                    self._converse(connection, sender, ends)
            except Malformed as error:
                logger.info("a reader of pages is not understood", extra=fields(error=str(error)))
                self._refuse(connection, Status.MALFORMED, str(error))
            except OSError as error:
                logger.info("a reader of pages was lost", extra=fields(error=str(error)))
            except Exception:  # of read_pages, say: of that connection alone
                logger.exception("pages were not read")
            finally:
                connection.close()

    def _is_gone(self, connection: Connection) -> None:
        with self._lock:
            del self._connections[connection]
        self._tell_left(self._rooms.reader_gone(connection))

    def _converse(self, connection: Connection, sender: PageSender, senders: ExitStack) -> None:
        """Until nothing more is to be said. senders: closes a further one. Raises Malformed, OSError, and what read_pages
        raises."""
        while (frame := self._frame(connection, frames.REQUEST_BYTES, self._limits.idle_timeout_s)) is not None:
            request = frames.parse_request(frame)
            match request.kind:
                case RequestKind.READ:
                    self._answer(connection, sender, request)
                case RequestKind.LEAVE:
                    self._tell_left(self._rooms.leave(request.room))
                case RequestKind.STAGE:
                    if not isinstance(sender, SocketSender):
                        raise Malformed("pages go through memory on this connection already")
                    if (staging := self._staged(connection, request.room)) is not None:
                        senders.callback(staging.close)
                        sender = staging
                        self._send(connection, Status.OK, staging.told)

    def _staged(self, connection: Connection, room: KvReservation) -> StagingSender | None:
        """None, and the reader has been told, where pages go through the connection as before. Raises OSError."""
        if self._rooms.find(room) is None:
            self._refuse(connection, Status.NO_ROOM)
        elif self._carrier is None:
            self._send(connection, Status.NO_AREA)
        else:
            try:
                deadline = time.monotonic() + self._limits.hello_timeout_s
                return StagingSender(connection, self._layout.page_bytes, self._carrier, deadline)
            except NoAreaLeft as error:
                self._count_refused("areas")
                self._send(connection, Status.NO_AREA, frames.pack_sentence(str(error)))
            except OSError as error:
                logger.warning("pages do not go through NIXL", extra=fields(error=str(error)))
                self._send(connection, Status.NO_AREA)
        return None

    def _sender(self, connection: Connection, is_shared: bool) -> PageSender:
        """Raises OSError."""
        if not is_shared:
            return SocketSender(connection, self._layout.page_bytes)
        return RingSender(connection, self._layout.page_bytes, time.monotonic() + self._limits.hello_timeout_s)

    def _is_let_in(self, connection: Connection, is_shared: bool) -> bool:
        """By its user on this machine, and by TLS over the network where that is asked for. Raises OSError."""
        if is_shared:
            if not connection.is_of_same_user:
                self._count_refused("user")
                return False
        elif self._tls is not None:
            try:
                deadline = time.monotonic() + self._limits.hello_timeout_s
                self._tls.check(connection.secure(self._tls.contexts().server, deadline))
            except ssl.SSLError as error:
                logger.info("a reader of pages was refused", extra=fields(error=str(error)))
                self._count_refused("tls")
                return False
        return True

    def _is_greeted(self, connection: Connection) -> bool:
        frame = self._frame(connection, frames.HELLO_BYTES, self._limits.hello_timeout_s)
        if frame is None:  # as probes of the port do
            return False
        hello = frames.parse_hello(frame)
        told = bytearray(hello.layout_bytes)
        self._fill(connection, memoryview(told))
        if objection := frames.objection(hello, told, self._layout):
            logger.info("a reader of pages was refused", extra=fields(error=objection))
            self._refuse(connection, Status.LAYOUT, objection)
            return False
        self._send(connection, Status.OK)
        return True

    def _frame(self, connection: Connection, size: int, timeout_s: float) -> bytearray | None:
        """None where it does not begin within that time, or will not any more. Raises Malformed."""
        frame = bytearray(size)
        try:
            begun = connection.receive_into(memoryview(frame)[:1], time.monotonic() + timeout_s)
        except TimeoutError:
            return None
        if not begun:
            return None
        self._fill(connection, memoryview(frame)[1:])
        return frame

    def _fill(self, connection: Connection, rest: memoryview) -> None:
        """Raises Malformed where not all of it comes."""
        try:
            received = connection.receive_into(rest, time.monotonic() + self._limits.hello_timeout_s)
        except TimeoutError as error:
            raise Malformed("a frame has not come in time") from error
        if received < len(rest):
            raise Malformed("a frame has broken off")

    def _answer(self, connection: Connection, sender: PageSender, request: Request) -> None:
        standing = self._rooms.find(request.room)
        opened = None if standing is None else standing.room
        status = Status.NO_ROOM if opened is None else self._verdict(request, opened)
        if standing is None or opened is None or status is not Status.OK:
            self._refuse(connection, status)
            return
        wanted = opened.pages[request.first : request.first + request.count]
        self._rooms.was_read(standing, opened, connection)  # also where it is lost while it takes it
        sent = sender.send(wanted, partial(self._rooms.copy, standing), time.monotonic() + self._limits.send_timeout_s)
        with self._lock:
            self._served_bytes += sent * self._layout.page_bytes
        if not sent:
            self._refuse(connection, Status.NO_ROOM)
        elif sent < request.count:
            self._count_refused(Status.NO_ROOM.name.lower())  # and the reader has been told

    def _verdict(self, request: Request, room: OpenReservation) -> Status:
        """OK, or why these pages of a room that the reader knows cannot be read. Nothing is made before the sizes are known."""
        end = request.first + request.count
        if request.count * self._layout.page_bytes > max(self._limits.max_read_bytes, self._layout.page_bytes):
            return Status.TOO_LARGE
        if not request.count or end > len(room.pages):
            return Status.OUT_OF_RANGE
        tokens = room.tokens[: end * self._layout.page_size * TOKEN_BYTES]
        is_same = request.proof == proof(room.room.secret, room.tree, tokens)
        return Status.OK if is_same else Status.OTHER_PROMPT

    def _refuse(self, connection: Connection, status: Status, sentence: str = "") -> None:
        """Best effort: who says what nobody understands may not listen either."""
        self._count_refused(status.name.lower())
        try:
            self._send(connection, status, frames.pack_sentence(sentence))
        except OSError as error:
            logger.info("a reader of pages did not wait for its refusal", extra=fields(error=str(error)))
            connection.shut_down()

    def _count_refused(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def _send(self, connection: Connection, status: Status, payload: bytes = b"") -> None:
        """Raises OSError."""
        connection.send(
            frames.pack_answer(Answer(status, len(payload))) + payload, time.monotonic() + self._limits.send_timeout_s
        )

    def _tell_left(self, rooms: Sequence[ReservationReleased]) -> None:
        for left in rooms:
            try:
                self._on_left(left)
            except Exception:  # of one room: the others are told
                logger.exception("a room was not left")


def _listen(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    is_any = host == "::" and socket.has_dualstack_ipv6()  # of IPv4 too, where that can be
    return socket.create_server((str(place[0]), port), family=family, backlog=BACKLOG, dualstack_ipv6=is_any)
