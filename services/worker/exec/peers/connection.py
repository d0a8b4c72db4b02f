"""A connection, TCP's or a Unix socket's, whose every wait ends at a deadline, with TLS or without;
but for `wait`, which is for connections within one machine. Nobody can prolong it by a byte now and then."""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Connection:
    """Owns a socket. Of one thread; `shut_down` may be called by any. Deadlines are of time.monotonic()."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._open = threading.Lock()  # of the descriptor: once it is closed, its number is soon another's
        # Requests are small and waited for. Sizes of buffers are left to the kernel: one that is set is a ceiling, and where
        # net.core.wmem_max has its usual value a lower one than it grows to by itself.
        with suppress(OSError):  # it may be broken already, which whoever uses it finds out
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def secure(self, context: ssl.SSLContext, deadline: float, server_hostname: str | None = None) -> ssl.SSLSocket:
        """Sets up TLS; server_hostname: on the client's side. The socket says what the other side has shown. Raises OSError."""
        is_server = server_hostname is None
        plain = self._socket
        plain.settimeout(_seconds_left(deadline))
        secured = context.wrap_socket(
            plain, server_side=is_server, server_hostname=server_hostname, do_handshake_on_connect=False
        )
        self._socket = secured
        secured.do_handshake()
        return secured

    def send(self, data: bytes | memoryview, deadline: float) -> None:
        """All of it. Raises OSError; TimeoutError at the deadline."""
        # Not sendall: with TLS its time-out would be of each part anew.
        rest = memoryview(data).cast("B")
        while rest:
            self._socket.settimeout(_seconds_left(deadline))
            rest = rest[self._socket.send(rest) :]

    def receive_into(self, out: bytearray | memoryview, deadline: float) -> int:
        """Bytes that have come: fewer than fit where the other side has closed the connection or broken it off. Raises OSError;
        TimeoutError at the deadline."""
        room = memoryview(out).cast("B")
        received = 0
        with suppress(ConnectionError):
            while received < len(room):
                self._socket.settimeout(_seconds_left(deadline))
                count = self._socket.recv_into(room[received:])
                if count == 0:
                    break
                received += count
        return received

    def wait(self) -> None:
        """Until the other side says something, or has closed it: for ever, if need be."""
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        readable.poll()

    @property
    def is_of_same_user(self) -> bool:
        """Of a Unix socket: whether this process's user is at its other side. Raises OSError."""
        told = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return bool(_CREDENTIALS.unpack(told)[1] == os.geteuid())

    def send_with(self, fd: int, data: bytes, deadline: float) -> None:
        """Over a Unix socket, with a descriptor. Raises OSError; TimeoutError at the deadline."""
        self._socket.settimeout(_seconds_left(deadline))
        sent = socket.send_fds(self._socket, [data], [fd])
        self.send(data[sent:], deadline)

    def receive_with(self, size: int, deadline: float) -> tuple[int | None, bytes]:
        """Over a Unix socket: a descriptor, which is the caller's, and so many bytes; fewer, as of receive_into. None: none came.
        Raises OSError; TimeoutError at the deadline."""
        self._socket.settimeout(_seconds_left(deadline))
        data, fds, _, _ = socket.recv_fds(self._socket, size, 1, socket.MSG_CMSG_CLOEXEC)
        rest = bytearray(size - len(data))
        try:
            received = self.receive_into(rest, deadline) if data else 0
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return (fds[0] if fds else None), data + rest[:received]

    def is_stale(self) -> bool:
        """Whether the other side has closed it, or says something that nobody has asked for."""
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        return bool(readable.poll(0))

    def shut_down(self) -> None:
        """Whoever waits for something of it need not any more: the connection has ended."""
        with self._open, suppress(OSError):  # it has ended already
            # Not SSLSocket.shutdown, which takes TLS away first: another thread might send what follows in the clear.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it and gives the socket back. No other call follows."""
        self.shut_down()
        with self._open:
            self._socket.close()


def connect(
    address: str, context: ssl.SSLContext | None, deadline: float, made: Callable[[Connection], None], name: str = ""
) -> Connection:
    """address: host:port. made: is told the connection before anything is waited for, and raises where none is wanted any more.
    name: that its certificate must have, where context looks; "": the host's. Names of hosts take the system's own time to be
    looked up. Raises ValueError for an address that is none, and OSError."""
    host, port = parse_address(address)
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connecting = socket.socket(family, kind, protocol)
        connection = Connection(connecting)
        try:
            made(connection)
            connecting.settimeout(_seconds_left(deadline))
            connecting.connect(place)
            if context is not None:
                connection.secure(context, deadline, name or host)
            return connection
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
    raise failure


def connect_unix(path: Path, deadline: float, made: Callable[[Connection], None]) -> Connection:
    """made: see connect. Raises OSError."""
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(connecting)
    try:
        made(connection)
        connecting.settimeout(_seconds_left(deadline))
        connecting.connect(str(path))
        if not connection.is_of_same_user:
            raise PermissionError(f"{path} is another user's")
    except BaseException:
        connection.close()
        raise
    return connection


def is_local(address: str) -> bool:
    """Whether host:port is of this machine, as far as this process sees it: of this pod, say. Raises ValueError for an address
    that is none, and OSError for a name that is none."""
    host, port = parse_address(address)
    for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as trying, suppress(OSError):
            trying.bind((place[0], 0, *place[2:]))
            return True
    return False


def parse_address(address: str) -> tuple[str, int]:
    """(host, port) of host:port, or of [IPv6 address]:port. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16
    if not (colon and host and is_port) or (":" in host) != bracketed:
        raise ValueError(f"{address!r} is no host:port")
    return host, int(port)


def _seconds_left(deadline: float) -> float:
    """Raises TimeoutError where there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
