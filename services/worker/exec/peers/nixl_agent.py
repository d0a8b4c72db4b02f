"""NIXL's agent, as far as it is used here: host memory of this process, which others read, and reads of others' memory.

Loads the library when it is made. Descriptors are made of integers, and never of what others have pickled.
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
    """The library does not do it; in a sentence."""


class Reading:
    """A read that has begun. Of the agent that began it."""

    def __init__(self, agent: Any, handle: Any, state: str, lock: threading.RLock) -> None:
        self._agent, self._handle, self._state, self._lock = agent, handle, state, lock

    def is_done(self) -> bool:
        """Raises AgentFailed where nothing comes any more."""
        with self._lock, _saying("a read through NIXL has failed"):
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._handle)
        if self._state not in ("PROC", "DONE"):
            raise AgentFailed("a read through NIXL has failed")
        return self._state == "DONE"

    def end(self) -> None:
        """Gives it back; one that is under way is broken off. Raises AgentFailed where that cannot be: then memory that it is
        read to may still be written."""
        with self._lock, _saying("a read through NIXL cannot be ended"):
            self._handle.release()


class HostAgent:
    """Called on any thread, by one at a time, which it sees to itself."""

    def __init__(self) -> None:
        """Raises AgentFailed."""
        self._lock = threading.RLock()
        self._loaded: Counter[Any] = Counter()  # agents of others, by name, as often as they were loaded
        with _saying("NIXL cannot be loaded"):
            from nixl._api import nixl_agent, nixl_agent_config

            self._agent: Any = nixl_agent(secrets.token_hex(16), nixl_agent_config(backends=[BACKEND]))
        if BACKEND not in self._agent.backends:
            raise AgentFailed(f"NIXL has no {BACKEND}")

    def register(self, address: int, size: int) -> tuple[Any, bytes]:
        """(what forgets it, what others have to know to read these bytes and no others). Raises AgentFailed."""
        with self._lock, _saying("NIXL does not take memory"):
            registered = self._agent.register_memory([(address, size, 0, "")], HOST_MEMORY, [BACKEND])
            try:
                return registered, bytes(self._agent.get_partial_agent_metadata(registered, True, [BACKEND]))
            except BaseException:
                self._agent.deregister_memory(registered, [BACKEND])
                raise

    def forget(self, registered: Any) -> None:
        """Nobody reads it from here on. Raises AgentFailed."""
        with self._lock, _saying("NIXL does not give memory back"):
            self._agent.deregister_memory(registered, [BACKEND])

    def load(self, metadata: bytes) -> Any:
        """Another agent's name; `unload` follows. metadata: of memory of it. Raises AgentFailed."""
        with self._lock, _saying("NIXL does not take what describes another's memory"):
            name = self._agent.add_remote_agent(metadata)
            self._loaded[name] += 1
            return name

    def unload(self, name: Any) -> None:
        """Raises AgentFailed."""
        with self._lock, _saying("NIXL does not let go of another agent"):
            self._loaded[name] -= 1
            if not self._loaded[name]:
                del self._loaded[name]
                self._agent.remove_remote_agent(name)

    def read(self, name: Any, remote: int, local: int, size: int) -> Reading:
        """Begins to copy `size` bytes at the address `remote` of another's memory to `local`. Raises AgentFailed."""
        with self._lock, _saying("NIXL does not read"):
            here, there = (
                self._agent.get_xfer_descs(np.array([[address, size, 0]], np.uint64), HOST_MEMORY) for address in (local, remote)
            )
            handle = self._agent.initialize_xfer("READ", here, there, name, backends=[BACKEND])
            return Reading(self._agent, handle, self._agent.transfer(handle), self._lock)


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Raises AgentFailed for whatever the library raises, which has no common base."""
    try:
        yield
    except Exception as error:
        raise AgentFailed(f"{what}: {error or type(error).__name__}") from error
