"""Checks and charges the limits of API keys for the requests of this gateway.

A request is charged when it begins, and unused amounts are given back when it ends. Everything runs on the event loop and awaits
nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from services.gateway.keys.key_budget import KeyBudget, OverLimit
from services.gateway.keys.key_table import KeyTable
from services.gateway.keys.share import Share
from services.gateway.keys.share_refill import ShareRefill
from services.gateway.keys.share_store import ShareStore
from services.gateway.request.errors import ApiError

_DIGEST_BYTES = 16
_PURPOSE = b"rootstock-limits"  # at most 16 bytes

Refused = Callable[[str], None]  # gets the kind of the limit


class Admission:
    """A running request of an API key with limits. It occupies a concurrent request until end()."""

    __slots__ = ("_budget", "_concurrent", "_limits", "_reserved", "_tokens")

    def __init__(self, limits: KeyLimits, budget: KeyBudget, concurrent: Share | None) -> None:
        self._limits = limits
        self._budget = budget
        self._concurrent = concurrent
        self._tokens: Share | None = None
        self._reserved = (0, 0.0)  # tokens; Unix seconds of the reservation

    def reserve(self, tokens: int) -> None:
        """Reserves the largest number of tokens that the request may use, prompts and completions together.

        May be called once. Raises ApiError 429 if the limit is reached.
        """
        self._reserved = (tokens, self._limits.clock())
        self._tokens = self._limits.reserve(self._budget, *self._reserved)

    def end(self, used_tokens: int) -> None:
        """Ends the request and settles its reservation. `used_tokens` counts prompts and completions."""
        now = self._limits.clock()
        if self._concurrent is not None:
            self._concurrent.give_back(1, now, now)
            self._concurrent = None
        if self._tokens is not None:
            reserved, since = self._reserved
            self._tokens.settle(reserved, used_tokens, since, now)
            self._tokens = None


class KeyLimits:
    """The limits of all API keys at this gateway."""

    def __init__(
        self,
        table: KeyTable,
        redis_url: str,
        name: str,
        others: Callable[[], int],
        refused: Refused,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Makes the limits.

        Args:
            redis_url: Redis in which gateways share the limits; "" for none, and `refill` is None.
            name: Unique name of this gateway, of letters and digits.
            others: Returns the number of gateways that discovery finds.
            refused: Called with the kind of the limit for every refused request.
            clock: Returns Unix seconds.

        Raises:
            ValueError: The URL is invalid.
        """
        self.clock = clock
        self._budgets: dict[str, KeyBudget] = {}  # by name of the API key
        self._by_digest: dict[str, KeyBudget] = {}
        self._others = others
        self._refused = refused
        self.refill = ShareRefill(ShareStore(redis_url, name), self._by_digest, clock) if redis_url else None
        self.set_table(table)

    def set_table(self, table: KeyTable) -> None:
        """Applies the limits of a new table. Running requests of removed API keys end normally."""
        limited = {key.name: key for key in table if key.is_limited}
        for name in self._budgets.keys() - limited.keys():
            del self._by_digest[self._budgets.pop(name).digest]
        for name, key in limited.items():
            if name in self._budgets:
                self._budgets[name].set_key(key)
            else:
                budget = self._budgets[name] = KeyBudget(key, _digest(name))
                self._by_digest[budget.digest] = budget

    @property
    def gateways(self) -> int:
        """Number of gateways as last seen in Redis, or otherwise by discovery; at least 1."""
        seen = self.refill.gateways if self.refill is not None else 0
        return seen or max(1, self._others())

    def shares_are_up(self) -> bool | None:
        """Returns whether all gateways share the limits in Redis now; otherwise each gateway applies its part.

        None if no Redis is configured.
        """
        return None if self.refill is None else self.refill.is_up

    def begin(self, key: str) -> Admission | None:
        """Charges the start of a request of the API key with this name.

        Returns:
            None if the API key has no limits.

        Raises:
            ApiError: 429, a limit is reached.
        """
        budget = self._budgets.get(key)
        if budget is None:
            return None
        try:
            return Admission(self, budget, budget.begin(self.clock(), self.gateways))
        except OverLimit as over:
            raise self._error(over) from None
        finally:
            self._notice(budget)

    def reserve(self, budget: KeyBudget, tokens: int, now: float) -> Share | None:
        """Charges tokens, as KeyBudget.reserve() does. Raises ApiError 429."""
        try:
            return budget.reserve(tokens, now, self.gateways)
        except OverLimit as over:
            raise self._error(over) from None
        finally:
            self._notice(budget)

    def headers(self, key: str) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's x-ratelimit headers for the API key with this name."""
        budget = self._budgets.get(key)
        return [] if budget is None else budget.headers(self.clock())

    def _notice(self, budget: KeyBudget) -> None:
        if self.refill is not None and budget.runs_low:
            self.refill.runs_low()

    def _error(self, over: OverLimit) -> ApiError:
        self._refused(over.kind)
        return ApiError(429, over.message, code="rate_limit_exceeded", retry_after_s=over.retry_s)


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES, person=_PURPOSE).hexdigest()
