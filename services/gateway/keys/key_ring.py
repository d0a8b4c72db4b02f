"""All that a gateway knows of API keys: who is who, what each may still use, and what it has used."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.gateway.keys.key_file import KeyFile, KeyShares
from services.gateway.keys.key_limits import Admission, KeyLimits
from services.gateway.keys.key_table import ApiKey, KeyTable, digest_of, time_of
from services.gateway.observe.metrics import GatewayMetrics, KeySigns
from services.gateway.request.caller import NOBODY, Caller
from services.gateway.request.errors import ApiError, key_not_here

START_S = 2.0  # in which shares of a new gateway are there, if Redis is
_NO_KEYS = KeyTable()
COMES_S = 120.0  # in which a key that one gateway knows is known to all: kubelets look at a Secret every minute, from a cache


@dataclass(frozen=True, slots=True)
class KeyOptions:
    """path: of the file of keys, "" for none. token: the operators', which must be no API key. name: this gateway's own, in
    letters and digits. gateways: how many there are as far as is known without Redis."""

    path: str
    token: str
    redis_url: str
    name: str
    gateways: Callable[[], int]
    salt_cache: bool = False
    low_first: bool = False


class KeyRing:
    """Raises BadKeys where the file is wrong, and ValueError where the Redis URL is."""

    def __init__(self, options: KeyOptions, metrics: GatewayMetrics) -> None:
        self._options = options
        self._file = KeyFile(options.path, _foreign(options.token)) if options.path else None
        self._metrics = metrics
        self.weights: Mapping[str, float] = KeyShares(lambda: self.table or _NO_KEYS)

        def refused(kind: str) -> None:
            metrics.rate_limited.labels(kind).inc()

        redis_url = options.redis_url if self._file is not None else ""
        self._limits = KeyLimits(self.table or _NO_KEYS, redis_url, options.name, options.gateways, refused)
        self.signs: KeySigns | None = None  # None where nobody has keys
        if self._file is not None:
            self._file.listen(self._limits.set_table)
            self.signs = KeySigns(self._file_is_valid, self._limits.shares_are_up)
            metrics.watch_keys(self.signs)

    @property
    def table(self) -> KeyTable | None:
        """As it is at the moment; None where nobody has keys."""
        return None if self._file is None else self._file.table

    async def start(self) -> None:
        """Shares of the limits are asked for before anybody needs them. For a bounded time; raises nothing."""
        if self._limits.refill is not None:
            try:
                async with asyncio.timeout(START_S):
                    await self._limits.refill.turn()
            except TimeoutError:
                return

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._file is not None:
                group.create_task(self._file.run())
            if self._limits.refill is not None:
                group.create_task(self._limits.refill.run())
            await asyncio.Event().wait()

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Who shows a valid key in `authorization` or `x-api-key`. Raises ApiError 401."""
        table = self.table
        if table is None:
            return NOBODY
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        shown = [secret for secret in (_secret(scheme, bearer), headers.get(b"x-api-key", b"").strip()) if secret]
        if len(shown) == 2 and not hmac.compare_digest(*shown):
            raise _invalid("'Authorization' and 'x-api-key' hold different keys.")
        key = table.of_secret(shown[0]) if shown else None
        if key is None:
            raise _invalid("A valid API key is required, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")
        if key.has_expired(time.time()):
            raise _expired(key)
        return self._caller(key)

    def named(self, name: str, asked_at: float) -> Caller:
        """Who has the key of this name, "" where there are none. asked_at: Unix seconds, in which it was valid at some gateway,
        as its work was left to any of them. Raises ApiError 401, and 503 while the key may be on its way to this one."""
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
        raise _invalid("There are no API keys any more." if table is None else "The API key is not valid any more.")

    def _caller(self, key: ApiKey) -> Caller:
        options = self._options
        return Caller(key.name, key.priority, options.low_first, options.salt_cache, key.weight, models=key.models)

    def begin(self, key: str) -> Admission | None:
        """A request that is to generate something. None: nothing is limited. Raises ApiError 429."""
        admission = self._limits.begin(key)
        self._metrics.key_request(key)
        return admission

    def headers(self, key: str) -> list[tuple[bytes, bytes]]:
        """What an answer to this key says of its limits."""
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


def _foreign(token: str) -> dict[bytes, str]:
    return {digest_of(token.encode()): "the operators' control_token"} if token else {}
