"""Serves pages of this worker's KV reservations: over TCP, through NIXL, or through shared memory on the same machine.

One thread per listener accepts connections, and one thread serves each connection. An error ends only the connection in which it
occurs. Each connection has one read at a time. Copies of pages therefore take at most max_connections * max_read_bytes bytes, and
the same amount of pinned memory if the pool is on a GPU.
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

import numpy as np

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, OpenReservation, ReservationReleased, proof
from rootstock_llm.services.worker.core.contracts.transfers import I32, NO_PAGES
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES
from rootstock_llm.services.worker.exec.contracts.peer_pages import PeerCounts, ReadPages
from rootstock_llm.services.worker.exec.remote_kv import frames
from rootstock_llm.services.worker.exec.remote_kv.connection import Connection
from rootstock_llm.services.worker.exec.remote_kv.frames import Malformed, PageLayout, PageRequest, RequestKind, Response, Status
from rootstock_llm.services.worker.exec.remote_kv.nixl_process import Carrier, NoAreaLeft
from rootstock_llm.services.worker.exec.remote_kv.nixl_staging import StagingSender
from rootstock_llm.services.worker.exec.remote_kv.offered_reservations import OfferedReservations
from rootstock_llm.services.worker.exec.remote_kv.page_senders import PageSender, RingSender, SocketSender
from rootstock_llm.services.worker.exec.remote_kv.socket_folder import SocketFolder
from rootstock_llm.services.worker.exec.remote_kv.tls import PeerTls

logger = logging.getLogger(__name__)
ACCEPT_PAUSE_S = 0.5  # seconds of pause after a failed accept(), for example because no descriptor is free
CLOSE_TIMEOUT_S = 5.0  # seconds for which close() waits for all threads together
BACKLOG = 128  # largest number of connections that wait for accept()


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a reservation server."""

    max_connections: int = 64  # connections at a time
    hello_timeout_s: float = 5.0  # seconds for the TLS handshake, until a hello begins, and for the rest of each frame
    idle_timeout_s: float = 60.0  # longest time in seconds between two requests
    send_timeout_s: float = 10.0  # seconds for a whole response
    max_read_bytes: int = 64 << 20  # bytes of pages in one response; one page is always permitted


