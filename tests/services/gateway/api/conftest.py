"""Fixture with the Redis server of stored files, batches and responses. Each test file has its own server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.redis_server import RedisServer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(folder=tmp_path_factory.mktemp("state"))
    server.start()
    yield server
    server.kill()
