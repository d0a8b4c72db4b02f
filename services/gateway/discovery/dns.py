"""Follows the addresses of a DNS name, such as the pods of a headless Service, by repeated look-ups."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Sequence

from rootstock_llm.services.gateway.discovery.endpoints import DnsTarget, Endpoints, join_address
from rootstock_llm.services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

# Before the first result, the pause is this number of seconds, doubled for every look-up so far, and at most `refresh_s`.
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0  # longest pause in seconds after failed look-ups, unless `refresh_s` is longer
# Number of empty results in a row after which the gateway drops the name's addresses. A single empty result may come from a DNS
# server that has just restarted and has not loaded its names.
EMPTY_RESULTS = 2

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(name: str, port: int) -> list[str]:
    """Returns the A and AAAA records of a name, as addresses without a port.

    The list is empty if the name does not exist or has no such records.

    Raises:
        OSError: The DNS servers do not respond.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return []
        raise
    return [str(address[0]) for _, _, _, _, address in found]


class DnsWatch:
    """Looks up one DNS name repeatedly, and reports its addresses."""

    def __init__(self, target: DnsTarget, refresh_s: float, lookup: Resolve, changed: Callable[[Endpoints], None]) -> None:
        """Makes the watch.

        Args:
            refresh_s: Pause between two look-ups, in seconds.
            changed: Called with the endpoints of each result, except for the first EMPTY_RESULTS - 1 empty results in a row.
        """
        self._target = target
        self._refresh_s = refresh_s
        self._lookup = lookup
        self._changed = changed
        self._has_result = False  # whether a result was accepted
        self.trouble = ""  # error of the last look-up; "" if it succeeded
        self._failures = 0  # number of failed look-ups in a row
        self._empty = 0  # number of empty results in a row

    async def run(self) -> None:
        while True:
            await self._look_up()
            await asyncio.sleep(self._pause_s() * random.uniform(0.9, 1.1))

    async def _look_up(self) -> None:
        name, port = self._target.name, self._target.port
        try:
            hosts = await self._lookup(name, port)
        except OSError as error:
            self._failures += 1
            self.trouble = str(error) or type(error).__name__
            level = logging.WARNING if self._failures == 1 else logging.DEBUG
            logger.log(
                level, "a DNS name cannot be looked up; its last addresses stay in use: %s", error, extra=fields(name_=name)
            )
            return
        if self._failures:
            logger.info("a DNS name can be looked up again", extra=fields(name_=name))
        self._failures, self.trouble = 0, ""
        self._empty = 0 if hosts else self._empty + 1
        if hosts or self._empty >= EMPTY_RESULTS:
            self._has_result = True
            self._changed({join_address(host, port): True for host in hosts})

    def _pause_s(self) -> float:
        tries = min(self._failures if self._has_result else self._failures + self._empty, 16)
        first, longest = (self._refresh_s, LONGEST_PAUSE_S) if self._has_result else (FIRST_PAUSE_S, self._refresh_s)
        return min(first * float(2**tries), max(longest, self._refresh_s))
