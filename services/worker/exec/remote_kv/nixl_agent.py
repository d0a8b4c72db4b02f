"""The functions of a NIXL agent that workers use: it registers host memory for remote readers, and reads remote memory.

A HostAgent loads the library when it is constructed. Descriptors are made from integers, never from pickled bytes of a remote
side.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

BACKEND, HOST_MEMORY = "UCX", "DRAM"


class AgentFailed(Exception):
    """Raised if NIXL fails. The message states the fault."""


class NixlRead:
    """A running read of remote memory. The creator must call end()."""

    def __init__(self, agent: Any, handle: Any, state: str, lock: threading.RLock) -> None:
        self._agent, self._handle, self._state, self._lock = agent, handle, state, lock

    def is_done(self) -> bool:
        """Returns whether all bytes have arrived. Raises AgentFailed if the read has failed."""
        with self._lock, _translated("a read through NIXL has failed"):
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._handle)
        if self._state not in ("PROC", "DONE"):
            raise AgentFailed(f"a read through NIXL has ended in the state {self._state}")
        return self._state == "DONE"

    def end(self) -> None:
        """Frees the read, and aborts it if it still runs.

        Raises:
            AgentFailed: the read cannot be aborted. NIXL may still write to the target memory.
        """
        with self._lock, _translated("a read through NIXL cannot be ended"):
            self._handle.release()


class HostAgent:
    """A NIXL agent. Any thread may call it. A lock lets one call run at a time."""

    def __init__(self) -> None:
        """Loads NIXL and creates an agent. Raises AgentFailed."""
        self._lock = threading.RLock()
        self._loaded: Counter[Any] = Counter()  # number of load() calls without unload(), by name of the remote agent
        with _translated("NIXL cannot be loaded"):
            from nixl._api import nixl_agent, nixl_agent_config

            self._agent: Any = nixl_agent(secrets.token_hex(16), nixl_agent_config(backends=[BACKEND]))
        if BACKEND not in self._agent.backends:
            raise AgentFailed(f"NIXL has no back end {BACKEND}; install NIXL with it")

    def register(self, address: int, size: int) -> tuple[Any, bytes]:
        """Registers memory. Returns the registration, and the metadata that a remote agent needs to read these bytes.

        Raises AgentFailed.
        """
        with self._lock, _translated("NIXL cannot register memory"):
            registered = self._agent.register_memory([(address, size, 0, "")], HOST_MEMORY, [BACKEND])
            try:
                return registered, bytes(self._agent.get_partial_agent_metadata(registered, True, [BACKEND]))
            except BaseException:
                self._agent.deregister_memory(registered, [BACKEND])
                raise

    def deregister(self, registered: Any) -> None:
        """Ends a registration. Raises AgentFailed.

        Afterwards, no remote agent can read the memory on a network with remote keys. TCP has no remote keys.
        """
        with self._lock, _translated("NIXL cannot deregister memory"):
            self._agent.deregister_memory(registered, [BACKEND])

    def load(self, metadata: bytes) -> Any:
        """Adds a remote agent and returns its name. The caller must call unload() once per call.

        Args:
            metadata: metadata that the remote agent's register() returned.

        Raises:
            AgentFailed: NIXL does not accept the metadata.
        """
        with self._lock, _translated("NIXL does not accept the metadata of a remote agent"):
            name = self._agent.add_remote_agent(metadata)
            self._loaded[name] += 1
            return name

    def unload(self, name: Any) -> None:
        """Undoes one load(). The last unload() removes the remote agent. Raises AgentFailed."""
        with self._lock, _translated("NIXL cannot remove a remote agent"):
            self._loaded[name] -= 1
            if not self._loaded[name]:
                del self._loaded[name]
                self._agent.remove_remote_agent(name)

    def read(self, name: Any, remote: int, local: int, size: int) -> NixlRead:
        """Begins a read of `size` bytes from the address `remote` of a remote agent to the address `local`.

        Raises AgentFailed.
        """
        with self._lock, _translated("NIXL cannot begin a read"):
            target, source = (
                self._agent.get_xfer_descs(np.array([[address, size, 0]], np.uint64), HOST_MEMORY) for address in (local, remote)
            )
            handle = self._agent.initialize_xfer("READ", target, source, name, backends=[BACKEND])
            return NixlRead(self._agent, handle, self._agent.transfer(handle), self._lock)


@contextmanager
def _translated(fault: str) -> Iterator[None]:
    """Turns every exception into AgentFailed, because NIXL's have no common base class. The message begins with `fault`."""
    try:
        yield
    except Exception as error:
        raise AgentFailed(f"{fault}: {error or type(error).__name__}") from error
