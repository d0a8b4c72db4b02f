"""The API keys of a gateway: authentication, limits and usage metrics. All code runs on the event loop.

A request counts against the limits of its API key when it begins. When it ends, unused amounts are given back. Neither step
waits for I/O.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rootstock_llm.services.gateway.generation.errors import ApiError, key_not_here
from rootstock_llm.services.gateway.generation.origin import NOBODY, Caller
from rootstock_llm.services.gateway.keys.key_budget import KeyBudget, OverLimit
from rootstock_llm.services.gateway.keys.key_table import ApiKey, KeyFile, KeyShares, KeyTable, digest_of, time_of
from rootstock_llm.services.gateway.keys.share import Share
from rootstock_llm.services.gateway.keys.share_store import ShareRefill, ShareStore
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics, KeySigns

START_S = 2.0  # seconds; longest wait for the first exchange of shares with Redis
_NO_KEYS = KeyTable()
# Seconds within which a new API key reaches every gateway. A kubelet reads a Secret once a minute, from a cache.
COMES_S = 120.0
_DIGEST_BYTES = 16
_PURPOSE = b"rootstock-limits"  # personalization string of blake2b, at most 16 bytes

Refused = Callable[[str], None]  # called with the kind of the limit for which a request is refused


class Admission:
    """The amounts that a running request takes from the limits of its API key. end() gives unused amounts back."""

    __slots__ = ("_budget", "_concurrent", "_limits", "_reserved", "_tokens")

    def __init__(self, limits: KeyLimits, budget: KeyBudget, concurrent: Share | None) -> None:
        self._limits = limits
        self._budget = budget
        self._concurrent = concurrent
        self._tokens: Share | None = None
        self._reserved = (0, 0.0)  # reserved tokens, and Unix seconds of the reservation

    def reserve(self, tokens: int) -> None:
        """Reserves the tokens that the request is expected to use at most, prompts and completions together.

        May be called once. Raises ApiError 429 if the limit is reached.
        """
        self._reserved = (tokens, self._limits.clock())
        self._tokens = self._limits.reserve(self._budget, *self._reserved)

    def end(self, used_tokens: int) -> None:
        """Ends the request, and corrects the reserved tokens to the used ones.

        Args:
            used_tokens: Tokens of prompts and completions together.
        """
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
            redis_url: Redis in which gateways share the limits. "" for none: each gateway then applies a part of each limit.
            name: Unique name of this gateway, of letters and digits.
            others: Returns the number of gateways that discovery has found. It may include this gateway.
            refused: Called with the kind of the limit for every refused request.
            clock: Returns Unix seconds.

        Raises:
            ValueError: The URL is invalid.
        """
        self.clock = clock
        self._budgets: dict[str, KeyBudget] = {}  # by name of the API key
        self._by_digest: dict[str, KeyBudget] = {}  # by digest of the API key's name
        self._others = others
        self._refused = refused
        self.refill = ShareRefill(ShareStore(redis_url, name), self._by_digest, clock) if redis_url else None
        self.set_table(table)

    def set_table(self, table: KeyTable) -> None:
        """Applies the limits of a new table. Running requests of a removed API key continue."""
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
        """Number of gateways at the last reply of Redis. Before the first reply, the number that discovery found; at least 1."""
        seen = self.refill.gateways if self.refill is not None else 0
        return seen or max(1, self._others())

    def shares_are_up(self) -> bool | None:
        """Returns whether the gateways share the limits in Redis at present. If not, each gateway applies a part of each limit.

        None if no Redis is configured.
        """
        return None if self.refill is None else self.refill.is_up

    def begin(self, key: str) -> Admission | None:
        """Counts a request that starts, for the API key with the name `key`.

        Returns:
            None if the API key has no limits.

        Raises:
            ApiError: 429 if a limit is reached.
        """
        budget = self._budgets.get(key)
        if budget is None:
            return None
        try:
            return Admission(self, budget, budget.begin(self.clock(), self.gateways))
        except OverLimit as over:
            raise self._error(over) from None
        finally:
            self._request_refill(budget)

    def reserve(self, budget: KeyBudget, tokens: int, now: float) -> Share | None:
        """Counts tokens as KeyBudget.reserve() does. Raises ApiError 429 if the limit is reached."""
        try:
            return budget.reserve(tokens, now, self.gateways)
        except OverLimit as over:
            raise self._error(over) from None
        finally:
            self._request_refill(budget)

    def headers(self, key: str) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's x-ratelimit headers for the API key with this name."""
        budget = self._budgets.get(key)
        return [] if budget is None else budget.headers(self.clock())

    def _request_refill(self, budget: KeyBudget) -> None:
        if self.refill is not None and budget.runs_low:
            self.refill.runs_low()

    def _error(self, over: OverLimit) -> ApiError:
        self._refused(over.kind)
        return ApiError(429, over.message, code="rate_limit_exceeded", retry_after_s=over.retry_s)


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES, person=_PURPOSE).hexdigest()


