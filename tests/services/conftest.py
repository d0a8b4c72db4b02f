"""A Redis of its own for each file that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.redis_server import RedisServer, redis_server


@pytest.fixture(scope="module")
def one_server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(one_server: RedisServer) -> RedisServer:
    """With nothing in it."""
    one_server.client.flushall()
    one_server.client.script_flush()
    return one_server
