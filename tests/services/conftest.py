"""Fixtures with one Redis server per test file."""

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
    """Returns the Redis server of the test file, without keys."""
    one_server.client.flushall()
    one_server.client.script_flush()
    return one_server
