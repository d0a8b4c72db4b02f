"""Exchanges this gateway's shares of all limits with Redis in a background task.

Each turn is one round trip for all API keys that have something to report. Requests never wait for Redis.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from redis.exceptions import RedisError

from services.gateway.keys.key_budget import KeyBudget
from services.gateway.keys.share import ShareReport
from services.gateway.keys.share_store import DEAD_S, Exchanged

logger = logging.getLogger(__name__)

TURN_S = 0.1  # seconds between two turns while there is something to report
SOON_S = 0.02  # seconds to the next turn if a share runs low
IDLE_S = 1.0  # seconds between two turns otherwise; a turn is the gateway's sign of life
RETRY_S = 0.5  # seconds between two turns while Redis is unreachable
AGAIN_S = 30.0  # seconds after which an unchanged API key is reported again, so that its record in Redis does not expire
KEYS_A_TURN = 1000  # API keys per turn


class Store(Protocol):
    async def exchange(self, now: float, reports: Sequence[tuple[str, Sequence[ShareReport]]]) -> Exchanged: ...

    async def close(self) -> None: ...


class ShareRefill:
    """The background task. It owns the connection to Redis and writes the shares of the budgets."""

    def __init__(self, store: Store, budgets: Mapping[str, KeyBudget], clock: Callable[[], float]) -> None:
        """Makes the task.

        Args:
            budgets: Budgets of the API keys with limits, by digest.
            clock: Returns Unix seconds.
        """
        self._store = store
        self._budgets = budgets
        self._clock = clock
        self._called: set[str] = set()  # digests of API keys on which other gateways need reports
        self._low = asyncio.Event()
        self._waiting = 0  # API keys that did not fit into the last turn
        self._seen = 0  # number of gateways
        self._fewer_since: float | None = None  # time since which Redis lists fewer gateways than `_seen`
        self.is_up = False

    @property
    def gateways(self) -> int:
        """Number of gateways last seen, this one included; 0 if Redis was never reached."""
        return self._seen

    def runs_low(self) -> None:
        """Requests an early turn, because a share runs low."""
        self._low.set()

    async def run(self) -> None:
        """Exchanges shares until cancelled, then closes the connection."""
        try:
            while True:
                await self.turn()
                await self._pause()
        finally:
            await self._store.close()

    async def turn(self) -> None:
        """Exchanges the shares of up to KEYS_A_TURN API keys. If Redis is unreachable, all shares continue without it."""
        now = self._clock()
        self._low.clear()
        due = list(self._due(now))
        self._waiting = max(0, len(due) - KEYS_A_TURN)
        due = due[:KEYS_A_TURN]
        gateways = max(1, self._seen)
        reports = [(budget.digest, budget.report(now, gateways)) for budget in due]
        try:
            exchanged = await self._store.exchange(now, reports)
        except (RedisError, OSError) as error:
            self._down(error)
            return
        if not self.is_up:
            logger.info("gateways share the limits of API keys in Redis")
            self.is_up = True
        self._count(exchanged.gateways, now)
        self._called = set(exchanged.in_need)
        now = self._clock()
        for budget, (settled, answers) in zip(due, exchanged.answers, strict=True):
            budget.answered(answers, settled, now)

    def _due(self, now: float) -> Iterator[KeyBudget]:
        """Yields the budgets to report. Budgets with news, or on which other gateways need reports, come first."""
        found = self._budgets.values()
        late: list[KeyBudget] = []
        for budget in found:
            if budget.dirty or budget.digest in self._called:
                yield budget
            elif now - budget.reported_at >= AGAIN_S:
                late.append(budget)
        yield from late

    def _count(self, gateways: int, now: float) -> None:
        """Updates the number of gateways.

        If a gateway has joined, all shares yield a part to it. A smaller number counts only after DEAD_S, because a restarted
        Redis lists only the gateways that have reported since.
        """
        if gateways > self._seen:
            for budget in self._budgets.values():
                budget.someone_came()
        if gateways >= self._seen:
            self._seen, self._fewer_since = gateways, None
        elif self._fewer_since is None:
            self._fewer_since = now
        elif now - self._fewer_since >= DEAD_S:
            self._seen, self._fewer_since = gateways, None

    def _down(self, error: Exception) -> None:
        if self.is_up:
            logger.warning("redis is unreachable, each gateway applies its part of the limits of API keys: %s", error)
        self.is_up = False
        now = self._clock()
        for budget in self._budgets.values():
            budget.go_alone(now)

    async def _pause(self) -> None:
        if not self.is_up:
            await asyncio.sleep(RETRY_S)
            return
        await asyncio.sleep(SOON_S)
        if self._waiting:
            return
        busy = self._called or any(budget.dirty for budget in self._budgets.values())
        try:
            async with asyncio.timeout((TURN_S if busy else IDLE_S) - SOON_S):
                await self._low.wait()
        except TimeoutError:
            return