class TcpKvServer:
    """Implements KvServer. It listens as soon as it is constructed."""

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
        num_parts: Sequence[int] = (),
    ) -> None:
        """Starts the listeners.

        Args:
            host: address to listen on.
            port: port to listen on; 0 for a free one.
            layout: KV layout. Only readers with an equal layout, page size and page bytes are served.
            page_size: tokens of a page.
            page_bytes: bytes of a page.
            read_pages: copies pages out of the pool.
            on_left: called on any thread when a reader releases a reservation, or when the connection of the reservation's
                last read ends. It is called at most once per version of a reservation. The reservation stays open until the
                worker closes it.
            limits: limits, None for the defaults.
            tls: certificates, None for no TLS.
            folder: folder for the Unix socket of readers on this machine, which then read through shared memory. None:
                these readers read over TCP.
            carrier: process that sends pages through NIXL, for readers that request it. It is closed with this server. None for
                no NIXL.
            num_parts: pages that a unit takes, by cache group.

        Raises:
            OSError: the server cannot listen on the address.
        """
        self._num_parts = tuple(num_parts)
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

    def close_reservations(self, reservations: Sequence[KvReservation]) -> None:
        self._reservations.close_reservations(reservations)

    def close_all_reservations(self) -> None:
        self._reservations.close_all_reservations()

    def counts(self) -> PeerCounts:
        """Returns the counts of this server.

        The reasons of refusals are the labels of frames.Status, and:

        - `connections`: there were already max_connections connections.
        - `areas`: all staging areas for NIXL were in use. The pages went over TCP.
        - `tls`: the reader had no valid certificate.
        - `user`: the reader on this machine ran as another user.
        """
        with self._lock:
            return PeerCounts(self._served_bytes, dict(self._refused), len(self._connections))

    def close(self) -> None:
        """Closes all reservations, and ends all connections. on_left is not called for these reservations."""
        self._reservations.close_all_reservations()
        with self._lock:
            self._closed.set()
            serving = dict(self._connections)
        if self._folder is not None:  # before the port is free: the next server on this port makes a socket of the same name
            with suppress(OSError):
                self._folder.remove(self._port)
        for listener in self._listeners:
            with suppress(OSError):  # the listener is already closed
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            listener.close()
        for connection in serving:
            connection.shut_down()
        until = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in (*self._acceptors, *serving.values()):
            thread.join(max(0.0, until - time.monotonic()))
        if self._carrier is not None:
            self._carrier.close()

    def _accept(self, listener: socket.socket) -> None:
        """Accepts connections until close(). Readers of a Unix socket read through shared memory."""
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
        """Starts the thread of a connection. Closes the connection if max_connections connections are open, or after close().

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
        with ExitStack() as ends:  # runs all callbacks, the last one first, even if one of them raises
            ends.callback(self._remove, connection)
            try:
                if self._authenticate(connection, is_shared) and self._exchange_hello(connection):
                    sender = self._sender(connection, is_shared)
                    ends.callback(sender.close)
                    self._serve_requests(connection, sender, ends)
            except Malformed as error:
                logger.info("a remote reader sent an invalid frame", extra=fields(error=str(error)))
                self._refuse(connection, Status.MALFORMED, str(error))
            except OSError as error:
                logger.info("lost the connection to a remote reader", extra=fields(error=str(error)))
            except Exception:  # an error of any type, such as errors of read_pages; only this connection ends
                logger.exception("could not serve KV pages")
            finally:
                connection.close()

    def _remove(self, connection: Connection) -> None:
        """Removes an ended connection, and releases the reservations whose last read came over it."""
        with self._lock:
            del self._connections[connection]
        self._report_released(self._reservations.release_read_by(connection))

    def _serve_requests(self, connection: Connection, sender: PageSender, senders: ExitStack) -> None:
        """Serves requests until the connection ends.

        Args:
            connection: the connection, after the exchange of the hello.
            sender: sends pages.
            senders: closes further senders when the connection ends. Gets the NIXL sender that replaces `sender` after a STAGE.

        Raises:
            Malformed: the reader has sent an invalid frame.
            OSError: the connection is broken.
            Exception: the errors of read_pages.
        """
        while (frame := self._frame(connection, frames.REQUEST_BYTES, self._limits.idle_timeout_s)) is not None:
            request = frames.parse_request(frame)
            match request.kind:
                case RequestKind.READ:
                    self._serve_read(connection, sender, request)
                case RequestKind.LEAVE:
                    self._report_released(self._reservations.release(request.reservation))
                case RequestKind.STAGE:
                    if not isinstance(sender, SocketSender):
                        raise Malformed("the reader sent STAGE although pages already go through a ring or a staging area")
                    if (staging := self._staging_sender(connection, request.reservation)) is not None:
                        senders.callback(staging.close)
                        sender = staging
                        self._send(connection, Status.OK, staging.description)

    def _staging_sender(self, connection: Connection, reservation: KvReservation) -> StagingSender | None:
        """Returns a sender through NIXL, or None after a refusal: pages then go over the connection. Raises OSError."""
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
                logger.warning("could not allocate a staging area for NIXL; pages go over TCP", extra=fields(error=str(error)))
                self._send(connection, Status.NO_AREA)
        return None

    def _sender(self, connection: Connection, is_shared: bool) -> PageSender:
        """Returns the sender of a new connection. Raises OSError."""
        if not is_shared:
            return SocketSender(connection, self._layout.page_bytes)
        return RingSender(connection, self._layout.page_bytes, time.monotonic() + self._limits.hello_timeout_s)

    def _authenticate(self, connection: Connection, is_shared: bool) -> bool:
        """Returns whether the reader may connect. Raises OSError.

        A reader on this machine must run as the same user. If TLS is configured, other readers need a valid certificate.
        """
        if is_shared:
            if not connection.is_from_same_user:
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

    def _exchange_hello(self, connection: Connection) -> bool:
        """Receives and answers the hello. Returns False if there is no hello, or if versions or layouts differ.

        Raises Malformed or OSError.
        """
        frame = self._frame(connection, frames.HELLO_BYTES, self._limits.hello_timeout_s)
        if frame is None:  # for example, the connection is a probe of the port
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
        """Receives a frame.

        Returns:
            None if no byte arrives within timeout_s, or if the connection ends before the first byte.

        Raises:
            Malformed: only a part of the frame has arrived.
            OSError: the connection is broken.
        """
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
        """Receives the rest of a frame. Raises Malformed if it does not arrive within hello_timeout_s."""
        try:
            received = connection.receive_into(rest, time.monotonic() + self._limits.hello_timeout_s)
        except TimeoutError as error:
            raise Malformed(f"the rest of a frame did not arrive within {self._limits.hello_timeout_s} s") from error
        if received < len(rest):
            raise Malformed("the connection ended within a frame")

    def _serve_read(self, connection: Connection, sender: PageSender, request: PageRequest) -> None:
        """Sends the pages of a READ request, or a refusal. Raises OSError and the errors of read_pages."""
        offered = self._reservations.find(request.reservation)
        version = None if offered is None else offered.version
        status = Status.NO_RESERVATION if version is None else self._check(request, version)
        if offered is None or version is None or status is not Status.OK:
            self._refuse(connection, status)
            return
        pages = self._rows(version, request.group)[request.first : request.first + request.count]
        # Before the send, so that the reservation is also released if the connection ends during the send.
        self._reservations.was_read(offered, version, connection)
        copy = partial(self._reservations.copy, offered, group=request.group)
        sent = sender.send(pages, copy, time.monotonic() + self._limits.send_timeout_s)
        with self._lock:
            self._served_bytes += sent * self._layout.page_bytes
        if not sent:
            self._refuse(connection, Status.NO_RESERVATION)
        elif sent < request.count:
            self._count_refused(Status.NO_RESERVATION.label)  # the sender has already sent the mark BROKEN to the reader

    def _check(self, request: PageRequest, version: OpenReservation) -> Status:
        """Returns OK, or the reason why the requested pages of an open reservation must not be sent.

        Sizes are checked first, before any memory is allocated.
        """
        end = request.first + request.count
        rows = self._rows(version, request.group)
        if request.count * self._layout.page_bytes > max(self._limits.max_read_bytes, self._layout.page_bytes):
            return Status.TOO_LARGE
        if not request.count or end > len(rows):
            return Status.OUT_OF_RANGE
        num_pages = version.units_end if request.group else end
        tokens = version.tokens[: num_pages * self._layout.page_size * TOKEN_BYTES]
        is_same_prompt = request.proof == proof(version.reservation.secret, version.tree, tokens)
        return Status.OK if is_same_prompt else Status.OTHER_PROMPT

    def _rows(self, version: OpenReservation, group: int) -> I32:
        """Returns the pages of a reservation, or the ids of the parts of its units of a group, see ReadPages."""
        if not group:
            return version.pages
        if group > min(len(version.units), len(self._num_parts)):
            return NO_PAGES
        count = self._num_parts[group - 1]
        firsts = version.units[group - 1] * count
        return (firsts[:, None] + np.arange(count)).ravel().astype(np.int32)

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
        """Sends a response. Raises OSError."""
        connection.send(
            frames.pack_response(Response(status, len(payload))) + payload, time.monotonic() + self._limits.send_timeout_s
        )

    def _report_released(self, releases: Sequence[ReservationReleased]) -> None:
        for release in releases:
            try:
                self._on_left(release)
            except Exception:  # an error of any type; the other releases are still reported
                logger.exception("could not report the release of a KV reservation")


def _listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    is_any = host == "::" and socket.has_dualstack_ipv6()  # also accepts IPv4 if the system supports it
    return socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG, dualstack_ipv6=is_any)
