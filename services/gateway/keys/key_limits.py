"""What keys may still use, for the requests of this gateway: taken when one begins, and given back when it ends. The event loop's
alone; nothing is awaited.
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
_PURPOSE = b"rootstock-limits"  # 16 bytes at most

Refused = Callable[[str], None]  # told the limit's kind


class Admission:
    """One request that has begun. Holds its place until end()."""

    __slots__ = ("_budget", "_concurrent", "_limits", "_reserved", "_tokens")

    def __init__(self, limits: KeyLimits, budget: KeyBudget, concurrent: Share | None) -> None:
        self._limits = limits
        self._budget = budget
        self._concurrent = concurrent
        self._tokens: Share | None = None
        self._reserved = (0, 0.0)  # tokens, and when

    def reserve(self, tokens: int) -> None:
        """The most that the request may come to, prompt and answers. Once; raises ApiError 429."""
        self._reserved = (tokens, self._limits.clock())
        self._tokens = self._limits.reserve(self._budget, *self._reserved)

    def end(self, used_tokens: int) -> None:
        """used_tokens: what it has come to, of prompts and answers."""
        now = self._limits.clock()
        if self._concurrent is not None:
            self._concurrent.give_back(1, now, now)
            self._concurrent = None
        if self._tokens is not None:
            reserved, since = self._reserved
            self._tokens.settle(reserved, used_tokens, since, now)
            self._tokens = None


class KeyLimits:
    """refill: None without Redis. others: how many gateways there are as far as is known without it. refused: told the kind of
    every limit that turned a request away. clock: Unix seconds."""

    def __init__(
        self,
        table: KeyTable,
        redis_url: str,
        name: str,
        others: Callable[[], int],
        refused: Refused,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """name: this gateway's own, in letters and digits. Raises ValueError if the URL is none."""
        self.clock = clock
        self._budgets: dict[str, KeyBudget] = {}  # by the key's name
        self._by_digest: dict[str, KeyBudget] = {}
        self._others = others
        self._refused = refused
        self.refill = ShareRefill(ShareStore(redis_url, name), self._by_digest, clock) if redis_url else None
        self.set_table(table)

    def set_table(self, table: KeyTable) -> None:
        """Limits may have changed. Keys that are gone have none to keep; what runs of them ends as it would."""
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
        """Last seen, in Redis or else by discovery; at least 1."""
        seen = self.refill.gateways if self.refill is not None else 0
        return seen or max(1, self._others())

    def shares_are_up(self) -> bool | None:
        """Whether limits are kept over all gateways, or by each for its part. None: there is no Redis to keep them in."""
        return None if self.refill is None else self.refill.is_up

    def begin(self, key: str) -> Admission | None:
        """key: its name. None: it has no limits. Raises ApiError 429."""
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
        """Whose they are, if they are limited. Raises ApiError 429."""
        try:
            return budget.reserve(tokens, now, self.gateways)
        except OverLimit as over:
            raise self._error(over) from None
        finally:
            self._notice(budget)

    def headers(self, key: str) -> list[tuple[bytes, bytes]]:
        """OpenAI's, of what the key may still use."""
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
