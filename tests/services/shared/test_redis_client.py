"""Tests of a Redis client whose server stops being the primary."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import ReadOnlyError

from rootstock_llm.services.shared.index.redis_client import TimedRedis, redis_client
from tests.services.redis_server import redis_server


async def in_pipeline(client: TimedRedis, transaction: bool) -> Any:
    async with client.pipeline(transaction=transaction) as pipeline:
        pipeline.get("a")
        pipeline.set("a", "b")
        return await pipeline.execute()


CALLS: dict[str, Callable[[TimedRedis], Awaitable[Any]]] = {
    "command": lambda client: client.set("a", "b"),
    "script": lambda client: client.eval("return redis.call('SET', 'a', 'b')", 0),  # type: ignore[arg-type, return-value]
    "pipeline": lambda client: in_pipeline(client, False),
    "transaction": lambda client: in_pipeline(client, True),
}


def test_client_reconnects_when_the_server_is_no_longer_primary() -> None:
    """The client opens a new connection, because the address may belong to another server now."""
    with redis_server() as server:

        def connections() -> set[str]:
            return {found["id"] for found in server.client.client_list()} - {str(server.client.client_id())}

        async def work() -> None:
            client = redis_client(server.url, 5.0)
            for name, call in CALLS.items():
                await call(client)
                before = connections()
                assert len(before) == 1 and await client.get("a") == b"b" and connections() == before, name
                server.client.execute_command("REPLICAOF", "127.0.0.1", "1")
                with pytest.raises(ReadOnlyError):
                    await call(client)
                server.client.execute_command("REPLICAOF", "NO", "ONE")
                await call(client)
                assert len(connections()) == 1 and not before & connections(), name
            await client.aclose()

        asyncio.run(asyncio.wait_for(work(), 60))
