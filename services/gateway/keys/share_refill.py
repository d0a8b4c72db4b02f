"""Keeps this gateway's shares of all keys' limits, in the background: one round trip a turn for all keys of which there is
something to say. Whether Redis is there or not, requests never wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from redis.exceptions import RedisError

from services.gateway.keys.key_budget import KeyBudget
from services.gateway.keys.share import Report
from services.gateway.keys.share_store import DEAD_S, Exchanged

logger = logging.getLogger(__name__)

TURN_S = 0.1  # between two turns while there is something to say
SOON_S = 0.02  # where a share runs low
IDLE_S = 1.0  # a gateway's sign of life
RETRY_S = 0.5  # while Redis is away
AGAIN_S = 30.0  # a key of which there is nothing new is reported of, lest it is forgotten
KEYS_A_TURN = 1000


class Store(Protocol):
    async def exchange(self, now: float, reports: Sequence[tuple[str, Sequence[Report]]]) -> Exchanged: ...

    async def close(self) -> None: ...


class ShareRefill:
    """budgets: of the keys that are limited, by digest. clock: Unix seconds."""

    def __init__(self, store: Store, budgets: Mapping[str, KeyBudget], clock: Callable[[], float]) -> None:
        self._store = store
        self._budgets = budgets
        self._clock = clock
        self._called: set[str] = set()  # keys that others need a word of
        self._low = asyncio.Event()
        self._waiting = 0  # keys that did not fit the last turn
        self._seen = 0
        self._fewer_since: float | None = None
        self.is_up = False

    @property
    def gateways(self) -> int:
        """Last seen, this one among them; 0 if Redis has never been there."""
        return self._seen

    def runs_low(self) -> None:
        """A turn comes soon."""
        self._low.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self.turn()
                await self._pause()
        finally:
            await self._store.close()

    async def turn(self) -> None:
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
            logger.info("shares of API keys' limits are kept in Redis")
            self.is_up = True
        self._count(exchanged.gateways, now)
        self._called = set(exchanged.in_need)
        now = self._clock()
        for budget, (settled, answers) in zip(due, exchanged.answers, strict=True):
            budget.answered(answers, settled, now)

    def _due(self, now: float) -> Iterator[KeyBudget]:
        """Those in need first, or of which there is news."""
        found = self._budgets.values()
        late: list[KeyBudget] = []
        for budget in found:
            if budget.dirty or budget.digest in self._called:
                yield budget
            elif now - budget.reported_at >= AGAIN_S:
                late.append(budget)
        yield from late

    def _count(self, gateways: int, now: float) -> None:
        """Who has come gets its part. Fewer count once they have been fewer for so long that the others would have been heard of:
        Redis may be new."""
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
            logger.warning("shares of API keys' limits: Redis is away, each gateway keeps to its part: %s", error)
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
