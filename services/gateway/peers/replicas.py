"""The replicas of one service as discovery names them: one object for each address, and its task. Everything runs on the event
loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar


class Replica(Protocol):
    """ready: it may be given new work. retiring: discovery does not know its address any more. Both are written by Replicas."""

    address: str
    ready: bool
    retiring: bool

    @property
    def busy(self) -> bool:
        """It has work that may end before it does."""

    async def run(self) -> None:
        """Keeps it connected, until cancelled."""


R = TypeVar("R", bound=Replica)


class Replicas(Generic[R]):
    """A replica lives as long as its address is known. One whose address has gone gets nothing new, and is closed when it is
    not busy any more: whoever ends its work calls retire()."""

    def __init__(self, make: Callable[[str], R]) -> None:
        """make: a replica for an address."""
        self.by_address: dict[str, R] = {}
        self._make = make
        self._tasks: dict[R, asyncio.Task[None]] = {}  # while run() runs
        self._group: asyncio.TaskGroup | None = None  # while run() runs

    def set_endpoints(self, endpoints: Mapping[str, bool]) -> None:
        """endpoints: address → ready."""
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
        """Closes it if nothing keeps it. Legal at any time, any number of times."""
        if not replica.retiring or replica.busy:
            return
        if self.by_address.get(replica.address) is replica:
            del self.by_address[replica.address]
        task = self._tasks.pop(replica, None)
        if task is not None and not task.cancelling():
            task.cancel()

    async def run(self) -> None:
        """Runs each, until cancelled. Once."""
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
