"""A Redis client for background work: every round trip ends within a time limit, nothing is retried behind the caller's back."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

TLS_QUERY = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs"}


class TimedRedis(Redis):
    """limit_s: of a command, or of a pipeline's execute(); then TimeoutError, which is an OSError.

    The library's own limit is not used: it rests on asyncio.wait_for, which before Python 3.12 swallows a cancellation that comes
    as a send completes, and so makes tasks that cannot be ended.
    """

    limit_s: float

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with asyncio.timeout(self.limit_s):
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> TimedPipeline:
        pipeline = TimedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        pipeline.limit_s = self.limit_s
        return pipeline


class TimedPipeline(Pipeline):
    limit_s: float

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        async with asyncio.timeout(self.limit_s):
            return await super().execute(raise_on_error)


class FollowedConnection(SSLConnection):
    """Of a rediss:// URL, by its files as they are when it connects. Where it names authorities, those of the system are not
    taken."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        asked = self.ssl_context
        context = ssl.create_default_context(cafile=asked.ca_certs)
        context.check_hostname = asked.check_hostname
        context.verify_mode = asked.cert_reqs
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if asked.certfile:
            context.load_cert_chain(asked.certfile, asked.keyfile)
        asked.context = context
        arguments: Mapping[str, Any] = super()._connection_arguments()
        return arguments


def redis_client(url: str, limit_s: float) -> TimedRedis:
    """Connects with its first command. Raises ValueError if the URL is none, or asks something of TLS that is not followed."""
    unknown = {name for name in parse_qs(urlsplit(url).query) if name.startswith("ssl_")} - TLS_QUERY
    if unknown:
        raise ValueError(f"its query has {', '.join(sorted(unknown))}, and of TLS it may have {', '.join(sorted(TLS_QUERY))}")
    limits: dict[str, Any] = {"socket_timeout": None, "socket_connect_timeout": limit_s}
    client = cast(TimedRedis, TimedRedis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), **limits))
    client.limit_s = limit_s
    if issubclass(client.connection_pool.connection_class, SSLConnection):
        client.connection_pool.connection_class = FollowedConnection
    return client
