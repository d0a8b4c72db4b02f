"""A real Redis server that a test can kill, restart and suspend."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from rootstock_llm.services.local.plan import redis_argv
from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.local.settings import LocalSettings

# Values of `program` for tests with each of two servers: the bundled one and Debian's Redis.
EITHER_SERVER = [
    pytest.param("", id="bundled"),
    pytest.param("redis-server", id="debian", marks=pytest.mark.needs("redis-server")),
]


class RedisServer:
    """A Redis server process on a free port.

    Args:
        program: executable; empty for the default of `make run`.
        folder: folder of the persistent files, or None without persistence.
    """

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
                assert time.monotonic() < deadline, "Redis did not start in 10 seconds"
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.client.connection_pool.disconnect()

    def wait_until_written(self) -> None:
        """Waits until all acknowledged writes are on disk.

        If the disk is slow, a server that syncs once per second may have the acknowledged writes of two seconds only in memory. A
        kill loses these writes.
        """
        deadline = time.monotonic() + 20
        while int(self.client.info("persistence").get("aof_buffer_length", 0)):
            assert time.monotonic() < deadline, "Redis did not write its append-only file"
            time.sleep(0.02)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Suspends the server: connections stay open, and no command gets a response."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def lose_folder(self) -> None:
        """Deletes the folder of the persistent files. The server then cannot save, and refuses writes like on a full disk."""
        assert self._folder is not None
        shutil.rmtree(self._folder)
        self.client.config_set("save", "3600 1")
        self.client.bgsave()
        deadline = time.monotonic() + 10
        while self.client.info("persistence")["rdb_last_bgsave_status"] == "ok":
            assert time.monotonic() < deadline, "the snapshot did not fail"
            time.sleep(0.02)

    def block_keys(self) -> dict[bytes, set[bytes]]:
        """Returns the owner fields by block hash. Scans the whole keyspace, which only a test may do."""
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
    """Waits until the condition holds. Fails after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        answer = holds()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert asyncio.get_running_loop().time() < deadline, "the condition did not become true"
        await asyncio.sleep(0.02)
