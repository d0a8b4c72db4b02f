"""A TCP or Unix socket connection, with or without TLS, whose operations end at a deadline.

The deadline is for a whole operation. A remote side that sends single bytes with pauses therefore cannot prolong the operation.
Only wait() has no deadline; it is for connections within one machine.
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

_CREDENTIALS = struct.Struct("3i")  # ids of process, user and group


class Connection:
    """A connection that owns its socket.

    It belongs to one thread; other threads may call only shut_down(). Deadlines are values of time.monotonic().
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._open = threading.Lock()  # guards the descriptor, because the system reuses the number of a closed descriptor
        # TCP_NODELAY, because requests are small and the sender waits for the response. Buffer sizes are not set: the kernel
        # would limit them to net.core.wmem_max, which is usually less than the size to which it enlarges a buffer by itself.
        with suppress(OSError):  # a broken connection; its first use raises
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def secure(self, context: ssl.SSLContext, deadline: float, server_hostname: str | None = None) -> ssl.SSLSocket:
        """Sets up TLS.

        Args:
            context: TLS context of this side.
            deadline: end of the handshake.
            server_hostname: name of the server, if this side is the client; None if this side is the server.

        Returns:
            The TLS socket, from which the remote side's certificate can be read.

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
        # Not sendall(), because its timeout with TLS is for each part and not for the whole call.
        rest = memoryview(data).cast("B")
        while rest:
            self._socket.settimeout(_seconds_left(deadline))
            rest = rest[self._socket.send(rest) :]

    def receive_into(self, out: bytearray | memoryview, deadline: float) -> int:
        """Fills `out` and returns the number of received bytes.

        The number is smaller than the size of `out` if the connection ends before `out` is full.

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
        """Blocks without a deadline until the remote side sends a byte or closes the connection."""
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        readable.poll()

    @property
    def is_from_same_user(self) -> bool:
        """Whether the process on the other side of a Unix socket runs as the same user as this process. Raises OSError."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())

    def send_with_fd(self, fd: int, data: bytes, deadline: float) -> None:
        """Sends bytes and a file descriptor over a Unix socket.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: the connection is broken.
        """
        self._socket.settimeout(_seconds_left(deadline))
        sent = socket.send_fds(self._socket, [data], [fd])
        self.send(data[sent:], deadline)

    def receive_with_fd(self, size: int, deadline: float) -> tuple[int | None, bytes]:
        """Receives a file descriptor and `size` bytes over a Unix socket.

        Returns:
            The descriptor, or None if none was sent, and the bytes. The caller must close the descriptor. There are fewer than
            `size` bytes if the connection ends before the last of them.

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
        """Returns whether the remote side has closed the connection, or has sent bytes that were not requested."""
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        return bool(readable.poll(0))

    def shut_down(self) -> None:
        """Ends the connection and wakes all threads that wait on it."""
        with self._open, suppress(OSError):  # the connection has already ended
            # Not SSLSocket.shutdown(), which first removes TLS. Another thread could then send plain text.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection and closes the socket. No other call may follow, except shut_down()."""
        self.shut_down()
        with self._open:
            self._socket.close()


def connect(
    address: str, context: ssl.SSLContext | None, deadline: float, on_socket: Callable[[Connection], None], name: str = ""
) -> Connection:
    """Connects over TCP, with TLS if there is a context.

    The deadline does not limit the lookup of a host name.

    Args:
        address: host:port.
        context: TLS context of a client, None for plain TCP.
        deadline: end of connecting and of the handshake.
        on_socket: called with each connection before it connects, so that another thread can shut it down. It may raise to abort.
        name: name that the server's certificate must have if the context checks names; empty for the host of `address`.

    Raises:
        ValueError: `address` is not host:port.
        OSError: no connection could be made.
    """
    host, port = parse_address(address)
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, socket_address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connecting = socket.socket(family, kind, protocol)
        connection = Connection(connecting)
        try:
            on_socket(connection)
            connecting.settimeout(_seconds_left(deadline))
            connecting.connect(socket_address)
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


def connect_unix(path: Path, deadline: float, on_socket: Callable[[Connection], None]) -> Connection:
    """Connects to a Unix socket of a process of the same user.

    Args:
        path: path of the socket.
        deadline: end of connecting.
        on_socket: see connect().

    Raises:
        PermissionError: the socket belongs to a process of another user.
        OSError: no connection could be made.
    """
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(connecting)
    try:
        on_socket(connection)
        connecting.settimeout(_seconds_left(deadline))
        connecting.connect(str(path))
        if not connection.is_from_same_user:
            raise PermissionError(f"the process that listens on {path} runs as another user")
    except BaseException:
        connection.close()
        raise
    return connection


def is_local(address: str) -> bool:
    """Returns whether the host of host:port is an address of this machine, or of this pod in Kubernetes.

    Raises:
        ValueError: `address` is not host:port.
        OSError: the host name has no address.
    """
    host, port = parse_address(address)
    for family, _, _, _, socket_address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as trying, suppress(OSError):
            trying.bind((socket_address[0], 0, *socket_address[2:]))
            return True
    return False


def parse_address(address: str) -> tuple[str, int]:
    """Returns (host, port) of host:port or [IPv6 address]:port. Raises ValueError for any other form."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16
    if not (colon and host and is_port) or (":" in host) != bracketed:
        raise ValueError(f"{address!r} is not of the form host:port or [IPv6 address]:port")
    return host, int(port)


def _seconds_left(deadline: float) -> float:
    """Returns the seconds until the deadline, more than 0. Raises TimeoutError if the deadline has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the deadline has passed")
    return seconds
