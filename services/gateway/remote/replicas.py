"""Keeps one replica object and its task for each address of a service, as discovery finds them, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar


class Replica(Protocol):
    """A client of one replica of a service. Replicas sets `ready` and `retiring`."""

    address: str
    ready: bool  # the replica may get new work
    retiring: bool  # discovery has dropped the address

    @property
    def busy(self) -> bool:
        """Whether the replica has work that must end before the replica is closed."""

    async def run(self) -> None:
        """Keeps the connection up until cancelled."""


R = TypeVar("R", bound=Replica)


class Replicas(Generic[R]):
    """The replicas of one service.

    If discovery drops an address, the replica of this address gets no new work. When its last work ends, the owner of the work
    calls retire(), which closes the replica.
    """

    def __init__(self, make: Callable[[str], R]) -> None:
        """Makes an empty set. `make` creates the replica of an address."""
        self.by_address: dict[str, R] = {}
        self._make = make
        self._tasks: dict[R, asyncio.Task[None]] = {}  # tasks that run the replicas; empty before run()
        self._group: asyncio.TaskGroup | None = None  # set while run() runs

    def set_endpoints(self, endpoints: Mapping[str, bool]) -> None:
        """Applies new endpoints, a map of address to ready. Creates missing replicas, and retires replicas of other addresses."""
        for address, ready in endpoints.items():
            replica = self.by_address.get(address)
            if replica is None:
                replica = self.by_address[address] = self._make(address)
                self._start(replica)
            replica.ready, replica.retiring = ready, False
        for replica in list(self.by_address.values()):
            if replica.address not in endpoints:
                replica.ready, replica.retiring = False, True
                self.retire(replica)

    def retire(self, replica: R) -> None:
        """Closes a replica if it is retiring and not busy. Idempotent; may be called in any state."""
        if not replica.retiring or replica.busy:
            return
        if self.by_address.get(replica.address) is replica:
            del self.by_address[replica.address]
        task = self._tasks.pop(replica, None)
        if task is not None and not task.cancelling():
            task.cancel()

    async def run(self) -> None:
        """Runs all replicas until cancelled. May be called once."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for replica in self.by_address.values():
                self._start(replica)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None

    def _start(self, replica: R) -> None:
        if self._group is not None:
            self._tasks[replica] = task = self._group.create_task(replica.run())
            task.add_done_callback(lambda _: self._tasks.pop(replica, None))
