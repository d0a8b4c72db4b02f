"""The carrier, a process that runs NIXL for a worker: python -m rootstock_llm...remote_kv.nixl_carrier DESCRIPTOR.

DESCRIPTOR is the file descriptor of a socket to the worker. NIXL runs in a separate process for safety. On a network without
remote keys, such as TCP, a remote agent could read and write all memory of the process. The carrier has no secrets, and no data
except pages that are being sent or received.

The worker shares memory areas with the carrier. For each area, there is a socket (the line) and a thread that serves it. The
thread ends with the line, and the process ends with the worker. Areas stay mapped, because on a network without remote keys, a
remote read of an address that is no longer mapped would end the process.
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
REPLY_S = 10.0  # seconds; limit for sending a reply
ORDER_S = 10.0  # seconds; limit from the first to the last byte of an order
POLL_S = 0.0002  # seconds between two checks of a running read
ABORT_POLL_S = 0.1  # seconds between two attempts to abort a read that has exceeded its time limit


class Mappings:
    """The memory areas of the worker that are mapped into this process. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[int, NDArray[np.uint8]] = {}  # by inode

    def of(self, fd: int, size: int) -> NDArray[np.uint8]:
        """Returns the area of a descriptor, uint8[size], and maps it at the first call. Raises OSError or ValueError."""
        inode = os.fstat(fd).st_ino
        with self._lock:
            if inode not in self._mapped:
                self._mapped[inode] = np.frombuffer(mmap.mmap(fd, size), np.uint8)
            return self._mapped[inode]


class CarriedMemory:
    """A registered memory area. Either remote agents read it, or reads of this process write to its beginning.

    Belongs to one thread.
    """

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
        self._remote: Any = None  # name of the remote agent whose memory is read, None before LOAD
        self._running: NixlRead | None = None  # read that may still write to the memory

    def run(self, order: Order) -> None:
        """Runs a LOAD or READ order. Raises AgentFailed or TimeoutError."""
        if order.kind is OrderKind.READ:
            self._read(order)
        elif self._remote is None:
            self._remote = self._agent.load(order.payload)
        else:
            raise AgentFailed("the area has already loaded a remote agent")

    def close(self) -> None:
        """Ends the registration of the memory, after the end of a read that may still write to it. Raises AgentFailed."""
        try:
            if self._remote is not None:
                self._agent.unload(self._remote)
            while self._running is not None and not self._try_end(self._running):
                time.sleep(ABORT_POLL_S)
        finally:
            self._agent.deregister(self._registered)

    def _read(self, order: Order) -> None:
        if self._remote is None or self._running is not None or not 0 < order.size <= self._size:
            raise AgentFailed("a read needs a loaded remote agent, no other running read, and a size within the area")
        deadline = time.monotonic() + order.seconds
        reading = self._running = self._agent.read(self._remote, order.address, self.address, order.size)
        while not reading.is_done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a read through NIXL has not ended within {order.seconds:.1f} s")
            time.sleep(POLL_S)
        reading.end()
        self._running = None

    @staticmethod
    def _try_end(reading: NixlRead) -> bool:
        try:
            reading.end()
        except AgentFailed:  # the read still runs
            return False
        return True


def _serve(agent: HostAgent, memory: NDArray[np.uint8], line: Connection) -> None:
    """Serves one memory area until END or until its line ends. Raises OSError or ValueError."""
    try:
        carried = CarriedMemory(agent, memory)
        try:
            _reply(line, True, frames.ADDRESS.pack(carried.address) + carried.metadata)
            _run_orders(carried, line)
        finally:
            carried.close()
        _reply(line, True)
    except AgentFailed as error:
        _reply(line, False, str(error).encode())


def _run_orders(carried: CarriedMemory, line: Connection) -> None:
    """Runs the orders of a line until END. Raises OSError if the line ends, and ValueError for an order of unknown kind."""
    while True:
        line.wait()
        order = frames.receive_order(line, time.monotonic() + ORDER_S)
        if order.kind is OrderKind.END:
            return
        try:
            carried.run(order)
            _reply(line, True)
        except (AgentFailed, TimeoutError) as error:
            _reply(line, False, str(error).encode())


def _reply(line: Connection, is_done: bool, payload: bytes = b"") -> None:
    """Sends a reply. Raises OSError."""
    frames.send_reply(line, is_done, payload if is_done else payload[:MAX_ERROR_BYTES], time.monotonic() + REPLY_S)


def _carry(agent: HostAgent, mappings: Mappings, memory_fd: int, size: int, line: Connection) -> None:
    """Maps and serves one memory area on the calling thread, and closes both descriptors."""
    try:
        _serve(agent, mappings.of(memory_fd, size), line)
    except (OSError, ValueError) as error:
        logger.info("the carrier stops serving a memory area: %s", error)
    finally:
        os.close(memory_fd)
        line.close()


def main() -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # after Ctrl-C in a terminal, the worker finishes its work and then ends this process
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
            os._exit(0)  # the worker has ended; _exit() does not wait for other threads
        memory_fd, line_fd = fds
        line = Connection(socket.socket(fileno=line_fd))
        (size,) = frames.SIZE.unpack(data)
        threading.Thread(target=_carry, args=(agent, mappings, memory_fd, size, line), daemon=True).start()


if __name__ == "__main__":
    main()
