"""A Redis client for background work. Every round trip has a time limit, and the client never retries."""

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

# Parameters of a rediss:// URL that are supported.
TLS_QUERY = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs"}
# Parameters that this client sets, so that a URL must not have these parameters.
RESERVED = {"decode_responses", "encoding", "protocol", "socket_timeout", "socket_connect_timeout", "retry_on_timeout"}


class TimedRedis(Redis):
    """A client whose commands and pipelines raise TimeoutError (an OSError) after `limit_s`.

    If the server is no longer the primary, the pool's unused connections are closed, and later calls connect again.

    The library's socket_timeout is not used, because it relies on asyncio.wait_for. Before Python 3.12, wait_for swallows a
    cancellation that arrives when a send completes, so a task in a call could not be cancelled.
    """

    limit_s: float  # seconds per command or pipeline

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
    """A pipeline with the time limit of its client."""

    limit_s: float

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        try:
            async with asyncio.timeout(self.limit_s):
                return await super().execute(raise_on_error)
        except ReadOnlyError:
            await self.connection_pool.disconnect(inuse_connections=False)
            raise


class ReloadingConnection(SSLConnection):
    """A TLS connection that reads the certificate files named in its rediss:// URL each time that it connects.

    If the URL names authorities, the system's authorities are not trusted.
    """

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = _context(self.ssl_context)
        arguments: Mapping[str, Any] = super()._connection_arguments()
        return arguments


class ReloadingSyncConnection(SyncSSLConnection):
    """ReloadingConnection for the synchronous client of the library."""

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        return _context(self).wrap_socket(sock, server_hostname=self.host)


def _context(connection: Any) -> ssl.SSLContext:
    """Reads the certificate files of a Redis connection. Returns a TLS context with these files and the connection's checks."""
    context = ssl.create_default_context(cafile=connection.ca_certs)
    context.check_hostname = connection.check_hostname
    context.verify_mode = connection.cert_reqs
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if connection.certfile:
        context.load_cert_chain(connection.certfile, connection.keyfile)
    return context


def reload_files(pool: Any, url: str, reloading: type[Any]) -> None:
    """Makes a connection pool read the certificate files again for each new TLS connection.

    Args:
        reloading: class of the connections, ReloadingConnection or ReloadingSyncConnection.

    Raises:
        ValueError: the URL's query has an unsupported parameter, or TLS parameters without TLS.
    """
    given = set(parse_qs(urlsplit(url).query))
    unknown = {name for name in given if name.startswith("ssl_")} - TLS_QUERY | given & RESERVED
    if unknown:
        raise ValueError(
            f"its query has unsupported parameters: {', '.join(sorted(unknown))}; for TLS, use {', '.join(sorted(TLS_QUERY))}"
        )
    try:
        pool.connection_class(**pool.connection_kwargs)  # the constructor does not connect
    except (TypeError, RedisError) as error:
        raise ValueError(f"its query is wrong: {error}") from None
    if issubclass(pool.connection_class, reloading.__bases__):
        pool.connection_class = reloading


def redis_client(url: str, limit_s: float) -> TimedRedis:
    """Returns a client that connects with its first command. Raises ValueError if the URL is not supported."""
    limits: dict[str, Any] = {"socket_timeout": None, "socket_connect_timeout": limit_s}
    client = cast(TimedRedis, TimedRedis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), **limits))
    client.limit_s = limit_s
    reload_files(client.connection_pool, url, ReloadingConnection)
    return client
