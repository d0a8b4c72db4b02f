"""The part of NIXL's agent that workers use: registered host memory for remote readers, and reads of remote memory.

Making an agent loads the library. All descriptors are made from integers, never from pickled bytes of a remote side.
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
    """Raised if the library fails. The message states the fault."""


class NixlRead:
    """A read that one agent runs."""

    def __init__(self, agent: Any, handle: Any, state: str, lock: threading.RLock) -> None:
        self._agent, self._handle, self._state, self._lock = agent, handle, state, lock

    def is_done(self) -> bool:
        """Returns whether all bytes have arrived. Raises AgentFailed if the read has failed."""
        with self._lock, _translated("a read through NIXL has failed"):
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._handle)
        if self._state not in ("PROC", "DONE"):
            raise AgentFailed("a read through NIXL has failed")
        return self._state == "DONE"

    def end(self) -> None:
        """Releases the read. Aborts it if it still runs.

        Raises:
            AgentFailed: the read cannot be aborted; NIXL may still write to its target memory.
        """
        with self._lock, _translated("a read through NIXL cannot be ended"):
            self._handle.release()


class HostAgent:
    """A NIXL agent. Any thread may call it; a lock admits one call at a time."""

    def __init__(self) -> None:
        """Loads NIXL and creates an agent. Raises AgentFailed."""
        self._lock = threading.RLock()
        self._loaded: Counter[Any] = Counter()  # remote agents by name, with the number of their load() calls
        with _translated("NIXL cannot be loaded"):
            from nixl._api import nixl_agent, nixl_agent_config

            self._agent: Any = nixl_agent(secrets.token_hex(16), nixl_agent_config(backends=[BACKEND]))
        if BACKEND not in self._agent.backends:
            raise AgentFailed(f"NIXL has no {BACKEND}")

    def register(self, address: int, size: int) -> tuple[Any, bytes]:
        """Returns a registration, and the metadata with which a remote agent can read only these bytes. Raises AgentFailed."""
        with self._lock, _translated("NIXL cannot register memory"):
            registered = self._agent.register_memory([(address, size, 0, "")], HOST_MEMORY, [BACKEND])
            try:
                return registered, bytes(self._agent.get_partial_agent_metadata(registered, True, [BACKEND]))
            except BaseException:
                self._agent.deregister_memory(registered, [BACKEND])
                raise

    def forget(self, registered: Any) -> None:
        """Ends a registration, after which no remote agent can read the memory. Raises AgentFailed."""
        with self._lock, _translated("NIXL cannot deregister memory"):
            self._agent.deregister_memory(registered, [BACKEND])

    def load(self, metadata: bytes) -> Any:
        """Adds a remote agent and returns its name. The caller undoes each call by unload().

        Args:
            metadata: metadata of the remote agent's memory.

        Raises:
            AgentFailed: NIXL does not accept the metadata.
        """
        with self._lock, _translated("NIXL does not accept the metadata of a remote agent"):
            name = self._agent.add_remote_agent(metadata)
            self._loaded[name] += 1
            return name

    def unload(self, name: Any) -> None:
        """Removes a remote agent after the last of its load() calls has been undone. Raises AgentFailed."""
        with self._lock, _translated("NIXL cannot remove a remote agent"):
            self._loaded[name] -= 1
            if not self._loaded[name]:
                del self._loaded[name]
                self._agent.remove_remote_agent(name)

    def read(self, name: Any, remote: int, local: int, size: int) -> NixlRead:
        """Begins to copy `size` bytes from the address `remote` of a remote agent's memory to `local`. Raises AgentFailed."""
        with self._lock, _translated("NIXL cannot begin a read"):
            target, source = (
                self._agent.get_xfer_descs(np.array([[address, size, 0]], np.uint64), HOST_MEMORY) for address in (local, remote)
            )
            handle = self._agent.initialize_xfer("READ", target, source, name, backends=[BACKEND])
            return NixlRead(self._agent, handle, self._agent.transfer(handle), self._lock)


@contextmanager
def _translated(fault: str) -> Iterator[None]:
    """Turns all exceptions of the library, which have no common base, into AgentFailed. Messages begin with `fault`."""
    try:
        yield
    except Exception as error:
        raise AgentFailed(f"{fault}: {error or type(error).__name__}") from error
