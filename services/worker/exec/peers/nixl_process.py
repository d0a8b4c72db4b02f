"""A worker's side of its carrier, the process that has NIXL in it: starts it, and shares memory with it.

What goes wrong with NIXL is an OSError here, and pages go over TCP. A carrier that has ended is not started again.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.shared import limits
from services.shared.observe.log_fields import fields
from services.worker.exec.peers import nixl_frames as frames
from services.worker.exec.peers.connection import Connection
from services.worker.exec.peers.nixl_frames import Order, OrderKind

logger = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[4]  # the folder that holds `services`
PASSED_ON = ("UCX_", "NIXL_", "LD_LIBRARY_PATH", "PATH")  # beginnings of names; no secrets of the worker's
START_S = 60.0
END_S = 1.0
REPLY_S = 1.0  # beyond a deadline that the carrier keeps itself


class NoAreaLeft(OSError):
    """As much memory is shared as may be."""


class SharedMemory:
    """Of this process and its carrier, at one address in each."""

    def __init__(self, size: int) -> None:
        """Raises OSError."""
        self.fd = os.memfd_create("kv-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self.data: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        except (OSError, ValueError):
            os.close(self.fd)
            raise

    def close(self) -> None:
        """It is given to nobody any more; who has it keeps it."""
        os.close(self.fd)


class CarriedArea:
    """Memory that others read through NIXL, or that is read to. Of one thread; `close` gives it back, with nothing in it.

    data: uint8[n]. address: of its first byte, in the carrier. metadata: what others have to know to read it."""

    def __init__(
        self, memory: SharedMemory, line: Connection, take_back: Callable[[SharedMemory], None], deadline: float
    ) -> None:
        """take_back: is given the memory when nobody else has to do with it any more. Raises OSError."""
        self._memory, self._line, self._take_back = memory, line, take_back
        told = frames.receive_reply(line, deadline)
        (self.address,) = frames.ADDRESS.unpack_from(told)
        self.metadata = told[frames.ADDRESS.size :]
        self.data = memory.data

    def load(self, metadata: bytes, deadline: float) -> None:
        """Of another's memory, to be read from here on. Raises OSError."""
        self._order(Order(OrderKind.LOAD, metadata), deadline)

    def read(self, address: int, size: int, deadline: float) -> None:
        """Fills the first `size` bytes with those at the address of the other's memory. Raises OSError; TimeoutError."""
        self._order(Order(OrderKind.READ, address=address, size=size, seconds=deadline - time.monotonic()), deadline)

    def close(self) -> None:
        """Where the carrier does not say in time that nobody has to do with it any more, nobody gets this memory again."""
        self.wipe()
        try:
            self._order(Order(OrderKind.END), time.monotonic() + END_S)
        except OSError as error:
            logger.info("memory is not given back by NIXL", extra=fields(error=str(error)))
            self._memory.close()
        else:
            self.wipe()  # of what a read wrote before it was broken off
            self._take_back(self._memory)
        finally:
            self._line.close()

    def wipe(self) -> None:
        self.data[:] = 0

    def _order(self, order: Order, deadline: float) -> None:
        frames.send_order(self._line, order, deadline)
        frames.receive_reply(self._line, deadline + REPLY_S)


class Carrier:
    """The process, from its start on. Called on any thread."""

    def __init__(self) -> None:
        """Raises OSError: NIXL cannot be loaded, in a sentence."""
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        own.set_inheritable(False)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.worker.exec.peers.nixl_carrier", str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                env=_environment(),
            )
        self._socket = own
        self._lock = threading.Lock()  # of the socket's sending side, and of what follows
        self._free: list[SharedMemory] = []  # all of one size
        self._made = 0
        self._is_closed = False
        try:
            frames.receive_reply(Connection(own), time.monotonic() + START_S)
        except OSError:
            self.close()
            raise

    def area(self, size: int, deadline: float) -> CarriedArea:
        """size: bytes, the same at every call. Raises OSError; NoAreaLeft."""
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        line = Connection(own)
        try:
            with its:
                memory = self._give(size, its)
            try:
                return CarriedArea(memory, line, self._take_back, deadline)
            except frames.CarrierRefuses:  # so that nobody has to do with it
                self._take_back(memory)
                raise
            except BaseException:
                memory.close()
                raise
        except BaseException:
            line.close()
            raise

    def close(self) -> None:
        """Ends the process. No other call follows but those of areas."""
        with self._lock:
            self._is_closed = True
            self._socket.close()  # by which it ends itself
            while self._free:
                self._free.pop().close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _take_back(self, memory: SharedMemory) -> None:
        with self._lock:
            if self._is_closed:
                memory.close()
            else:
                self._free.append(memory)

    def _give(self, size: int, line: socket.socket) -> SharedMemory:
        """Raises OSError; NoAreaLeft."""
        with self._lock:
            if self._is_closed:
                raise OSError("nothing goes through NIXL any more")
            if self._free:
                memory = self._free.pop()
            elif self._made < limits.MAX_STAGING_AREAS:
                memory = SharedMemory(size)
                self._made += 1
            else:
                raise NoAreaLeft(f"{limits.MAX_STAGING_AREAS} connections have memory of NIXL's already, which are the most")
            assert len(memory.data) == size, "all areas have one size"
            try:
                socket.send_fds(self._socket, [frames.SIZE.pack(size)], [memory.fd, line.fileno()])
            except OSError:
                self._free.append(memory)
                raise
            return memory


def _environment() -> dict[str, str]:
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {"NIXL_LOG_LEVEL": "WARN", **passed, "PYTHONPATH": path}