@dataclass(frozen=True, slots=True)
class KeyOptions:
    """The settings of a KeyRing."""

    path: str  # file or folder of API keys; "" if the gateway has no API keys
    token: str  # the control token, which must not also be an API key; "" for none
    redis_url: str  # Redis in which gateways share the limits; "" for none
    name: str  # unique name of this gateway, of letters and digits
    gateways: Callable[[], int]  # returns the number of gateways that discovery has found
    salt_cache: bool = False  # whether each API key has its own cached prefixes
    low_first: bool = False  # whether a smaller priority is more urgent


class KeyRing:
    """The API keys of a gateway. Without a file of API keys, requests need no API key. Used only on the event loop."""

    def __init__(self, options: KeyOptions, metrics: GatewayMetrics) -> None:
        """Reads the file of API keys.

        Raises:
            BadKeys: The file is unreadable or invalid.
            ValueError: The Redis URL is invalid.
        """
        self._options = options
        self._file = KeyFile(options.path, _forbidden(options.token)) if options.path else None
        self._metrics = metrics
        self.weights: Mapping[str, float] = {} if self._file is None else KeyShares(lambda: self.table or _NO_KEYS)

        def refused(kind: str) -> None:
            metrics.rate_limited.labels(kind).inc()

        redis_url = options.redis_url if self._file is not None else ""
        self._limits = KeyLimits(self.table or _NO_KEYS, redis_url, options.name, options.gateways, refused)
        self.signs: KeySigns | None = None  # state for metrics, or None if the gateway has no API keys
        if self._file is not None:
            self._file.listen(self._limits.set_table)
            self.signs = KeySigns(self._file_is_valid, self._limits.shares_are_up)
            metrics.watch_keys(self.signs)

    @property
    def table(self) -> KeyTable | None:
        """The current table, or None if the gateway has no API keys."""
        return None if self._file is None else self._file.table

    async def start(self) -> None:
        """Gets shares of the limits from Redis before the first client request. Takes at most START_S."""
        if self._limits.refill is not None:
            try:
                async with asyncio.timeout(START_S):
                    await self._limits.refill.turn()
            except TimeoutError:
                return

    async def run(self) -> None:
        """Applies changes of the file of API keys, and exchanges shares with Redis, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._file is not None:
                group.create_task(self._file.run())
            if self._limits.refill is not None:
                group.create_task(self._limits.refill.run())
            await asyncio.Event().wait()

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Returns the caller whose API key is in the header `authorization` or `x-api-key`.

        Raises:
            ApiError: 401 if the request has no valid API key.
        """
        table = self.table
        if table is None:
            return NOBODY
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        shown = [secret for secret in (_secret(scheme, bearer), headers.get(b"x-api-key", b"").strip()) if secret]
        if len(shown) == 2 and not hmac.compare_digest(*shown):
            raise _invalid("'Authorization' and 'x-api-key' have different API keys. Send only one.")
        key = table.of_secret(shown[0]) if shown else None
        if key is None:
            raise _invalid("A valid API key is required, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        if key.has_expired(time.time()):
            raise _expired(key)
        return self._caller(key)

    def named(self, name: str, asked_at: float) -> Caller:
        """Returns the caller of a batch or background response that another gateway has accepted.

        Args:
            name: Name of the API key; "" if the accepting gateway had no API keys.
            asked_at: Unix seconds at which the other gateway accepted the API key.

        Raises:
            ApiError: 401 if the API key has expired or was removed. 503 if this gateway does not have the API key, but the other
                gateway accepted it less than COMES_S ago, so that it may still arrive here.
        """
        table = self.table
        key = None if table is None else table.named(name)
        if key is not None:
            if key.has_expired(time.time()):
                raise _expired(key)
            return self._caller(key)
        if table is None and not name:
            return NOBODY
        if time.time() < asked_at + COMES_S:
            raise key_not_here()
        raise _invalid("This gateway no longer has API keys." if table is None else "The API key is no longer valid.")

    def _caller(self, key: ApiKey) -> Caller:
        options = self._options
        return Caller(key.name, key.priority, options.low_first, options.salt_cache, key.weight, models=key.models)

    def begin(self, key: str) -> Admission | None:
        """Counts a generating request that starts, in the limits and metrics of the API key with the name `key`.

        Returns:
            None if the API key has no limits.

        Raises:
            ApiError: 429 if a limit is reached.
        """
        admission = self._limits.begin(key)
        self._metrics.key_request(key)
        return admission

    def headers(self, key: str) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's x-ratelimit headers for the API key with this name."""
        return self._limits.headers(key)

    def _file_is_valid(self) -> bool:
        return self._file is not None and self._file.is_valid


def _secret(scheme: bytes, given: bytes) -> bytes:
    return given.strip() if scheme.lower() == b"bearer" else b""


def _invalid(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


def _expired(key: ApiKey) -> ApiError:
    message = f"The API key expired at {time_of(key.expires or 0.0)}. Ask the operator of this server for a new one."
    return ApiError(401, message, code="api_key_expired")


def _forbidden(token: str) -> dict[bytes, str]:
    return {digest_of(token.encode()): "the operators' control_token"} if token else {}
