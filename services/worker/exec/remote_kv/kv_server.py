"""Serves pages of this worker's KV reservations: over TCP, through NIXL, or through shared memory on one machine.

One thread per listener accepts connections, and each connection has a thread that ends with it. A fault ends only its connection.
Each connection has one read at a time. So copies of pages take at most max_connections * max_read_bytes bytes, and the same
amount of pinned memory if the pool is on a GPU.
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

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, OpenReservation, ReservationReleased, proof
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES
from rootstock_llm.services.worker.exec.contracts.peer_pages import PeerCounts, ReadPages
from rootstock_llm.services.worker.exec.remote_kv import frames
from rootstock_llm.services.worker.exec.remote_kv.connection import Connection
from rootstock_llm.services.worker.exec.remote_kv.frames import Answer, Malformed, PageLayout, PageRequest, RequestKind, Status
from rootstock_llm.services.worker.exec.remote_kv.nixl_process import Carrier, NoAreaLeft
from rootstock_llm.services.worker.exec.remote_kv.nixl_staging import StagingSender
from rootstock_llm.services.worker.exec.remote_kv.offered_reservations import OfferedReservations
from rootstock_llm.services.worker.exec.remote_kv.page_senders import PageSender, RingSender, SocketSender
from rootstock_llm.services.worker.exec.remote_kv.socket_folder import SocketFolder
from rootstock_llm.services.worker.exec.remote_kv.tls import PeerTls

logger = logging.getLogger(__name__)
ACCEPT_PAUSE_S = 0.5  # pause after a failed accept(), for example without free descriptors
CLOSE_TIMEOUT_S = 5.0  # longest wait of close() for all threads
BACKLOG = 128  # connections that wait for accept()


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a reservation server."""

    max_connections: int = 64
    hello_timeout_s: float = 5.0  # time for a hello to begin, and for every frame from its first byte to its last
    idle_timeout_s: float = 60.0  # longest time between two requests
    send_timeout_s: float = 10.0  # time for a whole answer
    max_read_bytes: int = 64 << 20  # largest answer; one page is always permitted


