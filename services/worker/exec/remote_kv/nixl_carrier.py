"""The carrier: the process that loads NIXL, python -m rootstock_llm.services.worker.exec.remote_kv.nixl_carrier DESCRIPTOR.

The descriptor is a socket to the carrier's worker. NIXL runs in a separate process for safety: over a network without remote
keys, such as TCP, a remote agent can read and write all memory of the process. The carrier has no secrets. The only data in its
memory are pages that are being sent or received.

The worker shares memory areas with the carrier. One thread serves each area over a separate socket, the line, and ends with the
line. The process ends with its worker. Areas stay mapped, because on a network without remote keys, a late read of an unmapped
address would end the process.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.exec.remote_kv import nixl_frames as frames
from rootstock_llm.services.worker.exec.remote_kv.connection import Connection
from rootstock_llm.services.worker.exec.remote_kv.frames import MAX_ERROR_BYTES
from rootstock_llm.services.worker.exec.remote_kv.nixl_agent import AgentFailed, HostAgent, NixlRead
from rootstock_llm.services.worker.exec.remote_kv.nixl_frames import Order, OrderKind

logger = logging.getLogger(__name__)
REPLY_S = 10.0  # time limit for sending a reply
ORDER_S = 10.0  # from the first to the last byte of an order
POLL_S = 0.0002  # seconds between two checks of a running read
UNENDED_POLL_S = 0.1  # seconds between two attempts to abort a read whose time limit has passed


class Mappings:
    """Maps the memory areas of the worker, each of them once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[int, NDArray[np.uint8]] = {}  # by inode

    def of(self, fd: int, size: int) -> NDArray[np.uint8]:
        """Returns the area of a descriptor as uint8[size]. Raises OSError or ValueError."""
        inode = os.fstat(fd).st_ino
        with self._lock:
            if inode not in self._mapped:
                self._mapped[inode] = np.frombuffer(mmap.mmap(fd, size), np.uint8)
            return self._mapped[inode]


class CarriedMemory:
    """Memory that worker and carrier share. Remote agents read it, or one read writes to its beginning. Belongs to one thread."""

    def __init__(self, agent: HostAgent, memory: NDArray[np.uint8]) -> None:
        """Registers the memory.

        Args:
            agent: the agent of this process.
            memory: uint8[n].

        Raises:
            AgentFailed: NIXL does not accept the memory.
        """
        self._agent, self._size = agent, len(memory)
        self.address: int = memory.ctypes.data
        self._registered, self.metadata = agent.register(self.address, self._size)
        self._other: Any = None  # remote agent whose memory is read
        self._unended: NixlRead | None = None  # a read that may still write to the memory

    def do(self, order: Order) -> None:
        """Runs a LOAD or READ order. Raises AgentFailed or TimeoutError."""
        if order.kind is OrderKind.READ:
            self._read(order)
        elif self._other is None:
            self._other = self._agent.load(order.payload)
        else:
            raise AgentFailed("a remote agent is loaded already")

    def close(self) -> None:
        """Returns when no remote agent reads the memory and no read writes to it. Raises AgentFailed."""
        try:
            if self._other is not None:
                self._agent.unload(self._other)
            while self._unended is not None and not self._is_ended(self._unended):
                time.sleep(UNENDED_POLL_S)
        finally:
            self._agent.forget(self._registered)

    def _read(self, order: Order) -> None:
        if self._other is None or self._unended is not None or not 0 < order.size <= self._size:
            raise AgentFailed("no remote memory is loaded, a read is still pending, or the size is outside the area")
        deadline = time.monotonic() + order.seconds
        reading = self._unended = self._agent.read(self._other, order.address, self.address, order.size)
        while not reading.is_done():
            if time.monotonic() > deadline:
                raise TimeoutError("a read through NIXL has not ended in time")
            time.sleep(POLL_S)
        reading.end()
        self._unended = None

    @staticmethod
    def _is_ended(reading: NixlRead) -> bool:
        try:
            reading.end()
        except AgentFailed:  # the read still runs
            return False
        return True


def _serve(agent: HostAgent, memory: NDArray[np.uint8], line: Connection) -> None:
    """Serves one memory area until its line ends."""
    try:
        carried = CarriedMemory(agent, memory)
        try:
            _reply(line, True, frames.ADDRESS.pack(carried.address) + carried.metadata)
            _obey(carried, line)
        finally:
            carried.close()
        _reply(line, True)
    except AgentFailed as error:
        _reply(line, False, str(error).encode())


def _obey(carried: CarriedMemory, line: Connection) -> None:
    """Runs the orders of a line until END. Raises OSError if the line ends, and ValueError for a malformed order."""
    while True:
        line.wait()
        order = frames.receive_order(line, time.monotonic() + ORDER_S)
        if order.kind is OrderKind.END:
            return
        try:
            carried.do(order)
            _reply(line, True)
        except (AgentFailed, TimeoutError) as error:
            _reply(line, False, str(error).encode())


def _reply(line: Connection, is_done: bool, payload: bytes = b"") -> None:
    """Sends a reply. Raises OSError."""
    frames.send_reply(line, is_done, payload if is_done else payload[:MAX_ERROR_BYTES], time.monotonic() + REPLY_S)


def _carry(agent: HostAgent, mappings: Mappings, memory_fd: int, size: int, line: Connection) -> None:
    """Runs on a thread and serves one memory area."""
    try:
        _serve(agent, mappings.of(memory_fd, size), line)
    except (OSError, ValueError) as error:
        logger.info("the carrier stops serving a memory area: %s", error)
    finally:
        os.close(memory_fd)
        line.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the worker finishes its work and then ends this process
    worker = socket.socket(fileno=int(sys.argv[1]))
    connection = Connection(worker)
    try:
        agent = HostAgent()
    except AgentFailed as error:
        _reply(connection, False, str(error).encode())
        return
    _reply(connection, True)
    worker.settimeout(None)
    mappings = Mappings()
    while True:
        data, fds, _, _ = socket.recv_fds(worker, frames.SIZE.size, 2)
        if not data:
            os._exit(0)  # the worker has ended; does not wait for other threads
        memory_fd, line_fd = fds
        line = Connection(socket.socket(fileno=line_fd))
        (size,) = frames.SIZE.unpack(data)
        threading.Thread(target=_carry, args=(agent, mappings, memory_fd, size, line), daemon=True).start()


if __name__ == "__main__":
    main()
