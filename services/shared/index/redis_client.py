"""A Redis client for background work: every round trip ends within a time limit, nothing is retried behind the caller's back."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


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


def redis_client(url: str, limit_s: float) -> TimedRedis:
    """Connects with its first command. Raises ValueError if the URL is none."""
    limits: dict[str, Any] = {"socket_timeout": None, "socket_connect_timeout": limit_s}
    client = cast(TimedRedis, TimedRedis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), **limits))
    client.limit_s = limit_s
    return client