class TcpKvServer:
    """A KvServer. It listens as soon as it is constructed."""

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
        """Starts the listeners.

        Args:
            host: address to listen on.
            port: port to listen on; 0 for a free one.
            layout: equal if two pools can exchange pages; sizes are compared separately.
            page_size: tokens of a page.
            page_bytes: bytes of a page.
            read_pages: copies pages out of the pool.
            on_left: called on any thread, at most once per version of a reservation, if its reader releases it or the connection
                of its last read ends. The reservation stays open until it is shut.
            limits: limits, None for the defaults.
            tls: certificates, None for no TLS.
            folder: folder of the socket for readers on this machine, which share memory, None if they read over TCP.
            carrier: NIXL for readers that request it, closed with this server, None for no NIXL.

        Raises:
            OSError: the address cannot be listened on.
        """
        self._layout = PageLayout(layout, page_size, page_bytes)
        self._limits = limits or ServerLimits()
        self._on_left, self._tls, self._carrier = on_left, tls, carrier
        self._reservations = OfferedReservations(read_pages)
        self._lock = threading.Lock()  # guards the fields below
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

    def open(self, reservation: OpenReservation) -> None:
        self._reservations.open(reservation)

    def shut(self, reservations: Sequence[KvReservation]) -> None:
        self._reservations.shut(reservations)

    def shut_all(self) -> None:
        self._reservations.shut_all()

    def counts(self) -> PeerCounts:
        """Returns the counts of this server.

        Reasons of refusals are the labels of frames.Status, and:

        - `connections`: there were max_connections connections already;
        - `areas`: all staging areas for NIXL were in use, and the pages went over TCP;
        - `tls`: the reader had no valid certificate;
        - `user`: the reader on this machine ran as another user.
        """
        with self._lock:
            return PeerCounts(self._served_bytes, dict(self._refused), len(self._connections))

    def close(self) -> None:
        """Closes all reservations, without calls of on_left, and ends all connections."""
        self._reservations.shut_all()
        with self._lock:
            self._closed.set()
            serving = dict(self._connections)
        for listener in self._listeners:
            with suppress(OSError):  # the listener has been closed before
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            listener.close()
        for connection in serving:
            connection.shut_down()
        if self._folder is not None:
            with suppress(OSError):  # the next server on this port replaces the socket
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
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                if not self._closed.is_set():
                    logger.error("could not accept the connection of a remote reader", extra=fields(error=str(error)))
                    self._closed.wait(ACCEPT_PAUSE_S)

    def _admit(self, connection: Connection, is_shared: bool) -> None:
        """Starts the thread of a connection. Closes the connection if there are max_connections already.

        Raises:
            RuntimeError: no thread can be started.
        """
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
        with ExitStack() as ends:  # runs all callbacks, the last one first, even if a callback raises
            ends.callback(self._is_gone, connection)
            try:
                if self._is_let_in(connection, is_shared) and self._is_greeted(connection):
                    sender = self._sender(connection, is_shared)
                    ends.callback(sender.close)
                    self._converse(connection, sender, ends)
            except Malformed as error:
                logger.info("a remote reader sent an invalid frame", extra=fields(error=str(error)))
                self._refuse(connection, Status.MALFORMED, str(error))
            except OSError as error:
                logger.info("lost the connection to a remote reader", extra=fields(error=str(error)))
            except Exception:  # for example of read_pages; it ends this connection only
                logger.exception("could not serve KV pages")
            finally:
                connection.close()

    def _is_gone(self, connection: Connection) -> None:
        with self._lock:
            del self._connections[connection]
        self._report_released(self._reservations.release_read_by(connection))

    def _converse(self, connection: Connection, sender: PageSender, senders: ExitStack) -> None:
        """Serves requests until the connection ends.

        Args:
            connection: the connection, after its hello.
            sender: sends pages.
            senders: closes a sender that replaces `sender`.

        Raises:
            Malformed: the reader has sent an invalid frame.
            OSError: the connection is broken.
            Exception: the errors of read_pages.
        """
        while (frame := self._frame(connection, frames.REQUEST_BYTES, self._limits.idle_timeout_s)) is not None:
            request = frames.parse_request(frame)
            match request.kind:
                case RequestKind.READ:
                    self._answer(connection, sender, request)
                case RequestKind.LEAVE:
                    self._report_released(self._reservations.release(request.reservation))
                case RequestKind.STAGE:
                    if not isinstance(sender, SocketSender):
                        raise Malformed("STAGE on a connection that already sends pages through a ring or a staging area")
                    if (staging := self._staged(connection, request.reservation)) is not None:
                        senders.callback(staging.close)
                        sender = staging
                        self._send(connection, Status.OK, staging.description)

    def _staged(self, connection: Connection, reservation: KvReservation) -> StagingSender | None:
        """Returns a sender through NIXL. Returns None after a refusal; pages then go over the connection. Raises OSError."""
        if self._reservations.find(reservation) is None:
            self._refuse(connection, Status.NO_RESERVATION)
        elif self._carrier is None:
            self._send(connection, Status.NO_AREA)
        else:
            try:
                deadline = time.monotonic() + self._limits.hello_timeout_s
                return StagingSender(connection, self._layout.page_bytes, self._carrier, deadline)
            except NoAreaLeft as error:
                self._count_refused("areas")
                self._send(connection, Status.NO_AREA, frames.pack_error(str(error)))
            except OSError as error:
                logger.warning("could not allocate a staging area for NIXL, pages go over TCP", extra=fields(error=str(error)))
                self._send(connection, Status.NO_AREA)
        return None

    def _sender(self, connection: Connection, is_shared: bool) -> PageSender:
        """Returns the sender of a new connection. Raises OSError."""
        if not is_shared:
            return SocketSender(connection, self._layout.page_bytes)
        return RingSender(connection, self._layout.page_bytes, time.monotonic() + self._limits.hello_timeout_s)

    def _is_let_in(self, connection: Connection, is_shared: bool) -> bool:
        """Returns whether the reader may connect: the same user on this machine, or valid TLS over the network.

        Raises OSError.
        """
        if is_shared:
            if not connection.is_of_same_user:
                self._count_refused("user")
                return False
        elif self._tls is not None:
            try:
                deadline = time.monotonic() + self._limits.hello_timeout_s
                self._tls.check(connection.secure(self._tls.contexts().server, deadline))
            except ssl.SSLError as error:
                logger.info("refused a remote reader", extra=fields(error=str(error)))
                self._count_refused("tls")
                return False
        return True

    def _is_greeted(self, connection: Connection) -> bool:
        """Exchanges the hello. Returns False if no hello came or its layout differs. Raises Malformed or OSError."""
        frame = self._frame(connection, frames.HELLO_BYTES, self._limits.hello_timeout_s)
        if frame is None:  # for example, a probe of the port
            return False
        hello = frames.parse_hello(frame)
        description = bytearray(hello.layout_bytes)
        self._fill(connection, memoryview(description))
        if objection := frames.objection(hello, description, self._layout):
            logger.info("refused a remote reader", extra=fields(error=objection))
            self._refuse(connection, Status.LAYOUT, objection)
            return False
        self._send(connection, Status.OK)
        return True

    def _frame(self, connection: Connection, size: int, timeout_s: float) -> bytearray | None:
        """Returns a frame, or None if no frame begins in time or the connection has ended. Raises Malformed."""
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
        """Receives the rest of a frame. Raises Malformed if it does not arrive in time."""
        try:
            received = connection.receive_into(rest, time.monotonic() + self._limits.hello_timeout_s)
        except TimeoutError as error:
            raise Malformed("the rest of a frame did not arrive in time") from error
        if received < len(rest):
            raise Malformed("the connection ended within a frame")

    def _answer(self, connection: Connection, sender: PageSender, request: PageRequest) -> None:
        """Sends the pages of a READ, or refuses it. Raises OSError and the errors of read_pages."""
        offered = self._reservations.find(request.reservation)
        version = None if offered is None else offered.version
        status = Status.NO_RESERVATION if version is None else self._verdict(request, version)
        if offered is None or version is None or status is not Status.OK:
            self._refuse(connection, status)
            return
        pages = version.pages[request.first : request.first + request.count]
        # Recorded before the send, so that the reservation is also released if the reader is lost during the send.
        self._reservations.was_read(offered, version, connection)
        sent = sender.send(pages, partial(self._reservations.copy, offered), time.monotonic() + self._limits.send_timeout_s)
        with self._lock:
            self._served_bytes += sent * self._layout.page_bytes
        if not sent:
            self._refuse(connection, Status.NO_RESERVATION)
        elif sent < request.count:
            self._count_refused(Status.NO_RESERVATION.label)  # the sender has reported this to the reader by a mark

    def _verdict(self, request: PageRequest, version: OpenReservation) -> Status:
        """Returns OK, or the reason why the requested pages of an open reservation cannot be read.

        It checks the sizes before it allocates anything.
        """
        end = request.first + request.count
        if request.count * self._layout.page_bytes > max(self._limits.max_read_bytes, self._layout.page_bytes):
            return Status.TOO_LARGE
        if not request.count or end > len(version.pages):
            return Status.OUT_OF_RANGE
        tokens = version.tokens[: end * self._layout.page_size * TOKEN_BYTES]
        is_same = request.proof == proof(version.reservation.secret, version.tree, tokens)
        return Status.OK if is_same else Status.OTHER_PROMPT

    def _refuse(self, connection: Connection, status: Status, message: str = "") -> None:
        """Counts and sends a refusal. Ends the connection if the refusal cannot be sent."""
        self._count_refused(status.label)
        try:
            self._send(connection, status, frames.pack_error(message))
        except OSError as error:
            logger.info("could not send a refusal to a remote reader", extra=fields(error=str(error)))
            connection.shut_down()

    def _count_refused(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def _send(self, connection: Connection, status: Status, payload: bytes = b"") -> None:
        """Sends an answer. Raises OSError."""
        connection.send(
            frames.pack_answer(Answer(status, len(payload))) + payload, time.monotonic() + self._limits.send_timeout_s
        )

    def _report_released(self, releases: Sequence[ReservationReleased]) -> None:
        for release in releases:
            try:
                self._on_left(release)
            except Exception:  # concerns one reservation; the others are still reported
                logger.exception("could not report the release of a KV reservation")


def _listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises OSError."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    is_any = host == "::" and socket.has_dualstack_ipv6()  # accepts IPv4, too, if the system can
    return socket.create_server((str(place[0]), port), family=family, backlog=BACKLOG, dualstack_ipv6=is_any)
