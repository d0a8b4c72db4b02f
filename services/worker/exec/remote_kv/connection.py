"""A TCP or Unix socket connection, with or without TLS, whose operations end at a deadline.

The deadline holds for a whole operation, so a remote side that sends a byte now and then cannot prolong it. Only `wait` has no
deadline; it is for connections within one machine.
"""

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
    """A connection that owns its socket.

    It belongs to one thread; only `shut_down` may be called on any thread. Deadlines are values of time.monotonic().
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._open = threading.Lock()  # guards the descriptor, because the system soon reuses the number of a closed one
        # Requests are small, and the sender waits for the response. The kernel chooses the buffer sizes: an explicit size is a
        # ceiling, and with the usual net.core.wmem_max it is lower than the size to which the kernel lets a buffer grow.
        with suppress(OSError):  # a broken connection fails at its first use
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def secure(self, context: ssl.SSLContext, deadline: float, server_hostname: str | None = None) -> ssl.SSLSocket:
        """Sets up TLS.

        Args:
            context: TLS context of this side.
            deadline: end of the handshake.
            server_hostname: for a client, the name of the server; None for a server.

        Returns:
            The TLS socket, which has the remote side's certificate.

        Raises:
            OSError: the handshake failed.
        """
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
        """Sends all bytes.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: the connection is broken.
        """
        # Not sendall(): with TLS, its timeout would begin again with each part.
        rest = memoryview(data).cast("B")
        while rest:
            self._socket.settimeout(_seconds_left(deadline))
            rest = rest[self._socket.send(rest) :]

    def receive_into(self, out: bytearray | memoryview, deadline: float) -> int:
        """Fills `out`, and returns the number of received bytes.

        The number is smaller than the size of `out` if the remote side has closed or broken the connection.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: another failure of the socket.
        """
        target = memoryview(out).cast("B")
        received = 0
        with suppress(ConnectionError):
            while received < len(target):
                self._socket.settimeout(_seconds_left(deadline))
                count = self._socket.recv_into(target[received:])
                if count == 0:
                    break
                received += count
        return received

    def wait(self) -> None:
        """Blocks until the remote side sends a byte or closes the connection. Has no deadline."""
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        readable.poll()

    @property
    def is_of_same_user(self) -> bool:
        """Whether the process on the other side of a Unix socket runs as the same user. Raises OSError."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())

    def send_with(self, fd: int, data: bytes, deadline: float) -> None:
        """Sends bytes and a file descriptor over a Unix socket.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: the connection is broken.
        """
        self._socket.settimeout(_seconds_left(deadline))
        sent = socket.send_fds(self._socket, [data], [fd])
        self.send(data[sent:], deadline)

    def receive_with(self, size: int, deadline: float) -> tuple[int | None, bytes]:
        """Receives a file descriptor and `size` bytes over a Unix socket.

        Returns:
            The descriptor, which the caller owns, or None if the message has no descriptor; and the bytes. They are fewer than
            `size` if the remote side has closed or broken the connection.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: another failure of the socket.
        """
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
        """Returns whether the remote side has closed the connection or has sent bytes that were not requested."""
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        return bool(readable.poll(0))

    def shut_down(self) -> None:
        """Ends the connection and wakes all threads that wait on it."""
        with self._open, suppress(OSError):  # the connection has ended already
            # Not SSLSocket.shutdown(), which first removes TLS: another thread might then send plain text.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection and closes the socket. No other call may follow."""
        self.shut_down()
        with self._open:
            self._socket.close()


def connect(
    address: str, context: ssl.SSLContext | None, deadline: float, made: Callable[[Connection], None], name: str = ""
) -> Connection:
    """Returns a TCP connection, secured if there is a context.

    The system decides how long the lookup of a host name takes.

    Args:
        address: host:port.
        context: TLS context of a client, None for plain TCP.
        deadline: end of connecting and of the handshake.
        made: receives the connection before the first wait; raises if the caller no longer needs a connection.
        name: name that the server's certificate must have, if the context checks names; "": the host of `address`.

    Raises:
        ValueError: `address` is not host:port.
        OSError: no connection could be made.
    """
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
    """Returns a connection to a Unix socket of the same user.

    Args:
        path: the socket.
        deadline: end of connecting.
        made: as in connect().

    Raises:
        PermissionError: another user has the socket.
        OSError: no connection could be made.
    """
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
    """Returns whether the host of host:port is an address of this machine; in a pod, of this pod.

    Raises:
        ValueError: `address` is not host:port.
        OSError: the name has no address.
    """
    host, port = parse_address(address)
    for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as trying, suppress(OSError):
            trying.bind((place[0], 0, *place[2:]))
            return True
    return False


def parse_address(address: str) -> tuple[str, int]:
    """Returns (host, port) of host:port or [IPv6 address]:port. Raises ValueError for any other form."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16
    if not (colon and host and is_port) or (":" in host) != bracketed:
        raise ValueError(f"{address!r} is no host:port")
    return host, int(port)


def _seconds_left(deadline: float) -> float:
    """Returns the seconds until the deadline, more than 0. Raises TimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
