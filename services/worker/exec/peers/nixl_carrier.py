"""The process that has NIXL in it: python -m services.worker.exec.peers.nixl_carrier DESCRIPTOR, of a socket to its worker.

Whoever speaks to the library over a network that has no keys of its own, such as TCP, can read and write all memory of the
process that it is in. So it is in this one, which has no secret, and nothing in it but pages that are being handed over.

A thread for each memory that the worker gives it, which ends with that memory's line; the process ends with its worker. What has
once been mapped stays so: a read that comes too late, through a network without keys, ends a process where it finds nothing.
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

from services.worker.exec.peers import nixl_frames as frames
from services.worker.exec.peers.connection import Connection
from services.worker.exec.peers.frames import MOST_SENTENCE_BYTES
from services.worker.exec.peers.nixl_agent import AgentFailed, HostAgent, Reading
from services.worker.exec.peers.nixl_frames import Order, OrderKind

logger = logging.getLogger(__name__)
REPLY_S = 10.0
ORDER_S = 10.0  # from the first byte of one to its last
POLL_S = 0.0002
UNENDED_POLL_S = 0.1


class Mappings:
    """Of memory that the worker has given, which gives the same one again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[int, NDArray[np.uint8]] = {}  # by inode

    def of(self, fd: int, size: int) -> NDArray[np.uint8]:
        """uint8[size]. Raises OSError, ValueError."""
        inode = os.fstat(fd).st_ino
        with self._lock:
            if inode not in self._mapped:
                self._mapped[inode] = np.frombuffer(mmap.mmap(fd, size), np.uint8)
            return self._mapped[inode]


class CarriedMemory:
    """Of one thread. Memory of both processes, in which others read through NIXL, or to whose beginning is read."""

    def __init__(self, agent: HostAgent, memory: NDArray[np.uint8]) -> None:
        """memory: uint8[n]. Raises AgentFailed."""
        self._agent, self._size = agent, len(memory)
        self.address: int = memory.ctypes.data
        self._registered, self.metadata = agent.register(self.address, self._size)
        self._other: Any = None  # agent whose memory is read
        self._unended: Reading | None = None

    def do(self, order: Order) -> None:
        """Raises AgentFailed, TimeoutError."""
        if order.kind is OrderKind.READ:
            self._read(order)
        elif self._other is None:
            self._other = self._agent.load(order.payload)
        else:
            raise AgentFailed("another's memory is loaded already")

    def close(self) -> None:
        """Returns when nobody reads or writes here any more. Raises AgentFailed."""
        try:
            if self._other is not None:
                self._agent.unload(self._other)
            while self._unended is not None and not self._is_ended(self._unended):
                time.sleep(UNENDED_POLL_S)
        finally:
            self._agent.forget(self._registered)

    def _read(self, order: Order) -> None:
        if self._other is None or self._unended is not None or not 0 < order.size <= self._size:
            raise AgentFailed("there is nothing to read, or no room for it")
        deadline = time.monotonic() + order.seconds
        reading = self._unended = self._agent.read(self._other, order.address, self.address, order.size)
        while not reading.is_done():
            if time.monotonic() > deadline:
                raise TimeoutError("a read through NIXL has not ended in time")
            time.sleep(POLL_S)
        reading.end()
        self._unended = None

    @staticmethod
    def _is_ended(reading: Reading) -> bool:
        try:
            reading.end()
        except AgentFailed:  # it is under way
            return False
        return True


def _serve(agent: HostAgent, memory: NDArray[np.uint8], line: Connection) -> None:
    """Until the worker ends it."""
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
    """Until END. Raises OSError where the line ends, ValueError."""
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
    """Raises OSError."""
    told = payload if is_done else payload[:MOST_SENTENCE_BYTES]
    frames.send_reply(line, is_done, told, time.monotonic() + REPLY_S)


def _carry(agent: HostAgent, mappings: Mappings, memory_fd: int, size: int, line: Connection) -> None:
    """A thread's whole life."""
    try:
        _serve(agent, mappings.of(memory_fd, size), line)
    except (OSError, ValueError) as error:
        logger.info("memory is not carried any more: %s", error)
    finally:
        os.close(memory_fd)
        line.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the worker ends what is under way first
    worker = socket.socket(fileno=int(sys.argv[1]))
    said = Connection(worker)
    try:
        agent = HostAgent()
    except AgentFailed as error:
        _reply(said, False, str(error).encode())
        return
    _reply(said, True)
    worker.settimeout(None)
    mappings = Mappings()
    while True:
        told, fds, _, _ = socket.recv_fds(worker, frames.SIZE.size, 2)
        if not told:
            os._exit(0)  # whatever threads still wait for
        memory_fd, line_fd = fds
        line = Connection(socket.socket(fileno=line_fd))
        (size,) = frames.SIZE.unpack(told)
        threading.Thread(target=_carry, args=(agent, mappings, memory_fd, size, line), daemon=True).start()


if __name__ == "__main__":
    main()
