"""A Redis client for background work: every round trip ends within a time limit, nothing is retried behind the caller's back."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import SSLConnection as SyncSSLConnection
from redis.exceptions import ReadOnlyError, RedisError

TLS_QUERY = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs"}
DECIDED = {"decode_responses", "encoding", "protocol", "socket_timeout", "socket_connect_timeout", "retry_on_timeout"}


class TimedRedis(Redis):
    """limit_s: of a command, or of a pipeline's execute(); then TimeoutError, which is an OSError. What is no primary any more is
    left: the next call connects anew, by then to another server, perhaps.

    The library's own limit is not used: it rests on asyncio.wait_for, which before Python 3.12 swallows a cancellation that comes
    as a send completes, and so makes tasks that cannot be ended.
    """

    limit_s: float

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            async with asyncio.timeout(self.limit_s):
                return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except ReadOnlyError:
            await self.connection_pool.disconnect(inuse_connections=False)
            raise

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> TimedPipeline:
        pipeline = TimedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        pipeline.limit_s = self.limit_s
        return pipeline


class TimedPipeline(Pipeline):
    limit_s: float

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        try:
            async with asyncio.timeout(self.limit_s):
                return await super().execute(raise_on_error)
        except ReadOnlyError:
            await self.connection_pool.disconnect(inuse_connections=False)
            raise


class FollowedConnection(SSLConnection):
    """Of a rediss:// URL, by its files as they are when it connects. Where it names authorities, those of the system are not
    taken."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = _context(self.ssl_context)
        arguments: Mapping[str, Any] = super()._connection_arguments()
        return arguments


class FollowedSyncConnection(SyncSSLConnection):
    """The same for a client without asyncio."""

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        return _context(self).wrap_socket(sock, server_hostname=self.host)


def _context(asked: Any) -> ssl.SSLContext:
    """asked: has the URL's words of TLS."""
    context = ssl.create_default_context(cafile=asked.ca_certs)
    context.check_hostname = asked.check_hostname
    context.verify_mode = asked.cert_reqs
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if asked.certfile:
        context.load_cert_chain(asked.certfile, asked.keyfile)
    return context


def follow_files(pool: Any, url: str, followed: type[Any]) -> None:
    """Has a pool's connections of TLS follow their files. followed: their class then. Raises ValueError for a URL whose query
    asks for what is not followed, or is decided here, or for TLS without it."""
    asked = set(parse_qs(urlsplit(url).query))
    unknown = {name for name in asked if name.startswith("ssl_")} - TLS_QUERY | asked & DECIDED
    if unknown:
        raise ValueError(f"its query has {', '.join(sorted(unknown))}, and of TLS it may have {', '.join(sorted(TLS_QUERY))}")
    try:
        pool.connection_class(**pool.connection_kwargs)  # connects nowhere
    except (TypeError, RedisError) as error:
        raise ValueError(f"what its query asks for cannot be: {error}") from None
    if issubclass(pool.connection_class, followed.__bases__):
        pool.connection_class = followed


def redis_client(url: str, limit_s: float) -> TimedRedis:
    """Connects with its first command. Raises ValueError if the URL is none, or asks something of TLS that is not followed."""
    limits: dict[str, Any] = {"socket_timeout": None, "socket_connect_timeout": limit_s}
    client = cast(TimedRedis, TimedRedis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), **limits))
    client.limit_s = limit_s
    follow_files(client.connection_pool, url, FollowedConnection)
    return client
