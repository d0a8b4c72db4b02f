"""A real Redis of a test's own, that can be killed, restarted empty, stopped and filled."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from services.local.ports import HOST, free_ports
from services.local.redis_server import redis_argv
from services.local.settings import LocalSettings

# By `program`: the bundled one and Debian's, which is Redis.
EITHER_SERVER = [
    pytest.param("", id="bundled"),
    pytest.param("redis-server", id="debian", marks=pytest.mark.needs("redis-server")),
]


class RedisServer:
    """program: another than the one that `make run` starts. folder: where it keeps what it has, None for nowhere."""

    def __init__(self, program: str = "", folder: Path | None = None) -> None:
        self._folder = folder
        self._program = program or LocalSettings(_cli_parse_args=False).redis_server  # type: ignore[call-arg]
        (self.port,) = free_ports(1)
        self.url = f"redis://{HOST}:{self.port}/0"
        self.client = redis.Redis.from_url(self.url, protocol=2)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = redis_argv(self.port, self._program, self._folder)
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            try:
                self.client.ping()
                return
            except redis.exceptions.RedisError:
                assert time.monotonic() < deadline, "it does not start"
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.client.connection_pool.disconnect()

    def wait_until_written(self) -> None:
        """Where the disk is slow in syncing what came a second ago, a server that syncs each second keeps what it has
        acknowledged to itself for as long as two: a kill takes that along."""
        deadline = time.monotonic() + 20
        while int(self.client.info("persistence").get("aof_buffer_length", 0)):
            assert time.monotonic() < deadline, "it is not written"
            time.sleep(0.02)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Connections stay, and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def block_keys(self) -> dict[bytes, set[bytes]]:
        """Hash of the block → owner fields. Scans the keyspace, which nothing but a test may."""
        keys = list(self.client.scan_iter("kv:*", count=1000))
        return {bytes.fromhex(key.decode().rpartition(":")[2]): set(self.client.hkeys(key)) for key in keys}


@contextmanager
def redis_server(program: str = "") -> Iterator[RedisServer]:
    server = RedisServer(program)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        server.client.close()


async def until(holds: Callable[[], bool | Awaitable[bool]], seconds: float = 60.0) -> None:
    """Waits for a condition; fails if it does not come true."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        answer = holds()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert asyncio.get_running_loop().time() < deadline, "it does not come true"
        await asyncio.sleep(0.02)
