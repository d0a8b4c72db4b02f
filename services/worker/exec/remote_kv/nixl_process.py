"""Starts the carrier (nixl_carrier.py), the process that runs NIXL for this worker, and shares memory areas with it.

Failures of NIXL are raised as OSError. The pages then go over TCP. A carrier that has ended is not started again.
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

import rootstock_llm
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.worker.exec.remote_kv import nixl_frames as frames
from rootstock_llm.services.worker.exec.remote_kv.connection import Connection
from rootstock_llm.services.worker.exec.remote_kv.nixl_frames import Order, OrderKind

logger = logging.getLogger(__name__)
ROOT = Path(rootstock_llm.__file__).resolve().parents[1]  # the folder that contains rootstock_llm
# Prefixes of the environment variables that the carrier inherits. No variable with such a prefix is a secret of the worker.
PASSED_ON = ("UCX_", "NIXL_", "LD_LIBRARY_PATH", "PATH")
START_S = 60.0  # seconds; limit for loading NIXL
END_S = 1.0  # seconds; limit for ending the use of an area, and for the end of the process
REPLY_S = 1.0  # seconds; a reply must arrive at most this long after its order's deadline, which the carrier enforces


class NoAreaLeft(OSError):
    """Raised if MAX_STAGING_AREAS memory areas are in use or failed."""


class SharedMemory:
    """Memory that is mapped into this process and into the carrier, at different addresses."""

    def __init__(self, size: int) -> None:
        """Allocates the memory. Raises OSError."""
        self.fd = os.memfd_create("kv-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self.data: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        except (OSError, ValueError):
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Closes the descriptor. Existing mappings stay."""
        os.close(self.fd)


class CarriedArea:
    """A memory area that remote workers read through NIXL, or that receives what this worker reads. Belongs to one thread.

    close() fills the memory with zeros and returns it to the Carrier.
    """

    def __init__(
        self, memory: SharedMemory, line: Connection, return_memory: Callable[[SharedMemory], None], deadline: float
    ) -> None:
        """Waits until the carrier has registered the memory.

        Args:
            memory: memory that the carrier has also mapped.
            line: connection to the carrier's thread for this memory.
            return_memory: called with the memory when neither the carrier nor a remote agent uses it any more.
            deadline: end of the wait.

        Raises:
            OSError: the carrier has refused the memory, or has ended.
        """
        self._memory, self._line, self._return_memory = memory, line, return_memory
        reply = frames.receive_reply(line, deadline)
        (self.address,) = frames.ADDRESS.unpack_from(reply)  # address of the first byte in the carrier
        self.metadata = reply[frames.ADDRESS.size :]  # metadata with which a remote agent can read the memory
        self.data = memory.data  # uint8[n]

    def load(self, metadata: bytes, deadline: float) -> None:
        """Sets the remote memory from which read() reads. Raises OSError.

        Args:
            metadata: metadata of a CarriedArea of the remote worker.
            deadline: end of the call.
        """
        self._order(Order(OrderKind.LOAD, metadata), deadline)

    def read(self, address: int, size: int, deadline: float) -> None:
        """Reads `size` bytes from an address in the remote memory to the beginning of the area.

        Raises OSError or TimeoutError.
        """
        self._order(Order(OrderKind.READ, address=address, size=size, seconds=deadline - time.monotonic()), deadline)

    def close(self) -> None:
        """Fills the memory with zeros and returns it to the Carrier.

        If the carrier process does not confirm within END_S + REPLY_S that the memory is unused, the memory is not used again.
        """
        self.wipe()
        try:
            self._order(Order(OrderKind.END), time.monotonic() + END_S)
        except OSError as error:
            logger.info("NIXL did not confirm that a memory area is unused", extra=fields(error=str(error)))
            self._memory.close()
        else:
            self.wipe()  # an aborted read may have written to the memory
            self._return_memory(self._memory)
        finally:
            self._line.close()

    def wipe(self) -> None:
        """Fills the memory with zeros."""
        self.data[:] = 0

    def _order(self, order: Order, deadline: float) -> None:
        frames.send_order(self._line, order, deadline)
        frames.receive_reply(self._line, deadline + REPLY_S)


class Carrier:
    """The carrier process of this worker, from its start to its end. Any thread may call it."""

    def __init__(self) -> None:
        """Starts the process, and waits until it has loaded NIXL. Raises OSError if NIXL cannot be loaded."""
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        own.set_inheritable(False)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rootstock_llm.services.worker.exec.remote_kv.nixl_carrier", str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                env=_environment(),
            )
        self._socket = own
        self._lock = threading.Lock()  # guards sends on the socket, and the fields below
        self._free: list[SharedMemory] = []  # memory for areas that is not in use; all of one size
        self._num_allocated = 0  # number of SharedMemory objects that were allocated
        self._is_closed = False
        try:
            frames.receive_reply(Connection(own), time.monotonic() + START_S)
        except OSError:
            self.close()
            raise

    def area(self, size: int, deadline: float) -> CarriedArea:
        """Returns a memory area, which the caller must close.

        Args:
            size: bytes; the same in every call.
            deadline: end of the wait for the carrier process.

        Raises:
            NoAreaLeft: MAX_STAGING_AREAS areas are in use or failed.
            OSError: the carrier process has refused the memory, or has ended.
        """
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        line = Connection(own)
        try:
            with its:
                memory = self._take_memory(size, its)
            try:
                return CarriedArea(memory, line, self._return_memory, deadline)
            except frames.CarrierRefuses:  # after a refusal, the carrier does not use the memory
                self._return_memory(memory)
                raise
            except BaseException:
                memory.close()
                raise
        except BaseException:
            line.close()
            raise

    def close(self) -> None:
        """Ends the process. Afterwards, no call may follow, except close() of areas."""
        with self._lock:
            self._is_closed = True
            self._socket.close()  # the process then ends by itself
            while self._free:
                self._free.pop().close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _return_memory(self, memory: SharedMemory) -> None:
        with self._lock:
            if self._is_closed:
                memory.close()
            else:
                self._free.append(memory)

    def _take_memory(self, size: int, line: socket.socket) -> SharedMemory:
        """Returns free memory, or allocates memory. Sends its descriptor and the socket `line` to the carrier process.

        Raises:
            NoAreaLeft: MAX_STAGING_AREAS areas are in use or failed.
            OSError: the carrier process has ended.
        """
        with self._lock:
            if self._is_closed:
                raise OSError("the NIXL carrier is closed")
            if self._free:
                memory = self._free.pop()
            elif self._num_allocated < limits.MAX_STAGING_AREAS:
                memory = SharedMemory(size)
                self._num_allocated += 1
            else:
                raise NoAreaLeft(f"all {limits.MAX_STAGING_AREAS} staging areas for NIXL are in use")
            assert len(memory.data) == size, "all areas have the same size"
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
